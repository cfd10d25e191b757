"""The demonstration's third experiment: the posterior of a small hierarchical model, beside its exact values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from ... import vi
from ...groups import Arrow, Diagonal
from ..training.trainer import seed_of
from .scale import Cells, Step

EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)
"""Effects of coaching in eight schools and their standard errors: Rubin, 1981."""

PRIOR_MEAN, PRIOR_LOG_SPREAD = Normal(0.0, 10.0), Normal(math.log(10.0), 0.5)
SHOWN = {"mean effect": 0, "effect in the first school": 2}
"""The unknowns that are drawn, and their places in the vector (mean, log spread, effects)."""
STRUCTURES = {"arrow": Arrow(10, rank=2), "mean field": Diagonal(10)}
GRID = 400
DRAWS = 20_000


@dataclass(frozen=True)
class Marginal:
    """The density of one unknown on a grid."""

    x: list[float]
    density: list[float]


@dataclass(frozen=True)
class Posterior:
    """What a method says of the posterior: densities of the unknowns that are drawn, means, standard deviations."""

    name: str
    marginals: dict[str, Marginal]
    means: list[float]
    sds: list[float]
    elbo: float | None = None
    evaluations: int | None = None

    def error(self, exact: Posterior) -> float:
        """Return the largest error of a mean, in standard deviations, or of a log standard deviation."""
        means = (abs(a - b) / sd for a, b, sd in zip(self.means, exact.means, exact.sds, strict=True))
        sds = (abs(math.log(a / b)) for a, b in zip(self.sds, exact.sds, strict=True))
        return max(*means, *sds)


def log_density(x: Tensor) -> Tensor:
    """Return the log-density of the model.

    Effects are ``mean + spread z`` with standard normal z, and are observed with known errors.
    """
    observed, errors = torch.tensor(EFFECTS, dtype=x.dtype), torch.tensor(ERRORS, dtype=x.dtype)
    levels = Normal(0.0, 1.0).log_prob(x[:, 2:]) + Normal(_with_effects(x)[:, 2:], errors).log_prob(observed)
    return levels.sum(-1) + PRIOR_MEAN.log_prob(x[:, 0]) + PRIOR_LOG_SPREAD.log_prob(x[:, 1])


def _with_effects(x: Tensor) -> Tensor:
    """Return the samples with effects in the place of z."""
    mean, log_spread, z = x[:, :1], x[:, 1:2], x[:, 2:]
    return torch.cat([mean, log_spread, mean + log_spread.exp() * z], -1)


def fit_posteriors(seed: int, step: Step) -> list[Posterior]:
    """Return the exact posterior, and Gaussians of two structures near it."""
    step("posterior, exact")
    found = [exact_posterior()]
    for name, group in STRUCTURES.items():
        step(f"posterior, {name}")
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(seed, "posterior"))
            fit = vi.fit(log_density, 10, structure=group)
            draws = _with_effects(fit.draws(DRAWS))
        marginals = {unknown: _smoothed(draws[:, i], found[0].marginals[unknown].x) for unknown, i in SHOWN.items()}
        evaluations = fit.history.gradient_evaluations[-1]
        moments = draws.mean(0).tolist(), draws.std(0).tolist()
        found.append(Posterior(name, marginals, *moments, fit.elbo, evaluations))
    return found


def _smoothed(draws: Tensor, grid: list[float]) -> Marginal:
    """Return the density of draws, smoothed with a fifth of their standard deviation."""
    x = torch.tensor(grid, dtype=draws.dtype)
    kernel = Normal(draws, draws.std() / 5)
    return Marginal(grid, kernel.log_prob(x.unsqueeze(-1)).exp().mean(-1).tolist())


def exact_posterior() -> Posterior:
    """Integrate over a grid of mean and log spread; given those, the effects are independent and normal."""
    y, variance = (torch.tensor(values, dtype=torch.float64) for values in (EFFECTS, [e * e for e in ERRORS]))
    mean = torch.linspace(-35, 50, GRID, dtype=torch.float64)
    log_spread = torch.linspace(-1.0, 5.0, GRID, dtype=torch.float64)
    m, s = (values.flatten() for values in torch.meshgrid(mean, log_spread, indexing="ij"))
    spread = (2 * s).exp()
    total = (spread.unsqueeze(-1) + variance).sqrt()
    prior = PRIOR_MEAN.log_prob(m) + PRIOR_LOG_SPREAD.log_prob(s)
    log_weights = Normal(m.unsqueeze(-1), total).log_prob(y).sum(-1) + prior
    weights = (log_weights - log_weights.logsumexp(0)).exp()
    precision = 1 / spread.unsqueeze(-1) + 1 / variance
    effect_means = (m.unsqueeze(-1) / spread.unsqueeze(-1) + y / variance) / precision
    values = torch.cat([torch.stack([m, s], -1), effect_means], -1)
    means = weights @ values
    within = torch.cat([torch.zeros(len(m), 2, dtype=torch.float64), 1 / precision], -1)
    sds = (weights @ (values.square() + within) - means.square()).sqrt()
    by_mean = weights.view(GRID, GRID).sum(1) / float(mean[1] - mean[0])
    x = torch.linspace(-30, 60, 181, dtype=torch.float64)
    heavy = weights > 1e-9
    effect = Normal(effect_means[heavy, 0], precision[heavy, 0].rsqrt())
    density = effect.log_prob(x.unsqueeze(-1)).exp() @ weights[heavy]
    marginals = zip(SHOWN, ((mean, by_mean), (x, density)), strict=True)
    drawn = {name: Marginal(grid.tolist(), heights.tolist()) for name, (grid, heights) in marginals}
    return Posterior("exact", drawn, means.tolist(), sds.tolist())


def posterior_table(posteriors: list[Posterior]) -> Cells:
    """Return a table with a row for each method."""
    header = ["posterior", "mean effect", "first school", "largest error", "ELBO", "gradients"]
    return header, [_row(posterior, posteriors[0]) for posterior in posteriors]


def _row(posterior: Posterior, exact: Posterior) -> list[str]:
    moments = [f"{posterior.means[i]:.2f} ± {posterior.sds[i]:.2f}" for i in SHOWN.values()]
    if posterior.elbo is None:
        return [posterior.name, *moments, "", "", ""]
    quality = [f"{posterior.error(exact):.2f}", f"{posterior.elbo:.2f}", f"{posterior.evaluations}"]
    return [posterior.name, *moments, *quality]
