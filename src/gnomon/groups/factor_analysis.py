"""Maximum likelihood of factor analysis from a covariance matrix, by Newton's method in the noise variances."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_NOISE = 1e-7
"""The floor of a noise variance, as a share of the feature's. Where the likelihood wants none it is a Heywood case."""
ITERATIONS = 200
LONGEST_STEP = 3.0
"""No noise variance changes by more than e to this power in an iteration."""
ENOUGH = 1e-14
"""Where no more is to be gained than this, one more step is the last."""
RIDGE = 0.05
"""The share of the variances that is added to the covariance for the start, so that it has an inverse."""
MOST_NOISE = 0.99
"""The share of the variances that is noise at the second start."""


class _Profile(NamedTuple):
    """``1/2 (log det Sigma + tr Sigma^-1 tau)`` with the best loadings for given noise variances, and its derivatives.

    With the eigenvalues ``l_j`` and eigenvectors ``w_j`` of ``psi^-1/2 tau psi^-1/2``, those of the factors (the r
    largest, where they are above one) are fitted exactly (Joereskog 1967); nothing is asked of zero eigenvalues.
    """

    value: float
    values: Tensor
    vectors: Tensor
    factors: Tensor
    """Which eigenvalues are those of factors."""

    def gradient(self) -> Tensor:
        """In ``log psi``: ``1/2 sum_j (1 - l_j) w_ij^2`` over the others."""
        rest = ~self.factors
        return 0.5 * self.vectors[:, rest].square() @ (1 - self.values[rest])

    def approximate_hessian(self) -> Tensor:
        """``1/2 (W W^T)^2`` elementwise, the second derivative where all ``l_j`` are one: positive semidefinite."""
        others = self.vectors[:, ~self.factors]
        return 0.5 * (others @ others.mT).square()

    def hessian(self) -> Tensor:
        """The second derivative, from that of the eigenvectors."""
        rest = ~self.factors
        small, others = self.values[rest], self.vectors[:, rest]
        result = (others @ others.mT) * ((others * small) @ others.mT)
        for large, vector in zip(self.values[self.factors], self.vectors[:, self.factors].mT, strict=True):
            weights = (1 - small) * (large + small) / (large - small)
            result += torch.outer(vector, vector) * ((others * weights) @ others.mT)
        return 0.5 * result


def _profile(tau: Tensor, log_noise: Tensor, rank: int) -> _Profile:
    scale = (-0.5 * log_noise).exp()
    values, vectors = torch.linalg.eigh(scale.unsqueeze(-1) * tau * scale)
    largest = torch.arange(len(values), device=values.device) >= len(values) - rank
    factors = largest & (values > 1)
    value = log_noise.sum() + (values[factors].log() + 1).sum() + values[~factors].sum()
    return _Profile(0.5 * float(value), values, vectors, factors)


def fit_factors(tau: Tensor, rank: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Loadings ``B`` (k x r) and noise ``c`` (k): ``B B^T + Diag(c)^2`` nearest to tau, ``KL(N(0, tau) || .)`` minimal.

    For a sample covariance, also a singular one, this is maximum likelihood. It is exact where tau is low rank plus
    diagonal. Where the noise of a feature vanishes (a Heywood case) there are often several maxima; a second start is
    made then. With a ``start``, noise c from which to begin, there is no other.
    """
    variances = tau.diagonal()
    floor = (SMALLEST_NOISE * variances).log()
    if start is not None:
        current, log_noise = _descend(tau, rank, torch.maximum(2 * start.log(), floor), floor)
    else:
        # Joereskog's start: a share of what the other features do not explain.
        unexplained = 1 / torch.linalg.inv(tau + RIDGE * torch.diag(variances)).diagonal()
        current, log_noise = _descend(tau, rank, ((1 - 0.5 * rank / len(tau)) * unexplained).log(), floor)
        if bool((log_noise <= floor).any()):
            other = _descend(tau, rank, (MOST_NOISE * variances).log(), floor)
            current, log_noise = min((current, log_noise), other, key=lambda found: found[0].value)
    noise = (0.5 * log_noise).exp()
    return _loadings(current, noise, rank), noise


def _descend(tau: Tensor, rank: int, log_noise: Tensor, floor: Tensor) -> tuple[_Profile, Tensor]:
    """Newton's method in the logarithms of the noise variances, none of which goes below its floor."""
    current = _profile(tau, log_noise, rank)
    for _ in range(ITERATIONS):
        gradient = current.gradient()
        free = ~((log_noise <= floor) & (gradient > 0))
        direction = _newton_direction(current, gradient, free)
        slope = float(gradient @ direction)
        if slope > -ENOUGH:
            log_noise = torch.maximum(log_noise + direction, floor)
            return _profile(tau, log_noise, rank), log_noise
        size = min(1.0, LONGEST_STEP / float(direction.abs().max()))
        trial, found = log_noise, current
        while size > 1e-6 and not found.value < current.value + min(1e-4 * size * slope, 0.0):
            trial = torch.maximum(log_noise + size * direction, floor)
            found = _profile(tau, trial, rank)
            size *= 0.5
        if not found.value < current.value:  # rounding
            break
        log_noise, current = trial, found
    return current, log_noise


def _newton_direction(profile: _Profile, gradient: Tensor, free: Tensor) -> Tensor:
    """By the second derivative, or where that is not positive definite by what approximates it."""
    direction = torch.zeros_like(gradient)
    for hessian in (profile.hessian(), profile.approximate_hessian()):
        matrix = hessian[free][:, free]
        ridge = 1e-10 * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        root, info = torch.linalg.cholesky_ex(matrix + ridge)
        if not info:
            direction[free] = -torch.cholesky_solve(gradient[free].unsqueeze(-1), root).squeeze(-1)
            return direction
    return -gradient


def _loadings(profile: _Profile, noise: Tensor, rank: int) -> Tensor:
    """``psi^1/2 w_j sqrt(l_j - 1)`` for the r largest eigenvalues, largest first; zero where one is not above one."""
    values, vectors = profile.values[-rank:].flip(0), profile.vectors[:, -rank:].flip(1)
    return noise.unsqueeze(-1) * vectors * (values - 1).clamp(min=0).sqrt()
