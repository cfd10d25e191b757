"""A dense factor A by its product ``P = A A^T``: an update of P without A, in half the multiplications."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...groups import Element
from ...linalg import (
    align,
    apply_symmetric,
    matmul,
    mirror,
    pack_symmetric,
    packed_size,
    probe,
    product,
    symmetric_product,
    unpack_symmetric,
)
from .factor_forms import Projection
from .statistics import MatrixMoment, Moment, RowMoment

SECOND_ORDER = 1.4
"""The coefficient of ``(b H)^2`` in a move: ``1 - 2 h + 1.4 h^2`` is at least 0.28 for every h, and within 0.03 of
``exp(-2 h)`` for h up to 0.6, about where the bound on it lies. The coefficient of the exponential, 2, would let P
hardly shrink there."""


def is_safe(k: int, damping: float, eps: float) -> bool:
    """Return whether rounding leaves P positive definite, for a factor of size k without momentum.

    Curvature in units of its mean lies below k, so that the eigenvalues of P are about ``1 / k`` at least and
    ``1 / damping`` at most. The product of curvature and P has an error of ``eps k / damping`` in all directions, which
    P multiplies; what that puts between its largest and its smallest eigenvalue must be a tenth of their mean at most.
    """
    return damping > 0 and eps * (k / damping) ** 1.5 <= 0.1


@dataclass(frozen=True)
class GramFactor:
    """``P = A A^T`` for a k x k matrix A without momentum.

    The update of Fig. matDL_opt without momentum is ``A <- A Exp(-M)`` with ``M = b (H + damping A^T A - I)``, where
    ``b = b1/2`` and ``H = A^T S A`` is the curvature. P makes it in two moves, one along H, which can be large, and one
    along the rest, whose positive part is small once P is near ``1 / damping`` at most::

        P <- A (I - 2 b H + 7/5 b^2 H^2) A^T = P - 2 b P S P + 7/5 b^2 P S P S P
        P <- (1 + 2 b) P - 2 b damping P P

    For ``S = X^T X`` of a few rows the first is thin: with ``Y = X P`` it is ``P - Y^T (2 b I - 7/5 b^2 Y X^T) Y``. To
    first order in b1 this is the update of A itself; beyond that the two differ, so that the choice between them is a
    part of the method (:func:`is_safe`) and not of the cost model.

    P must be symmetric to the last bit: anything else would grow from update to update.
    """

    size: int
    packed: bool = False
    """Whether each number of P is stored once."""

    keeps_matrix = has_scale = True
    has_root = has_momentum = False
    momentum_shape: ClassVar[tuple[int, ...]] = ()
    square_size = 0

    def __str__(self) -> str:
        return f"Dense({self.size})"

    # ------------------------------------------------------------------ storage
    @property
    def form(self) -> str:
        return "packed gram" if self.packed else "gram"

    @property
    def storage_shape(self) -> tuple[int, ...]:
        return (packed_size(self.size),) if self.packed else (self.size, self.size)

    @property
    def covector_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size, self.size),)

    @property
    def row_cost(self) -> int:
        return self.size**2

    def identity(self, blocks: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return self.pack((torch.eye(self.size, dtype=dtype, device=device).repeat(blocks, 1, 1),))

    def pack(self, a: Element) -> Tensor:
        return pack_symmetric(a[0]) if self.packed else a[0]

    def unpack(self, stored: Tensor) -> Element:
        return (unpack_symmetric(stored, self.size) if self.packed else stored,)

    def pack_momentum(self, m: Element) -> Tensor:
        raise NotImplementedError("a gram factor has no momentum")

    def unpack_momentum(self, stored: Tensor) -> Element:
        raise NotImplementedError("a gram factor has no momentum")

    def to_dense(self, a: Element) -> Tensor:
        """Return the lower triangular A with ``A A^T = P``."""
        return torch.linalg.cholesky(a[0].double()).to(a[0].dtype)

    def from_dense(self, matrix: Tensor) -> Element:
        return (symmetric_product(matrix, matrix.mT),)

    # ------------------------------------------------------------------ the update
    def project_rows(self, a: Element | None, rows: Tensor) -> Element:
        """Return ``(Y, Z, Z X^T, r X^T)`` of :meth:`_thin` for ``S = X^T X``."""
        assert a is not None
        y = product(rows, a[0])
        return self._thin(rows, y, y)

    def _thin(self, x: Tensor, y: Tensor, z: Tensor) -> Element:
        """Return Y, Z, ``Z X^T`` and ``r X^T`` for ``S = X^T W`` with ``Y = X P`` and ``Z = W P``.

        r is the vector from which :func:`largest_eigenvalue` begins.
        """
        zx = symmetric_product(z, x.mT) if z is y else z @ x.mT
        return y, z, zx, probe(self.size, x.dtype, x.device) @ x.mT

    def project(self, a: Element, moment: Moment) -> Projection:
        if isinstance(moment, MatrixMoment):
            return Projection((a[0] * moment.matrix).flatten(1).sum(-1), None, (moment.matrix,))
        assert isinstance(moment, RowMoment)
        return self._thin_projection(self.project_rows(a, moment.rows))

    @staticmethod
    def _thin_projection(thin: Element) -> Projection:
        return Projection(thin[2].diagonal(dim1=-2, dim2=-1).sum(-1), thin)

    def through(self, a: Element, rows: Tensor) -> Tensor:
        return self.apply_square(a, rows)

    def project_product(self, x: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor]) -> Projection:
        if x[0].shape[-2] <= self.size:
            return self._thin_projection(self._thin(x[0], x[1], z[1]))
        return Projection((x[0] * z[1]).sum((-2, -1)), None, (symmetric_product(x[0].mT, z[0]),))

    def mean_square(self, a: Element) -> Tensor:
        return a[0].diagonal(dim1=-2, dim2=-1).sum(-1) / self.size

    def tangent(self, a: Element, h: Projection, weight: Tensor, damping: Tensor, limit: float, rate: float) -> Element:
        """Return ``2 b`` and ``2 b damping``, and what the first move takes from P: a matrix, or Y and B of ``Y^T B``.

        Where the spectral norm of ``b H`` is above ``limit``, b is as much smaller.
        """
        if h.half is not None:
            sp = product(h.half[0], a[0])
            b, weight, damping = _rates(a, largest_eigenvalue(sp), weight, damping, limit, rate)
            # S P has the largest error. As a congruence, P - b (P S P + its transpose) + b^2 (S P)^T P (S P), P stays
            # positive definite.
            psp = product(a[0], sp)
            taken = symmetric_product(sp.mT, psp).mul_(-SECOND_ORDER * (b * weight) ** 2)
            return 2 * b, 2 * b * damping, taken.addcmul_(psp + psp.mT, b * weight)
        assert h.covector is not None
        y, z, zx, rx = h.covector
        b, weight, damping = _rates(a, largest_eigenvalue_by_rows(zx, rx, z), weight, damping, limit, rate)
        inner = zx * (-SECOND_ORDER * (b * weight) ** 2)
        inner.diagonal(dim1=-2, dim2=-1).add_((2 * b * weight)[..., 0])
        return 2 * b, 2 * b * damping, y, product(inner, z)

    def moved(self, a: Element, m: Element, order: int, factor: float) -> Element:
        growth, shrinkage, *taken = m
        less = taken[0] if len(taken) == 1 else symmetric_product(taken[0].mT, taken[1])
        first = torch.sub(a[0], less, out=less)
        second = symmetric_product(first, first).mul_(-shrinkage)
        return (mirror(second.addcmul_(first, 1 + growth)),)

    def rescaled(self, a: Element, factor: Tensor) -> Element:
        return (a[0].mul_(align(factor.square(), a[0])),)

    # ------------------------------------------------------------------ the preconditioner
    def square(self, a: Element) -> Element:
        return a

    def apply_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        return apply_symmetric(square[0], rows, scratch)

    def project_outer(self, x: Tensor, y: Tensor) -> Tensor:
        return matmul(x.mT, y)

    def keeps_square(self, rows: int, uses: int) -> bool:
        return True


def _rates(
    a: Element, largest: Tensor, weight: Tensor, damping: Tensor, limit: float, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return b, the weight and the damping as factors for matrices, from the largest eigenvalue of ``S P``.

    Beside the limit, ``2 b (damping p - 1)`` is bounded for the largest eigenvalue p of P: at 1 the second move would
    be singular. A half leaves room for an eigenvalue that is estimated from below.
    """
    excess = (damping * largest_eigenvalue(a[0]) - 1).clamp(min=0)
    b = torch.minimum(limit / (weight * largest), 0.25 / excess).clamp(max=rate / 2)
    return align(b, a[0]), align(weight.expand_as(b), a[0]), align(damping.expand_as(b), a[0])


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """Return the largest eigenvalue of a matrix that is similar to a positive semi-definite one.

    It is estimated from below by nine steps of the power method.
    """
    row = probe(matrix.shape[-1], matrix.dtype, matrix.device).expand(*matrix.shape[:-2], 1, -1)
    unit, *rows = _powers(matrix, row, 9)
    return _growth(torch.cat(rows, -2)) * unit


