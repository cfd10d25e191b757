"""Trace regression."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import as_tensor
from .base import Matrix, SPDProblem, normal, pick
from .random import random_spd


class TraceRegression(SPDProblem):
    """``l(S) = 1/(2N) sum_i (<X_i, S> - y_i)^2`` with measurements ``X_i = U_i^T U_i`` of low rank.

    ``U`` has the shape ``(N, rank, k)``, or ``(N, k)`` for rank one, where ``<X_i, S> = u_i^T S u_i``. Nothing k x k
    is formed on a structured point.
    """

    def __init__(self, U: Tensor, y: Tensor) -> None:
        U = as_tensor("U", U)
        y = as_tensor("y", y, U)
        super().__init__(U)
        if U.ndim not in (2, 3):
            raise ValueError(f"U has shape {tuple(U.shape)}; give (N, k) or (N, rank, k)")
        if len(U) != len(y):
            raise ValueError(f"y has {len(y)} values for the {len(U)} measurements of U; give one each")
        self.U = U.unsqueeze(1) if U.ndim == 2 else U
        self.y = y

    @classmethod
    def random(
        cls,
        k: int,
        condition: float = 10.0,
        *,
        samples: int | None = None,
        rank: int = 1,
        noise: float = 0.0,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> TraceRegression:
        """Return a problem with measurements of a random matrix, which is the minimizer without noise.

        There are k (k + 1) of them unless their number is given.
        """
        truth = random_spd(k, condition, dtype=dtype, generator=generator)
        U = normal(samples or k * (k + 1), rank, k, dtype=dtype, generator=generator) / (rank * k) ** 0.5
        exact = (U @ truth * U).sum((-2, -1))
        problem = cls(U, exact + noise * normal(len(U), dtype=dtype, generator=generator))
        if noise == 0:
            problem.minimizer, problem.minimum = truth, 0.0
        return problem

    def __call__(self, point: Matrix, rows: Tensor | None = None) -> Tensor:
        """Return the loss on all measurements, or on the mini-batch of those with the given indices."""
        residual = point.quad(pick(self.U, rows)).sum(-1) - pick(self.y, rows)
        return 0.5 * residual.square().mean()

    def gradient(self, S: Tensor) -> Tensor:
        """Return ``1/N sum_i (<X_i, S> - y_i) X_i``."""
        residual = (self.U @ S * self.U).sum((-2, -1)) - self.y
        return torch.einsum("n,nri,nrj->ij", residual, self.U, self.U) / len(self.U)
