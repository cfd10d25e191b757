"""The dense factor by its square: an update of ``P = A A^T`` without A, in half the multiplications."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..groups import Dense, Element, symmetric
from ..groups.base import align, probe
from ..groups.products import matmul, mirror, product, symmetric_product

CURVED = 1.4
"""Of ``(b H)^2`` in a move: ``1 - 2 h + 1.4 h^2`` is at least 0.28 for every h, and within 0.03 of ``exp(-2 h)`` for h
up to 0.6, about where the bound on it lies. The coefficient of the exponential, 2, would let P hardly shrink there."""


class Square(Dense):
    """GL(k), where an element is ``P = A A^T``, for updates without momentum.

    The update of Fig. matDL_opt without momentum is ``A <- A Exp(-M)`` with ``M = b (H + damping A^T A - I)``, where
    ``b = b1/2`` and ``H = A^T S A`` is the curvature. P makes it in two moves, one along H, which can be large, and one
    along the rest, whose positive part is small once P is near ``1 / damping`` at most::

        P <- A (I - 2 b H + 7/5 b^2 H^2) A^T = P - 2 b P S P + 7/5 b^2 P S P S P
        P <- (1 + 2 b) P - 2 b damping P P

    For ``S = X^T X`` of a few rows the first is thin: with ``Y = X P`` it is ``P - Y^T (2 b I - 7/5 b^2 Y X^T) Y``.

    P must be symmetric to the last bit: anything else would grow from update to update. It is positive definite as
    long as the rounding of its largest eigenvalue is below the smallest one, see ``forms.keep_square``.
    """

    def __init__(self, k: int, packed: bool = False) -> None:
        super().__init__(k)
        self.packed = packed
        """Whether every number of P is stored once."""

    def _arguments(self) -> str:
        return f"{self.k}, packed=True" if self.packed else str(self.k)

    def __str__(self) -> str:
        return f"Dense({self.k})"

    # ------------------------------------------------------------------ storage
    @property
    def storage_shape(self) -> tuple[int, ...]:
        return (symmetric.packed_size(self.k),) if self.packed else (self.k, self.k)

    def pack(self, a: Element) -> Tensor:
        return symmetric.pack(a[0]) if self.packed else a[0]

    def unpack(self, stored: Tensor) -> Element:
        return (symmetric.unpack(stored, self.k) if self.packed else stored,)

    def scaled(self, a: Element, factor: Tensor) -> Element:
        return super().scaled(a, factor.square())

    # ------------------------------------------------------------------ curvature
    def seen(self, a: Element, x: Tensor) -> Element:
        y = product(x, a[0])
        return self.seen_rows(x, y, y)

    def seen_rows(self, x: Tensor, y: Tensor, z: Tensor) -> Element:
        """Of ``S = X^T W``, which may be ``X^T X``, with ``Y = X P`` and ``Z = W P``: Y, Z, ``Z X^T`` and ``r X^T``.

        r is where :func:`largest_eigenvalue` begins.
        """
        zx = symmetric_product(z, x.mT) if z is y else z @ x.mT
        return y, z, zx, probe(self.k, x.dtype, x.device) @ x.mT

    def half_seen(self, a: Element, s: Tensor) -> Element:
        return (s,)

    def trace(self, covector: Element) -> Tensor:
        """Of what :meth:`seen` gives."""
        return covector[2].diagonal(dim1=-2, dim2=-1).sum(-1)

    def squared_norm(self, a: Element) -> Tensor:
        return super().trace(a)

    # ------------------------------------------------------------------ moves and uses
    def push(
        self,
        a: Element,
        seen: Element | None,
        half: Element | None,
        weight: Tensor,
        damping: Tensor,
        limit: float,
        rate: float,
    ) -> Element:
        """What :meth:`advance` takes, for the curvature ``weight S`` and ``b1 = rate``.

        That is ``2 b`` and ``2 b damping``, and what the first move takes from P: a matrix, or Y and B of ``Y^T B``.
        Where ``b H`` is longer than ``limit`` in the spectral norm, b is as much smaller.
        """
        if half is not None:
            sp = product(half[0], a[0])
            b, weight, damping = self._rates(a, largest_eigenvalue(sp), weight, damping, limit, rate)
            # S P errs most; as a congruence, P - b (P S P + its transpose) + b^2 (S P)^T P (S P), P stays definite.
            psp = product(a[0], sp)
            taken = symmetric_product(sp.mT, psp).mul_(-CURVED * (b * weight) ** 2)
            return 2 * b, 2 * b * damping, taken.addcmul_(psp + psp.mT, b * weight)
        assert seen is not None
        y, z, zx, rx = seen
        b, weight, damping = self._rates(a, largest_eigenvalue_by_rows(zx, rx, z), weight, damping, limit, rate)
        inner = zx * (-CURVED * (b * weight) ** 2)
        inner.diagonal(dim1=-2, dim2=-1).add_((2 * b * weight)[..., 0])
        return 2 * b, 2 * b * damping, y, product(inner, z)

    def _rates(
        self,
        a: Element,
        largest: Tensor,
        weight: Tensor,
        damping: Tensor,
        limit: float,
        rate: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """b, the weight and the damping as factors for matrices, from the largest eigenvalue of ``S P``.

        Beside the limit, ``2 b (damping p - 1)`` is bounded for the largest eigenvalue p of P: at 1 the second move
        would be singular. A half leaves room for an eigenvalue that is estimated from below.
        """
        excess = (damping * largest_eigenvalue(a[0]) - 1).clamp(min=0)
        b = torch.minimum(limit / (weight * largest), 0.25 / excess).clamp(max=rate / 2)
        return align(b, a[0]), align(weight.expand_as(b), a[0]), align(damping.expand_as(b), a[0])

    def advance(self, a: Element, n: Element, order: int | None, factor: float = 1.0) -> Element:
        growth, shrinkage, *taken = n
        less = taken[0] if len(taken) == 1 else symmetric_product(taken[0].mT, taken[1])
        first = torch.sub(a[0], less, out=less)
        second = symmetric_product(first, first).mul_(-shrinkage)
        return (mirror(second.addcmul_(first, 1 + growth)),)

    def apply_squared(self, a: Element, rows: Tensor, overwrite: bool = False) -> Tensor:
        return self.times_square(a, rows)

    def squared(self, a: Element) -> Element:
        return a

    def to_dense(self, a: Element) -> Tensor:
        """An A, the lower triangular one."""
        return torch.linalg.cholesky(a[0].double()).to(a[0].dtype)


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """Of a matrix that is similar to a positive semi-definite one, by eight steps of the power method."""
    row = probe(matrix.shape[-1], matrix.dtype, matrix.device).expand(*matrix.shape[:-2], 1, -1)
    unit, *rows = _powers(matrix, row, 9)
    return _growth(torch.cat(rows, -2)) * unit


def largest_eigenvalue_by_rows(zx: Tensor, rx: Tensor, z: Tensor) -> Tensor:
    """The same of ``X^T Z``, from ``Z X^T`` and from ``r X^T`` for the r where the power method begins.

    ``r (X^T Z)^j`` is ``(r X^T) (Z X^T)^(j-1) Z``.
    """
    unit, *rows = _powers(zx, _of_length_one(rx.unsqueeze(-2)), 8)
    return _growth(matmul(_of_length_one(torch.cat(rows, -2)), z)) * unit


def _powers(matrix: Tensor, row: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """A unit, and the row after the last step but one and after the last, in that unit.

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
    """How many times as long as the first row the second is; in float64, where no square of a float32 vanishes."""
    first, second = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).unbind(-1)
    return (second / first.clamp(min=torch.finfo(rows.dtype).tiny)).to(rows.dtype)
