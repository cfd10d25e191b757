"""A full SPD matrix in global coordinates: what the baselines move."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..groups import Dense


class Ambient(nn.Module):
    """An SPD matrix ``tau`` as a plain parameter, with the methods of :class:`gnomon.SPD` that objectives use.

    ``init`` is a size (the identity) or a matrix, or a batch of them. Hand its parameters to one of the baselines;
    determinant and quadratic forms go through a Cholesky factor.
    """

    def __init__(
        self, init: int | Tensor, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(init, (int, Tensor)):
            raise TypeError(f"init must be a size or a matrix, got {init!r}")
        start = torch.eye(init, dtype=dtype, device=device) if isinstance(init, int) else init.detach().clone()
        self.tau = nn.Parameter(start)

    def matrix(self) -> Tensor:
        """Return ``tau`` itself."""
        return self.tau

    def _factor(self) -> Tensor:
        return torch.linalg.cholesky(self.tau)

    def logdet(self) -> Tensor:
        """Return ``log det tau``."""
        return 2 * self._factor().diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def quad(self, x: Tensor) -> Tensor:
        """Return ``x^T tau x`` for vectors ``(*sample, *batch, k)``."""
        return Dense(self.tau.shape[-1]).rmatvec((self._factor(),), x).square().sum(-1)

    def inv_quad(self, x: Tensor) -> Tensor:
        """Return ``x^T tau^-1 x`` for vectors ``(*sample, *batch, k)``."""
        factor = self._factor()
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
        whitening = torch.linalg.solve_triangular(factor, identity, upper=False)
        return Dense(self.tau.shape[-1]).matvec((whitening,), x).square().sum(-1)
