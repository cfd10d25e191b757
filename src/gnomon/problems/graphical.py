"""Sparse Gaussian graphical models."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import as_tensor
from .base import Matrix, SPDProblem, normal


class GraphicalModel(SPDProblem):
    """Sparse precision: ``l(S) = <C, S> - log det S + lambda sum_{i != j} |S_ij|``, with C the sample covariance.

    ``|s|`` is smoothed to ``sqrt(s^2 + e^2) - e``, which is below it by at most e: the optimum is within
    ``lambda k^2 e`` of the graphical lasso's. :meth:`edges` reads the graph off a solution.
    """

    def __init__(self, C: Tensor, penalty: float = 0.1, smoothing: float = 1e-4) -> None:
        C = as_tensor("C", C)
        super().__init__(C)
        if not penalty >= 0:
            raise ValueError(f"penalty must be at least 0, got {penalty!r}")
        if not smoothing > 0:
            raise ValueError(f"smoothing must be positive, got {smoothing!r}; 1e-4 is near the exact penalty")
        self.C, self.penalty, self.smoothing = C, penalty, smoothing
        self._off_diagonal = 1 - torch.eye(self.k, dtype=C.dtype, device=C.device)
        self.truth: Tensor | None = None

    @classmethod
    def random(
        cls,
        k: int,
        *,
        samples: int | None = None,
        neighbours: int = 2,
        penalty: float = 0.1,
        smoothing: float = 1e-4,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> GraphicalModel:
        """Return a problem whose precision couples each variable to the next ``neighbours``.

        It has 20 k samples unless their number is given.
        """
        if not 0 <= neighbours < k:
            raise ValueError(f"neighbours must be at least 0 and below k = {k}, got {neighbours!r}")
        truth = torch.eye(k, dtype=torch.float64)
        for offset in range(1, neighbours + 1):
            band = 0.4 / neighbours * torch.ones(k - offset, dtype=torch.float64)
            truth = truth + torch.diag(band, offset) + torch.diag(band, -offset)
        noise = normal(samples or 20 * k, k, generator=generator)
        x = torch.linalg.solve_triangular(torch.linalg.cholesky(truth).mT, noise.mT, upper=True).mT
        problem = cls((x.mT @ x / len(x)).to(dtype), penalty, smoothing)
        problem.truth = truth.to(dtype)
        return problem

    def __call__(self, point: Matrix) -> Tensor:
        """Return the loss."""
        S = point.matrix()
        absolute = (S.square() + self.smoothing**2).sqrt() - self.smoothing
        return (self.C * S + self.penalty * self._off_diagonal * absolute).sum() - point.logdet()

    def gradient(self, S: Tensor) -> Tensor:
        """Return ``C - S^-1 + lambda S / sqrt(S^2 + e^2)`` off the diagonal, ``C - S^-1`` on it."""
        sign = S / (S.square() + self.smoothing**2).sqrt()
        return self.C - torch.linalg.inv(S) + self.penalty * self._off_diagonal * sign

    def edges(self, S: Tensor) -> Tensor:
        """Return which pairs are coupled: entries that the penalty has not pressed into the smoothed kink."""
        return (S.abs() > 10 * self.smoothing) & self._off_diagonal.bool()
