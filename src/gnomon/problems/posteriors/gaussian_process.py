"""Gaussian processes with the squared exponential kernel ``alpha^2 exp(-(x - x')^2 / (2 rho^2))``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import gamma, normal, poisson_log
from .registry import posterior
from .store import read, reference
from .transforms import POSITIVE


def kernel(x: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
    """Return the covariances ``(draws, n, n)``."""
    squares = (x[:, None] - x).square()
    return alpha.square()[:, None, None] * torch.exp(-0.5 * squares / rho.square()[:, None, None])


def cholesky(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return Cholesky factors, and the log density of being positive definite to working precision: 0 or -inf.

    A covariance without a factor counts as the identity, so that the other draws have their gradients.
    """
    with torch.no_grad():
        failed = torch.linalg.cholesky_ex(covariance).info > 0
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky_ex(torch.where(failed[:, None, None], identity, covariance)).L
    return factor, torch.where(failed, -math.inf, 0.0).to(covariance)


def _log_prior(v: Values) -> Tensor:
    return gamma(v["rho"], 25, 4) + normal(v["alpha"], 0, 2)


@posterior("gp_pois_regr-gp_regr")
def _regression(name: str) -> Posterior:
    """Define the model with normal observations, whose variance it calls sigma."""
    data = read("gp_pois_regr")
    x, y = data["x"], data["y"]
    identity = torch.eye(len(x), dtype=torch.float64)

    def log_joint(v: Values) -> Tensor:
        factor, possible = cholesky(kernel(x, v["alpha"], v["rho"]) + v["sigma"][:, None, None] * identity)
        white = torch.linalg.solve_triangular(factor, y[:, None].expand(len(factor), -1, 1), upper=False)
        log_likelihood = -0.5 * white.square().sum((1, 2)) - factor.diagonal(dim1=1, dim2=2).log().sum(-1)
        return log_likelihood + possible + _log_prior(v) + normal(v["sigma"], 0, 1)

    parameters = [Parameter(key, (), POSITIVE) for key in ("rho", "alpha", "sigma")]
    return Posterior(name, parameters, log_joint, reference=reference(name))


@posterior("gp_pois_regr-gp_pois_regr")
def _poisson(name: str) -> Posterior:
    """Define the model of counts whose log rate is the process, without centering: ``f = L f_tilde``."""
    data = read("gp_pois_regr")
    x, counts = data["x"], data["k"]
    jitter = 1e-10 * torch.eye(len(x), dtype=torch.float64)

    def process(v: Values) -> tuple[Tensor, Tensor]:
        factor, possible = cholesky(kernel(x, v["alpha"], v["rho"]) + jitter)
        return (factor @ v["f_tilde"][:, :, None]).squeeze(-1), possible

    def log_joint(v: Values) -> Tensor:
        f, possible = process(v)
        return poisson_log(counts, f).sum(-1) + possible + _log_prior(v) + normal(v["f_tilde"], 0, 1).sum(-1)

    parameters = [Parameter("rho", (), POSITIVE), Parameter("alpha", (), POSITIVE), Parameter("f_tilde", (len(x),))]
    return Posterior(name, parameters, log_joint, derived=lambda v: {"f": process(v)[0]}, reference=reference(name))
