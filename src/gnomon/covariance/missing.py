"""Missing values by the marginal likelihood: conditional moments, and EM."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from ..manifolds import Gaussian
from .model import Model
from .sample import CHUNK, LARGEST_DENSE, Sample, Target, shrunk

ITERATIONS = 1000
ENOUGH = 1e-7
"""EM has converged when an iteration gains less than this in average log-likelihood."""


@dataclass(frozen=True)
class Stack:
    """Some patterns of missing values that have equally many rows each, so that all are one batch."""

    rows: Tensor
    """The rows of each pattern, of shape ``(patterns, rows)``."""
    observed: Tensor
    """Which features are observed, of shape ``(patterns, k)``."""
    seen: Tensor
    """The observed features, of shape ``(patterns, most)``, and then others where a pattern has fewer than most."""
    valid: Tensor
    """Which entries of ``seen`` are observed features."""

    @classmethod
    def of(cls, rows: Tensor, observed: Tensor) -> Stack:
        most = int(observed.sum(-1).max())
        seen = observed.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
        return cls(rows, observed, seen, observed.gather(-1, seen))

    def roots(self, covariance: Tensor) -> Tensor:
        """Return the Cholesky factors of the covariances of what is observed, with ones for other entries."""
        part = covariance[self.seen.unsqueeze(-1), self.seen.unsqueeze(-2)]
        part = torch.where(self.valid.unsqueeze(-1) & self.valid.unsqueeze(-2), part, 0.0)
        part.diagonal(dim1=-2, dim2=-1).masked_fill_(~self.valid, 1.0)
        return torch.linalg.cholesky(part)

    def whiten(self, root: Tensor, deviations: Tensor) -> Tensor:
        """Return ``L^-1 d`` of what is observed, of shape ``(patterns, most, rows)``."""
        seen = self.seen.unsqueeze(-2).expand(*deviations.shape[:-1], -1)
        parts = torch.where(self.valid.unsqueeze(-2), deviations.gather(-1, seen), 0.0)
        return torch.linalg.solve_triangular(root, parts.mT, upper=False)

    def log_prob(self, root: Tensor, whitened: Tensor) -> Tensor:
        """Return the log-density of what is observed, of shape ``(patterns, rows)``."""
        constant = 0.5 * self.valid.sum(-1) * math.log(2 * math.pi)
        constant = constant + root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * whitened.square().sum(-2) - constant.unsqueeze(-1)


def stacks(observed: Tensor) -> list[Stack]:
    """Return the patterns of missing values, those with equally many rows together, as far as memory allows."""
    patterns, which, counts = observed.unique(dim=0, return_inverse=True, return_counts=True)
    order, ends = which.argsort(stable=True), counts.cumsum(0)
    found = []
    for count in counts.unique().tolist():
        places = (counts == count).nonzero().squeeze(-1)
        rows = order[(ends[places] - count).unsqueeze(-1) + torch.arange(count)]
        size = max(1, CHUNK // (observed.shape[1] * max(observed.shape[1], count)))
        parts = zip(rows.split(size), patterns[places].split(size), strict=True)
        found += [Stack.of(*part) for part in parts]
    return found


def marginal_log_prob(gaussian: Gaussian, rows: Tensor) -> Tensor:
    """Return the log-density of what is observed of each row."""
    covariance, mean = gaussian.covariance().detach(), gaussian.loc.detach()
    result = torch.zeros(len(rows), dtype=torch.float64)
    for stack in stacks(~rows.isnan()):
        root = stack.roots(covariance)
        result[stack.rows] = stack.log_prob(root, stack.whiten(root, rows[stack.rows].double() - mean))
    return result


def squared_distances(gaussian: Gaussian, rows: Tensor) -> Tensor:
    """Return ``(x - mu)^T Sigma^-1 (x - mu)`` of what is observed of each row."""
    covariance, mean = gaussian.covariance().detach(), gaussian.loc.detach()
    result = torch.zeros(len(rows), dtype=torch.float64)
    for stack in stacks(~rows.isnan()):
        whitened = stack.whiten(stack.roots(covariance), rows[stack.rows].double() - mean)
        result[stack.rows] = whitened.square().sum(-2)
    return result


def expected_moments(
    sample: Sample, patterns: list[Stack], covariance: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Return ``E[x]``, ``E[x x^T]`` and the log-likelihood given what is observed, as averages over the rows."""
    k = sample.k
    first, second = torch.zeros(k, dtype=torch.float64), torch.zeros(k, k, dtype=torch.float64)
    likelihood = 0.0
    for stack in patterns:
        weights = sample.weights[stack.rows]
        root, deviations = stack.roots(covariance), sample.rows[stack.rows].double() - mean
        whitened = stack.whiten(root, deviations)
        likelihood += float((weights * stack.log_prob(root, whitened)).sum())
        others = torch.where(stack.valid.unsqueeze(-1), covariance[stack.seen], 0.0)
        others = torch.linalg.solve_triangular(root, others, upper=False)
        filled = mean + torch.where(stack.observed.unsqueeze(-2), deviations, whitened.mT @ others)
        first += (weights.unsqueeze(-1) * filled).sum((0, 1))
        second += filled.flatten(0, 1).mT @ (weights.unsqueeze(-1) * filled).flatten(0, 1)
        # What is left of the covariance of missing values, C - C_us C_ss^-1 C_su, summed over the patterns.
        missing = weights.sum(-1, keepdim=True).sqrt() * ~stack.observed
        explained = (others * missing.unsqueeze(-2)).flatten(0, 1)
        second += covariance * (missing.mT @ missing) - explained.mT @ explained
    return first, second, likelihood


def fit_by_em(sample: Sample, model: Model, shrinkage: float, target: Target, near: Gaussian | None = None) -> Gaussian:
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
    if near is not None:
        mean, covariance = near.loc.detach(), near.covariance().detach()
    patterns = stacks(sample.observed)
    penalty, last = 0.0, -math.inf
    for _ in range(ITERATIONS):
        first, second, likelihood = expected_moments(sample, patterns, covariance, mean)
        value = (1 - shrinkage) * likelihood - 0.5 * shrinkage * penalty
        mean = torch.zeros_like(first) if sample.centered else first
        near = model.fit(shrunk(second - torch.outer(first, mean), shrinkage, diagonal), mean, near)
        covariance = near.covariance().detach()
        if abs(value - last) < ENOUGH:
            return near
        penalty, last = (near.logdet() + (near.precision().diagonal() * diagonal).sum()).item(), value
    warnings.warn(
        f"the fit with missing values has not converged in {ITERATIONS} iterations; many values are missing, or "
        "features are never observed together: raise shrinkage",
        ConvergenceWarning,
        stacklevel=2,
    )
    assert near is not None
    return near
