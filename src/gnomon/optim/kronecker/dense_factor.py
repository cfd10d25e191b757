"""A dense factor: the k x k matrix A itself, as the paper has it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...groups import Dense, Element
from ...linalg import (
    align,
    apply_symmetric,
    matmul,
    pack_symmetric,
    packed_size,
    product,
    symmetric_product,
    unpack_symmetric,
)
from .factor_forms import Projection
from .statistics import MatrixMoment, Moment, RowMoment

SECOND_ORDER = 0.3
"""The coefficient of ``M^2`` in the move of a factor along -M: ``1 - m + 0.3 m^2`` has no root, and its square is near
that by which :class:`~.gram_factor.GramFactor` moves. The exponential's 0.5 would let a factor hardly shrink where m is
large, as it is at first."""


@dataclass(frozen=True)
class DenseFactor:
    """A k x k matrix A, with a symmetric momentum."""

    size: int
    has_momentum: bool = True

    form = "factor"
    keeps_matrix = has_root = has_scale = True

    def __str__(self) -> str:
        return f"Dense({self.size})"

    @property
    def storage_shape(self) -> tuple[int, ...]:
        return self.size, self.size

    @property
    def momentum_shape(self) -> tuple[int, ...]:
        return (packed_size(self.size),)

    @property
    def covector_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size, self.size),)

    @property
    def row_cost(self) -> int:
        return self.size**2

    @property
    def square_size(self) -> int:
        return self.size**2

    def identity(self, blocks: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return torch.eye(self.size, dtype=dtype, device=device).repeat(blocks, 1, 1)

    def pack(self, a: Element) -> Tensor:
        return a[0]

    def unpack(self, stored: Tensor) -> Element:
        return (stored,)

    def pack_momentum(self, m: Element) -> Tensor:
        return pack_symmetric(m[0])

    def unpack_momentum(self, stored: Tensor) -> Element:
        return (unpack_symmetric(stored, self.size),)

    def to_dense(self, a: Element) -> Tensor:
        return a[0]

    def from_dense(self, matrix: Tensor) -> Element:
        return (matrix,)

    # ------------------------------------------------------------------ the update
    def project_rows(self, a: Element | None, rows: Tensor) -> Element:
        xa = rows if a is None else matmul(rows, a[0])
        return (symmetric_product(xa.mT, xa),)

    def project(self, a: Element, moment: Moment) -> Projection:
        if isinstance(moment, MatrixMoment):
            half = product(moment.matrix, a[0])
            return Projection((a[0] * half).flatten(1).sum(-1), None, (half,))
        assert isinstance(moment, RowMoment)
        h = self.project_rows(a, moment.rows)
        return Projection(h[0].diagonal(dim1=-2, dim2=-1).sum(-1), h)

    def through(self, a: Element, rows: Tensor) -> Tensor:
        return matmul(rows, a[0])

    def project_product(self, x: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor]) -> Projection:
        return Projection((x[1] * z[1]).sum((-2, -1)), (matmul(x[1].mT, z[1]),))

    def mean_square(self, a: Element) -> Tensor:
        return torch.linalg.vector_norm(a[0], dim=(-2, -1)).square() / self.size

    def tangent(self, a: Element, h: Projection, weight: Tensor, damping: Tensor, limit: float, rate: float) -> Element:
        if h.half is not None:
            damped = (a[0] * align(damping, a[0])).addcmul_(h.half[0], align(weight, a[0]))
            m = symmetric_product(a[0].mT, damped)
        else:
            assert h.covector is not None
            m = symmetric_product(a[0].mT, a[0]).mul_(align(damping, a[0])).addcmul_(h.covector[0], align(weight, a[0]))
        m.diagonal(dim1=-2, dim2=-1).sub_(1)
        m.mul_(0.5)
        if limit < math.inf:
            return (m.mul_(align((limit / Dense(self.size).norm_estimate((m,))).clamp(max=rate), m)),)
        return (m if rate == 1 else m.mul_(rate),)

    def moved(self, a: Element, m: Element, order: int, factor: float) -> Element:
        if order == 1:
            return (torch.add(a[0], matmul(a[0], factor * m[0])),)
        change = symmetric_product(m[0], m[0]).mul_(SECOND_ORDER * factor**2).add_(m[0], alpha=factor)
        return (product(a[0], change).add_(a[0]),)

    def rescaled(self, a: Element, factor: Tensor) -> Element:
        return (a[0].mul_(align(factor, a[0])),)

    # ------------------------------------------------------------------ the preconditioner
    def square(self, a: Element) -> Element:
        return (symmetric_product(a[0], a[0].mT),)

    def apply_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        return apply_symmetric(square[0], rows, scratch)

    def apply_twice(self, a: Element, rows: Tensor) -> Tensor:
        return matmul(matmul(rows, a[0]), a[0].mT)

    def project_outer(self, x: Tensor, y: Tensor) -> Tensor:
        return matmul(x.mT, y)

    def keeps_square(self, rows: int, uses: int) -> bool:
        """Compare ``k^3 + rows k^2`` multiplications with the square and ``2 rows k^2`` at each use without it."""
        return self.size < rows * uses
