"""Metric nearness."""

from __future__ import annotations

import torch
from torch import Tensor

from ..manifolds import SPD
from .random import random_spd


class MetricNearness:
    """``l(S) = 1/(2N) sum_i ||S Q x_i - x_i||^2``, minimized at ``S = Q^-1`` with value 0.

    ``X`` holds the ``x_i`` as rows; with at least k independent ones the minimizer is unique. Its Hessian
    has about the square of Q's condition number, which is what makes it hard.
    """

    def __init__(self, Q: Tensor, X: Tensor) -> None:
        self.Q, self.X = Q, X
        self._moment = X.mT @ X / len(X)

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
        """With a random Q of the given condition number and ``samples`` (10 k unless given) normal vectors."""
        Q = random_spd(k, condition, dtype=dtype, generator=generator)
        X = torch.randn(samples or 10 * k, k, dtype=torch.float64, generator=generator).to(dtype)
        return cls(Q, X)

    def __call__(self, point: SPD, rows: Tensor | None = None) -> Tensor:
        """The loss on all vectors, or on the mini-batch of those with the given indices."""
        S = point.matrix()
        if rows is None:
            residual = S @ self.Q - torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
            return 0.5 * ((residual @ self._moment) * residual).sum()
        x = self.X[rows]
        return 0.5 * (x @ self.Q @ S - x).square().sum(-1).mean()

    def gradient(self, S: Tensor) -> Tensor:
        """The symmetric Euclidean gradient."""
        residual = S @ self.Q - torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
        half = residual @ self._moment @ self.Q
        return 0.5 * (half + half.mT)

    @property
    def minimizer(self) -> Tensor:
        return torch.linalg.inv(self.Q)

    @property
    def minimum(self) -> float:
        return 0.0
