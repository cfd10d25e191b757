"""A hierarchical posterior: eight schools, by a Gaussian that is fitted with natural gradients.

python examples/posterior.py
"""

import matplotlib.pyplot as plt
import torch
from pictures import COLORS, options, save
from torch import Tensor
from torch.distributions import HalfCauchy, Normal

import gnomon

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])  # of coaching in eight schools (Rubin 1981)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def school_effects(z: Tensor) -> Tensor:
    """The effects in the schools, from the mean effect, the log of the spread, and eight standard normals."""
    mean, log_spread, standard = z[..., :1], z[..., 1:2], z[..., 2:]
    return mean + log_spread.exp() * standard


def log_density(z: Tensor) -> Tensor:
    """The log of prior times likelihood, in the space of z, for each row."""
    mean, log_spread, standard = z[..., 0], z[..., 1], z[..., 2:]
    prior = Normal(0, 5).log_prob(mean) + HalfCauchy(5.0).log_prob(log_spread.exp()) + log_spread
    prior = prior + Normal(0, 1).log_prob(standard).sum(-1)
    return prior + Normal(school_effects(z), ERRORS).log_prob(EFFECTS).sum(-1)


def main() -> None:
    arguments = options(__doc__, "posterior")
    torch.manual_seed(0)
    steps = 100 if arguments.quick else 500
    q = gnomon.Gaussian(10)
    optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=0.1, momentum=0.5))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    bounds = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -(log_density(q.rsample((32,))).mean() + q.entropy())  # minus the evidence lower bound
        loss.backward()
        optimizer.step()
        schedule.step()
        bounds.append(-loss.item())
    draws = school_effects(q.sample((4000,)))
    means, spreads = draws.mean(0), draws.std(0)
    print(f"loss {-bounds[0]:.2f} at first, {-sum(bounds[-20:]) / 20:.2f} after {steps} steps")

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.4), constrained_layout=True)
    left.plot(bounds, linewidth=1)
    left.set(xlabel="step", ylabel="evidence lower bound", ylim=(min(bounds[10:]) - 2, max(bounds) + 2))
    schools = torch.arange(8)
    right.errorbar(schools - 0.12, EFFECTS, ERRORS, fmt="o", color=COLORS[4], label="measured")
    right.errorbar(schools + 0.12, means, spreads, fmt="o", color=COLORS[0], label="posterior")
    right.set(xlabel="school", ylabel="effect", xticks=schools, xticklabels="ABCDEFGH")
    right.legend(frameon=False)
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
