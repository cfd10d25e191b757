"""Log-determinant optimization."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import as_tensor, widen
from .base import Matrix, SPDProblem
from .random import random_spd


class LogDet(SPDProblem):
    """``l(S) = <C, S> - log det S``, minimized at ``S = C^-1`` with value ``k + log det C`` (Fig. b).

    The Hessian at the minimum is the identity in the affine-invariant metric, so plain Riemannian gradient
    descent is already fast and momentum does not help.
    """

    def __init__(self, C: Tensor) -> None:
        C = as_tensor("C", C)
        super().__init__(C)
        if bool(torch.linalg.cholesky_ex(widen(C)).info.any()):
            raise ValueError("C must be positive definite: otherwise the loss has no minimum; add a multiple of I")
        self.C = C
        self.minimizer = torch.linalg.inv(widen(C)).to(C.dtype)
        self.minimum = self.k + float(torch.logdet(C.double()))

    @classmethod
    def random(
        cls,
        k: int,
        condition: float = 10.0,
        *,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> LogDet:
        """Return a problem with a random C of the given condition number."""
        return cls(random_spd(k, condition, dtype=dtype, generator=generator))

    def __call__(self, point: Matrix) -> Tensor:
        """Return the loss; the determinant's gradient costs nothing at a point's origin."""
        return (self.C * point.matrix()).sum() - point.logdet()

    def gradient(self, S: Tensor) -> Tensor:
        """Return ``C - S^-1``."""
        return self.C - torch.linalg.inv(S)
