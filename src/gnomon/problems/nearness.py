"""Metric nearness."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import as_tensor, widen
from .base import Matrix, SPDProblem, normal, symmetric
from .random import random_spd


class MetricNearness(SPDProblem):
    """``l(S) = 1/(2N) sum_i ||S Q x_i - x_i||^2``, minimized at ``S = Q^-1`` with value 0 (Fig. a).

    ``X`` holds the ``x_i`` as rows; with at least k independent ones the minimizer is unique. In the affine-invariant
    metric the Hessian there has eigenvalues between 1 and half of Q's condition number (for ``x_i`` of unit
    covariance), which is what makes it hard.
    """

    minimum = 0.0

    def __init__(self, Q: Tensor, X: Tensor) -> None:
        Q = as_tensor("Q", Q)
        X = as_tensor("X", X, Q)
        super().__init__(Q)
        if X.ndim != 2 or X.shape[-1] != self.k:
            raise ValueError(f"X has shape {tuple(X.shape)}, but Q is of size {self.k}: give rows of that length")
        self.Q, self.X = Q, X
        self.minimizer = torch.linalg.inv(widen(Q)).to(Q.dtype)
        # With 1/N sum_i x_i x_i^T = L L^T the loss is 1/2 ||S Q L - L||^2: one product, however many vectors there are.
        self._L = (torch.linalg.qr(widen(X), mode="r").R.mT / len(X) ** 0.5).to(Q.dtype)
        self._QL = Q @ self._L

    @classmethod
    def random(
        cls,
        k: int,
        condition: float = 10.0,
        *,
        samples: int | None = None,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> MetricNearness:
        """Return a problem with a random Q of the given condition number and normal vectors.

        There are 10 k vectors unless ``samples`` says how many.
        """
        Q = random_spd(k, condition, dtype=dtype, generator=generator)
        return cls(Q, normal(samples or 10 * k, k, dtype=dtype, generator=generator))

    def __call__(self, point: Matrix, rows: Tensor | None = None) -> Tensor:
        """Return the loss on all vectors, or on the mini-batch of those with the given indices."""
        S = point.matrix()
        if rows is None:
            return 0.5 * (S @ self._QL - self._L).square().sum()
        x = self.X[rows]
        return 0.5 * (x @ self.Q @ S - x).square().sum(-1).mean()

    def gradient(self, S: Tensor) -> Tensor:
        """Return the symmetric part of ``(S Q - I) M Q`` with ``M = 1/N sum_i x_i x_i^T``."""
        return symmetric((S @ self._QL - self._L) @ self._QL.mT)
