"""Maximum likelihood of low rank plus diagonal from a covariance matrix, by Newton's method in the diagonal.

The covariance (factor analysis), or with ``inverse`` the precision, is ``B B^T + Diag(c)^2``. Both are one problem in
the scales ``psi``, which are ``c^2`` or ``c^-2``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_NOISE = 1e-7
"""The floor of psi, as a share of the feature's variance. Where the likelihood wants none it is a Heywood case."""
ITERATIONS = 200
LONGEST_STEP = 3.0
"""No scale changes by more than a factor of e to this power in an iteration."""
SHORTEST_STEP = 1e-6
"""A search ends at this share of Newton's step."""
HIDDEN = 1e-12
"""Rounding hides a gain of less than this share of the value, so that gradients decide."""
ENOUGH = 1e-14
"""Where no more is to be gained than this, one more step is the last."""
LARGEST_INVERSE = 1e5
"""The ceiling of ``c^-2``, in units of a feature's variance. Where the likelihood wants more it is a Heywood case."""
RIDGE = 0.05
"""The share of the variances that is added to the covariance for the start, so that it has an inverse."""
MOST_NOISE = 0.99
"""The share of the variances (of an inverse, that of the variances in psi) that is noise at the second start."""


class _Profile(NamedTuple):
    """``1/2 (log det Sigma + tr Sigma^-1 tau)`` with the best loadings for given scales psi, and its derivatives.

    With the eigenvalues ``l_j`` and eigenvectors ``w_j`` of ``psi^-1/2 tau psi^-1/2``, those of the factors are fitted
    exactly: the r largest, where they are above one (Joereskog 1967), or with ``inverse`` the r smallest, where they
    are below one. Nothing is asked of zero eigenvalues that are not among them.
    """

    value: float
    values: Tensor
    vectors: Tensor
    factors: Tensor
    """Which eigenvalues are those of factors."""

    def gradient(self) -> Tensor:
        """Return the gradient in ``log psi``.

        It is ``1/2 sum_j (1 - l_j) w_ij^2``, summed over the eigenvectors that are no factors.
        """
        rest = ~self.factors
        return 0.5 * self.vectors[:, rest].square() @ (1 - self.values[rest])

    def approximate_hessian(self) -> Tensor:
        """Return ``1/2 (W W^T)^2`` elementwise, which is positive semidefinite.

        It is the second derivative where all ``l_j`` are one.
        """
        others = self.vectors[:, ~self.factors]
        return 0.5 * (others @ others.mT).square()

    def hessian(self) -> Tensor:
        """Return the second derivative, from that of the eigenvectors."""
        rest = ~self.factors
        small, others = self.values[rest], self.vectors[:, rest]
        result = (others @ others.mT) * ((others * small) @ others.mT)
        for large, vector in zip(self.values[self.factors], self.vectors[:, self.factors].mT, strict=True):
            weights = (1 - small) * (large + small) / (large - small)
            result += torch.outer(vector, vector) * ((others * weights) @ others.mT)
        return 0.5 * result