def largest_eigenvalue_by_rows(zx: Tensor, rx: Tensor, z: Tensor) -> Tensor:
    """Return the largest eigenvalue of ``X^T Z`` from ``Z X^T`` and ``r X^T``.

    r is the vector with which the power method begins. ``r (X^T Z)^j`` is ``(r X^T) (Z X^T)^(j-1) Z``.
    """
    unit, *rows = _powers(zx, _of_length_one(rx.unsqueeze(-2)), 8)
    return _growth(matmul(_of_length_one(torch.cat(rows, -2)), z)) * unit


def _powers(matrix: Tensor, row: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a unit, and the row after the last step but one and after the last, in that unit.

    The largest eigenvalue lies between the trace and its k-th part. In units of their geometric mean nine steps
    lengthen or shorten a row by ``k^4.5`` at most, and it begins as long as the root of the unit, so that before and
    after a product it is as far from the ends of the numbers: it needs no normalization on the way, however large or
    small the matrix is.
    """
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    unit = (trace / math.sqrt(matrix.shape[-1])).clamp(min=torch.finfo(matrix.dtype).tiny)
    divisor = align(unit, matrix)
    row = last = divisor.sqrt() * row
    for _ in range(steps):
        row, last = matmul(row / divisor, matrix), row
    return unit, last, row


def _of_length_one(rows: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(rows, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    return rows / length.clamp(min=torch.finfo(rows.dtype).tiny).to(rows.dtype)


def _growth(rows: Tensor) -> Tensor:
    """Return the length of the second row over that of the first, in float64, where no square of a float32 vanishes."""
    first, second = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).unbind(-1)
    return (second / first.clamp(min=torch.finfo(rows.dtype).tiny)).to(rows.dtype)
