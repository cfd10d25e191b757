"""Second moments of data, as far as the fit of a structure asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class SingularMomentsError(ValueError):
    """The moments determine no positive-definite matrix of the structure: there are too few samples."""


class Moments(Protocol):
    """A symmetric positive-semidefinite matrix S of size k, with any batch dimensions."""

    @property
    def k(self) -> int: ...

    def dense(self) -> Tensor:
        """Return S, of shape ``(*batch, k, k)``."""

    def diagonal(self) -> Tensor:
        """Return the variances, of shape ``(*batch, k)``."""

    def blocks(self, size: int, count: int) -> Tensor:
        """Return the first ``count`` blocks of a size along the diagonal, of shape ``(*batch, count, size, size)``."""

    def part(self, start: int, stop: int) -> Moments:
        """Return the moments of features ``start`` to ``stop``."""

    def regress(self, effects: slice, causes: slice) -> tuple[Tensor, Moments]:
        """Return the slopes ``B = S_ec S_cc^-1`` of effects on causes and what is left, ``S_ee - B S_ce``."""


@dataclass(frozen=True)
class DenseMoments:
    """S as a matrix."""

    matrix: Tensor

    @property
    def k(self) -> int:
        return self.matrix.shape[-1]

    def dense(self) -> Tensor:
        return self.matrix

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def blocks(self, size: int, count: int) -> Tensor:
        parts = [slice(i * size, (i + 1) * size) for i in range(count)]
        return torch.stack([self.matrix[..., part, part] for part in parts], -3)

    def part(self, start: int, stop: int) -> DenseMoments:
        return DenseMoments(self.matrix[..., start:stop, start:stop])

    def regress(self, effects: slice, causes: slice) -> tuple[Tensor, DenseMoments]:
        cross = self.matrix[..., causes, effects]
        slopes = torch.cholesky_solve(cross, cholesky(self.matrix[..., causes, causes])).mT
        return slopes, DenseMoments(self.matrix[..., effects, effects] - slopes @ cross)


@dataclass(frozen=True)
class RowMoments:
    """``S = R^T R + Diag(d)`` from n rows R and a diagonal d, for features so many that S is too large. No batch.

    What is left after a regression on causes c with slopes B has the rows ``R_e - R_c B^T`` and ``Diag(d_c)^1/2 B^T``.
    """

    rows: Tensor
    added: Tensor
    """d"""

    @property
    def k(self) -> int:
        return self.rows.shape[-1]

    def dense(self) -> Tensor:
        return self.rows.mT @ self.rows + torch.diag(self.added)

    def diagonal(self) -> Tensor:
        return self.rows.square().sum(-2) + self.added

    def blocks(self, size: int, count: int) -> Tensor:
        parts = self.rows[:, : size * count].unflatten(-1, (count, size)).movedim(-2, 0)
        return parts.mT @ parts + torch.diag_embed(self.added[: size * count].unflatten(-1, (count, size)))

    def part(self, start: int, stop: int) -> RowMoments:
        return RowMoments(self.rows[:, start:stop], self.added[start:stop])

    def regress(self, effects: slice, causes: slice) -> tuple[Tensor, RowMoments]:
        own, added, rows = self.rows[:, causes], self.added[causes], self.rows[:, effects]
        n, k = own.shape
        if k <= n or not bool((added > 0).all()):
            slopes = torch.cholesky_solve(own.mT @ rows, cholesky(own.mT @ own + torch.diag(added))).mT
        else:  # Woodbury
            eye = torch.eye(n, dtype=own.dtype, device=own.device)
            slopes = torch.cholesky_solve(rows, cholesky(eye + (own / added) @ own.mT)).mT @ own / added
        left = torch.cat([rows - own @ slopes.mT, added.sqrt().unsqueeze(-1) * slopes.mT])
        return slopes, RowMoments(left, self.added[effects])


def cholesky(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor; raise an error where the matrix is singular but for rounding."""
    root, info = torch.linalg.cholesky_ex(matrix)
    pivots = root.diagonal(dim1=-2, dim2=-1).square()
    least = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
    if bool(info.any()) or not bool((pivots > least).all()):
        raise SingularMomentsError(
            f"the second moments of {matrix.shape[-1]} features are singular: there are too few samples for so many "
            "free parameters"
        )
    return root
