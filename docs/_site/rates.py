"""Prints the table of learning rates in docs/which-optimizer.md; about a minute.

python docs/_site/rates.py
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gnomon

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
STEPS = 300
SIZE = 20
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], float], Optimizer]] = {
    "SGD, momentum 0.9": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
}


def covariance_task() -> tuple[nn.Module, Callable[[], Tensor], Callable[[], Tensor]]:
    """Twice the negative log-likelihood of rows whose scales differ by 100, in batches of 64."""
    x = torch.randn(4000, SIZE) * torch.logspace(-1, 1, SIZE)
    tau = gnomon.SPD(SIZE)

    def loss(rows: Tensor) -> Tensor:
        return tau.inv_quad(rows).mean() + tau.logdet()

    return tau, lambda: loss(x[torch.randint(len(x), (64,))]), lambda: loss(x)


def posterior_task() -> tuple[nn.Module, Callable[[], Tensor], Callable[[], Tensor]]:
    """Minus the evidence lower bound of logistic regression on 500 rows, from 8 draws."""
    x = torch.randn(500, SIZE) * torch.logspace(-0.5, 0.5, SIZE)
    y = 2 * torch.bernoulli(torch.sigmoid(x @ torch.randn(SIZE) / 2)) - 1
    q = gnomon.Gaussian(SIZE)

    def loss(draws: int) -> Tensor:
        z = q.rsample((draws,))
        fit = nn.functional.logsigmoid(y * (z @ x.T)).sum(-1)
        return (z.square().sum(-1) / 50 - fit).mean() - q.entropy()

    return q, lambda: loss(8), lambda: loss(2000)


def final_loss(task: Callable, make_optimizer: Callable, lr: float) -> float:
    torch.manual_seed(0)
    point, noisy, exact = task()
    optimizer = gnomon.moving_frame(make_optimizer(point.parameters(), lr))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        noisy().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return exact().item()


def main() -> None:
    print("| task | optimizer |", *(f"{lr:g} |" for lr in RATES))
    for task, name in ((covariance_task, "covariance"), (posterior_task, "posterior")):
        for title, make_optimizer in OPTIMIZERS.items():
            print(f"| {name} | {title} |", *(f"{final_loss(task, make_optimizer, lr):.1f} |" for lr in RATES))


if __name__ == "__main__":
    main()
