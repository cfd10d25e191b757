"""The dense factor by its square: the update of ``P = A A^T`` without A, in half the multiplications."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Dense, Element, symmetric
from ..groups.base import align, probe
from ..groups.products import mirror, product, symmetric_product

CURVED = 1.25
"""Of ``M^2`` in a move: ``1 - 2 m + 1.25 m^2`` is at least 0.2 for every m, and near ``exp(-2 m)`` for m up to 1. The
coefficient of the exponential, 2, would let P hardly shrink where m is large, as it is at first."""


class Square(Dense):
    """GL(k), where an element is ``P = A A^T`` and ``N = A M A^-1`` stands for a symmetric M of the algebra.

    A symmetric S, seen by A as ``A^T S A``, is seen as ``P S``, and ``A^T A`` as P itself. So the update of
    Fig. matDL_opt, whose ``A (I - M)`` has the square ``A (I - M)^2 A^T``, becomes with a quarter of ``M^2`` more::

        N <- a1 N + b1/2 (w P S + damping P - I)        P <- P - 2 N P + 5/4 N N P

    The two products are symmetric, and M, which commutes with what A is multiplied by, gives the same N before and
    after. P must be symmetric to the last bit: anything else would grow from update to update. It is positive definite
    as long as the rounding of its largest eigenvalue is below the smallest one, see ``forms.keep_square``.
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

    @property
    def compressed_shape(self) -> tuple[int, ...]:
        return (self.k, self.k)

    def compress(self, n: Element) -> Tensor:
        return n[0]

    def expand(self, compressed: Tensor) -> Element:
        return (compressed,)

    # ------------------------------------------------------------------ curvature
    def pair(self, a: Element, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ a[0], y

    def seen(self, a: Element, x: Tensor) -> Element:
        return self.restrict(*self.pair(a, x, x))

    def half_seen(self, a: Element, s: Tensor) -> Element:
        return (s,)

    def squared_norm(self, a: Element) -> Tensor:
        return self.trace(a)

    def damped(self, a: Element, damping: Tensor) -> Element:
        return (a[0] * align(damping, a[0]),)

    def damped_half(self, a: Element, half: Element, weight: Tensor, damping: Tensor) -> Element:
        seen = product(a[0], half[0]).mul_(align(weight, a[0]))
        return (seen.addcmul_(a[0], align(damping, a[0])),)

    def step_norm(self, a: Element, n: Element) -> Tensor:
        """``||M||_2``, from below, by eight steps of the power method: ``A^T u`` has the squared length ``u^T P u``."""
        tiny = torch.finfo(n[0].dtype).tiny
        rows, lengths = [probe(self.k, n[0].dtype, n[0].device).expand(*n[0].shape[:-2], 1, self.k)], []
        for _ in range(9):
            # In float64, where no square of a float32 overflows or vanishes.
            length = torch.linalg.vector_norm(rows[-1], dim=-1, keepdim=True, dtype=torch.float64)
            rows[-1] = rows[-1] / length.clamp(min=tiny).to(n[0].dtype)
            lengths.append(length)
            rows.append(rows[-1] @ n[0])
        before, after = (((row @ a[0]) * row).sum((-2, -1)).clamp(min=tiny) for row in (rows[6], rows[8]))
        growth = (lengths[7] * lengths[8]).sum((-2, -1)).sqrt().to(n[0].dtype)
        return growth * (after / before) ** 0.25

    # ------------------------------------------------------------------ moves and uses
    def advance(self, a: Element, n: Element, order: int | None, factor: float = 1.0) -> Element:
        once = symmetric_product(n[0], a[0])
        twice = symmetric_product(n[0], once).mul_(CURVED * factor**2)
        return (mirror(twice.add_(once, alpha=2 * factor).add_(a[0])),)

    def apply_squared(self, a: Element, rows: Tensor, overwrite: bool = False) -> Tensor:
        return self.times_square(a, rows)

    def squared(self, a: Element) -> Element:
        return a

    def to_dense(self, a: Element) -> Tensor:
        """An A, the lower triangular one."""
        return torch.linalg.cholesky(a[0].double()).to(a[0].dtype)
