"""Missing values by the marginal likelihood: conditional moments, and EM."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from ..manifolds import Gaussian
from .model import Model
from .sample import LARGEST_DENSE, Sample, Target, shrunk

ITERATIONS = 1000
ENOUGH = 1e-7
"""EM has converged when an iteration gains less than this in average log-likelihood."""


def patterns(observed: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the rows, the observed and the missing features of each pattern of missing values."""
    unique, which = observed.unique(dim=0, return_inverse=True)
    for i, seen in enumerate(unique):
        yield (which == i).nonzero().squeeze(-1), seen.nonzero().squeeze(-1), (~seen).nonzero().squeeze(-1)


def marginal_log_prob(gaussian: Gaussian, rows: Tensor) -> Tensor:
    """Return the log-density of what is observed of each row."""
    covariance, mean = gaussian.covariance().detach(), gaussian.loc.detach()
    result = torch.zeros(len(rows), dtype=torch.float64)
    for which, seen, _ in patterns(~rows.isnan()):
        if len(seen):
            root = torch.linalg.cholesky(covariance[seen][:, seen])
            result[which] = _log_prob(root, rows[which][:, seen].double() - mean[seen])
    return result


def squared_distances(gaussian: Gaussian, rows: Tensor) -> Tensor:
    """Return ``(x - mu)^T Sigma^-1 (x - mu)`` of what is observed of each row."""
    covariance, mean = gaussian.covariance().detach(), gaussian.loc.detach()
    result = torch.zeros(len(rows), dtype=torch.float64)
    for which, seen, _ in patterns(~rows.isnan()):
        root = torch.linalg.cholesky(covariance[seen][:, seen])
        result[which] = _whiten(root, rows[which][:, seen].double() - mean[seen]).square().sum(-1)
    return result


def _whiten(root: Tensor, deviations: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(root, deviations.mT, upper=False).mT


def _log_prob(root: Tensor, deviations: Tensor) -> Tensor:
    squares = _whiten(root, deviations).square().sum(-1)
    return -0.5 * (squares + deviations.shape[-1] * math.log(2 * math.pi)) - root.diagonal().log().sum()


def expected_moments(sample: Sample, covariance: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return ``E[x]``, ``E[x x^T]`` and the log-likelihood given what is observed, as averages over the rows."""
    k = sample.k
    first, second = torch.zeros(k, dtype=torch.float64), torch.zeros(k, k, dtype=torch.float64)
    likelihood = 0.0
    for which, seen, unseen in patterns(sample.observed):
        weights = sample.weights[which]
        filled = mean.repeat(len(which), 1)
        if len(seen):
            root = torch.linalg.cholesky(covariance[seen][:, seen])
            deviations = sample.rows[which][:, seen].double() - mean[seen]
            likelihood += float(weights @ _log_prob(root, deviations))
            filled[:, seen] += deviations
            slopes = torch.cholesky_solve(covariance[seen][:, unseen], root)
            filled[:, unseen] += deviations @ slopes
            left = covariance[unseen][:, unseen] - covariance[unseen][:, seen] @ slopes
        else:
            left = covariance
        second[unseen.unsqueeze(-1), unseen] += float(weights.sum()) * left
        first += weights @ filled
        second += filled.mT @ (weights.unsqueeze(-1) * filled)
    return first, second, likelihood


def fit_by_em(sample: Sample, model: Model, shrinkage: float, target: Target) -> Gaussian:
    """Maximize ``(1 - shrinkage) l - shrinkage/2 (log det Sigma + tr(Sigma^-1 Diag(target)))`` by the EM algorithm.

    l is the average marginal log-likelihood of what is observed. An iteration fits the family to the expected second
    moments, and so never decreases this.
    """
    if sample.k > LARGEST_DENSE:
        raise ValueError(
            f"X has missing values and {sample.k} features, but they are handled for at most {LARGEST_DENSE}; impute "
            "them, for example by sklearn.impute.SimpleImputer"
        )
    diagonal = sample.target(target)
    mean, covariance = sample.mean, torch.diag(sample.variances)
    penalty, last = 0.0, -math.inf
    for _ in range(ITERATIONS):
        first, second, likelihood = expected_moments(sample, covariance, mean)
        value = (1 - shrinkage) * likelihood - 0.5 * shrinkage * penalty
        mean = torch.zeros_like(first) if sample.centered else first
        fitted = model.fit(shrunk(second - torch.outer(first, mean), shrinkage, diagonal), mean)
        covariance = fitted.covariance().detach()
        if abs(value - last) < ENOUGH:
            return fitted
        penalty, last = (fitted.logdet() + (fitted.precision().diagonal() * diagonal).sum()).item(), value
    warnings.warn(
        f"the fit with missing values has not converged in {ITERATIONS} iterations; many values are missing, or "
        "features are never observed together: raise shrinkage",
        ConvergenceWarning,
        stacklevel=2,
    )
    return fitted
