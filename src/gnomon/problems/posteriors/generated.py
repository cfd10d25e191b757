"""Hierarchical posteriors with generated data, of any size: for what has no reference draws and must still be fast."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import normal
from .hierarchical import column, positive
from .item_response import rasch
from .registry import posterior

COVARIATES, EXPOSURE = 3, 4.0
QUESTIONS = 5


def poisson_mixed_model(dim: int, *, seed: int = 0) -> Posterior:
    """Return a posterior with 5 global unknowns and ``dim - 5`` local ones, one count for each.

    ``alpha_j ~ normal(mu + x_j^T beta, sigma)``, ``y_j ~ Poisson(4 exp(alpha_j))``, with standard normal priors of
    mu, beta and log sigma. The data comes from the model with mu = 1, beta = (0.5, -0.5, 0.25) and sigma = 0.5.
    """
    locals_ = _locals(dim, COVARIATES + 2)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(COVARIATES, locals_, dtype=torch.float64, generator=generator)
    slopes = torch.tensor([0.5, -0.5, 0.25], dtype=torch.float64)
    alpha = 1 + slopes @ x + 0.5 * torch.randn(locals_, dtype=torch.float64, generator=generator)
    y = torch.poisson(EXPOSURE * alpha.exp(), generator=generator)

    def log_joint(v: Values) -> Tensor:
        """Return the log joint density.

        Sums are taken as early as they can be: with many unknowns the passes over them decide the time.
        """
        alpha, sigma, log_sigma = v["alpha"], v["sigma"], v["sigma"].log()
        log_likelihood = alpha @ y - EXPOSURE * alpha.exp().sum(-1)
        squares = (alpha - torch.addmm(column(v["mu"]), v["beta"], x)).square().sum(-1)
        log_local = -0.5 * squares / sigma.square() - locals_ * log_sigma
        log_prior = normal(v["mu"], 0, 1) + normal(v["beta"], 0, 1).sum(-1) + normal(log_sigma, 0, 1) - log_sigma
        return log_likelihood + log_local + log_prior

    common = [Parameter("mu"), Parameter("beta", (COVARIATES,)), *positive("sigma")]
    names = [parameter.name for parameter in common]
    local = Parameter("alpha", (locals_,))
    return Posterior(f"generated-poisson-{dim}", [*common, local], log_joint, global_parameters=names)


def item_response_model(dim: int, *, seed: int = 0) -> Posterior:
    """Return a posterior of 5 questions with a common slope and ``dim - 6`` persons (:func:`rasch`), with scale 1."""
    persons = _locals(dim, QUESTIONS + 1)
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(persons, 1, dtype=torch.float64, generator=generator)
    difficulty = torch.linspace(-1, 1, QUESTIONS, dtype=torch.float64)
    answers = torch.bernoulli(torch.sigmoid(theta - difficulty), generator=generator)
    return rasch(f"generated-item-response-{dim}", answers, 1.0)


def _locals(dim: int, common: int) -> int:
    if dim <= common:
        raise ValueError(f"dim must be above the number of global unknowns, {common}, got {dim}")
    return dim - common


@posterior("generated-poisson-1000", "generated-poisson-100000")
def _generated_poisson(name: str) -> Posterior:
    return poisson_mixed_model(int(name.split("-")[-1]))


@posterior("generated-item-response-1000", "generated-item-response-100000")
def _generated_item_response(name: str) -> Posterior:
    return item_response_model(int(name.split("-")[-1]))