class _Problem(NamedTuple):
    """Which ``1/2 (log det Sigma + tr Sigma^-1 tau)`` is minimized, and over which scales."""

    tau: Tensor
    rank: int
    inverse: bool

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return the lower and upper bounds of ``log psi``.

        The floor is for noise that vanishes, and the ceiling for an inverse whose diagonal vanishes.
        """
        variances = self.tau.diagonal()
        floor = (SMALLEST_NOISE * variances).log()
        return floor, (LARGEST_INVERSE * variances).log() if self.inverse else torch.full_like(floor, torch.inf)

    def starts(self) -> tuple[Tensor, Tensor]:
        """Return two places at which the search may begin."""
        variances, share = self.tau.diagonal(), 1 - 0.5 * self.rank / len(self.tau)
        if self.inverse:
            return (variances / share).log(), (variances / MOST_NOISE).log()
        # Joereskog's start: a share of what the other features do not explain.
        unexplained = 1 / torch.linalg.inv(self.tau + RIDGE * torch.diag(variances)).diagonal()
        return (share * unexplained).log(), (MOST_NOISE * variances).log()

    def profile(self, log_psi: Tensor) -> _Profile:
        scale = (-0.5 * log_psi).exp()
        values, vectors = torch.linalg.eigh(scale.unsqueeze(-1) * self.tau * scale)
        values = values.clamp(min=torch.finfo(values.dtype).eps * float(values[-1]))  # what rounding leaves of them
        places = torch.arange(len(values), device=values.device)
        if self.inverse:
            factors = (places < self.rank) & (values < 1)
        else:
            factors = (places >= len(values) - self.rank) & (values > 1)
        value = log_psi.sum() + (values[factors].log() + 1).sum() + values[~factors].sum()
        return _Profile(0.5 * float(value), values, vectors, factors)

    def factors(self, profile: _Profile, log_psi: Tensor) -> tuple[Tensor, Tensor]:
        """Return B and c. The loadings ``c w_j sqrt(l_j - 1)`` (with ``1 / l_j`` of an inverse) come largest first."""
        if self.inverse:
            noise, vectors, ratios = (-0.5 * log_psi).exp(), profile.vectors, 1 / profile.values
        else:
            noise, vectors, ratios = (0.5 * log_psi).exp(), profile.vectors.flip(1), profile.values.flip(0)
        loadings = vectors[:, : self.rank] * (ratios[: self.rank] - 1).clamp(min=0).sqrt()
        return noise.unsqueeze(-1) * loadings, noise


def fit_factors(tau: Tensor, rank: int, start: Tensor | None = None, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """Return loadings ``B`` (k x r) and noise ``c`` (k) with ``B B^T + Diag(c)^2`` nearest to tau.

    The nearest one minimizes ``KL(N(0, tau) || .)``. With ``inverse`` it is ``(B B^T + Diag(c)^2)^-1`` that is near to
    tau, which must not be singular.

    For a sample covariance, without ``inverse`` also a singular one, this is maximum likelihood. It is exact where tau
    (or its inverse) is low rank plus diagonal. Where an entry of c vanishes (a Heywood case) there are often several
    maxima; a second start is made then. With a ``start``, c from which to begin, there is no other.
    """
    problem = _Problem(tau, rank, inverse)
    floor, ceiling = problem.bounds()
    if start is not None:
        log_psi = (-2 if inverse else 2) * start.log()
        current, log_psi = _descend(problem, log_psi.clamp(floor, ceiling), floor, ceiling)
    else:
        first, second = problem.starts()
        current, log_psi = _descend(problem, first, floor, ceiling)
        if bool(((log_psi <= floor) | (log_psi >= ceiling)).any()):
            other = _descend(problem, second, floor, ceiling)
            current, log_psi = min((current, log_psi), other, key=lambda found: found[0].value)
    return problem.factors(current, log_psi)


def _descend(problem: _Problem, log_psi: Tensor, floor: Tensor, ceiling: Tensor) -> tuple[_Profile, Tensor]:
    """Minimize by Newton's method in the logarithms of the scales, all of which stay within their bounds."""
    current = problem.profile(log_psi)
    for _ in range(ITERATIONS):
        gradient = current.gradient()
        free = ~((log_psi <= floor) & (gradient > 0) | (log_psi >= ceiling) & (gradient < 0))
        direction = _newton_direction(current, gradient, free)
        slope = float(gradient @ direction)
        if slope > -ENOUGH:
            log_psi = (log_psi + direction).clamp(floor, ceiling)
            return problem.profile(log_psi), log_psi
        longest = min(1.0, LONGEST_STEP / float(direction.abs().max()))
        hidden = -slope < HIDDEN * max(1.0, abs(current.value))
        step = None if hidden else _decrease(problem, current, log_psi, longest * direction, longest * slope)
        if step is None:  # rounding hides what is gained, and gradients decide
            trial = (log_psi + longest * direction).clamp(floor, ceiling)
            step = problem.profile(trial), trial
            if not step[0].gradient()[free].norm() < 0.5 * gradient[free].norm():
                break
        current, log_psi = step
    return current, log_psi


def _decrease(
    problem: _Problem, current: _Profile, log_psi: Tensor, step: Tensor, slope: float
) -> tuple[_Profile, Tensor] | None:
    """Return a place along the step where the value is lower, or None if there is none."""
    size = 1.0
    while size > SHORTEST_STEP:
        trial = (log_psi + size * step).clamp(*problem.bounds())
        found = problem.profile(trial)
        if found.value < current.value + 1e-4 * size * slope:
            return found, trial
        size *= 0.5
    return None


def _newton_direction(profile: _Profile, gradient: Tensor, free: Tensor) -> Tensor:
    """Return Newton's direction from the second derivative.

    Where that is not positive definite its approximation takes its place.
    """
    direction = torch.zeros_like(gradient)
    for hessian in (profile.hessian, profile.approximate_hessian):
        matrix = hessian()[free][:, free]
        ridge = 1e-10 * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        root, info = torch.linalg.cholesky_ex(matrix + ridge)
        if not info:
            direction[free] = -torch.cholesky_solve(gradient[free].unsqueeze(-1), root).squeeze(-1)
            return direction
    return -gradient
