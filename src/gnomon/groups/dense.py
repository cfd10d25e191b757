"""All invertible matrices, with symmetric coordinates: the full SPD manifold."""

from __future__ import annotations

import torch
from torch import Tensor

from . import symmetric
from .base import Element, Group, positive_size, widen
from .products import matmul, product, symmetric_product


def solve_rows(matrix: Tensor, rows: Tensor, transpose: bool) -> Tensor:
    """``M^-1 x`` (or ``M^-T x``) for each row, by LU in at least float32."""
    wide = widen(matrix.mT if transpose else matrix)
    # Expanded, because torch.linalg.solve takes a right-hand side with fewer dimensions for a batch of vectors.
    batch = torch.broadcast_shapes(matrix.shape[:-2], rows.shape[:-2])
    columns = widen(rows).mT.expand(*batch, rows.shape[-1], rows.shape[-2])
    return torch.linalg.solve(wide, columns).mT.to(rows.dtype)


SMALL = 64
"""Up to this size a few products are quicker than the many calls of the power method."""


CURVED = 0.3
"""Of ``M^2`` in the move of a factor along -M: ``1 - m + 0.3 m^2`` has no root, and its square is near that by which
:class:`~gnomon.optim.square.Square` moves. The exponential's 0.5 would let a factor hardly shrink where m is large,
as it is at first."""


def spectral_norm(matrices: Tensor) -> Tensor:
    """``||M||_2`` by ``||(M^T M)^4||_F^(1/8)``: from above within ``k^(1/16)`` for k columns, which must be few."""
    peak = matrices.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(matrices.dtype).tiny)
    power = matrices / peak
    for _ in range(3):
        power = matmul(power.mT, power)
    return peak[..., 0, 0] * torch.linalg.vector_norm(power, dim=(-2, -1)) ** 0.125


class Dense(Group):
    """GL(k). ``A <- A Exp(eta / 2)`` with symmetric eta (Eq. gen_normal_param); D = 1/2.

    ``A`` is determined up to a rotation, ``tau = A A^T`` is not; with symmetric coordinates parallel
    transport is the identity, so that momentum is exact.
    """

    trivial_transport = True
    keeps_covariance = True

    def __init__(self, k: int) -> None:
        self.k = k = positive_size("k", k)
        self.shapes = ((k, k),)
        self.dim = k * (k + 1) // 2

    def mul(self, a: Element, b: Element) -> Element:
        return (matmul(a[0], b[0]),)

    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return matmul(rows, a[0] if transpose else a[0].mT)

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return solve_rows(a[0], rows, transpose)

    def ldiv(self, a: Element, b: Element) -> Element:
        return (solve_rows(a[0], b[0].mT, False).mT,)

    def logabsdet(self, a: Element) -> Tensor:
        return torch.linalg.slogdet(widen(a[0])).logabsdet.to(a[0].dtype)

    def restrict(self, x: Tensor, y: Tensor) -> Element:
        return (matmul(x.mT, y),)

    def half_seen(self, a: Element, s: Tensor) -> Element:
        return (product(s, a[0]),)

    def trace(self, covector: Element) -> Tensor:
        return covector[0].diagonal(dim1=-2, dim2=-1).sum(-1)

    def squared_norm(self, a: Element) -> Tensor:
        return torch.linalg.vector_norm(a[0], dim=(-2, -1)).square()

    def norm_estimate(self, n: Element) -> Tensor:
        return spectral_norm(n[0]) if self.k <= SMALL else super().norm_estimate(n)

    def subtract_identity(self, covector: Element) -> Element:
        covector[0].diagonal(dim1=-2, dim2=-1).sub_(1)
        return covector

    def steepest(self, covector: Element) -> Element:
        return (covector[0].mul_(0.5),)

    def congruent(self, a: Element, half: Element) -> Element:
        return (symmetric_product(a[0].mT, half[0]),)

    def seen(self, a: Element, x: Tensor) -> Element:
        xa = matmul(x, a[0])
        return (symmetric_product(xa.mT, xa),)

    def advance(self, a: Element, n: Element, order: int | None, factor: float = 1.0) -> Element:
        if order != 2:
            return super().advance(a, n, order, factor)
        change = symmetric_product(n[0], n[0]).mul_(CURVED * factor**2).add_(n[0], alpha=factor)  # n is symmetric
        return (product(a[0], change).add_(a[0]),)

    @property
    def row_cost(self) -> int:
        return self.k**2  # by the product of A with itself, which can be kept

    def apply_squared(self, a: Element, rows: Tensor, overwrite: bool = False) -> Tensor:
        return self.apply(a, self.apply(a, rows, transpose=True))  # cheaper than A A^T, for a few rows

    def squared(self, a: Element) -> Element:
        return (symmetric_product(a[0], a[0].mT),)

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        if scratch is None:
            return matmul(rows, square[0])
        if rows.stride(-1) == 1:
            return torch.matmul(rows, square[0], out=scratch)
        torch.matmul(square[0], rows.mT, out=scratch.mT)
        return scratch

    @property
    def compressed_shape(self) -> tuple[int, ...]:
        return (symmetric.packed_size(self.k),)

    def compress(self, n: Element) -> Tensor:
        return symmetric.pack(n[0])

    def expand(self, compressed: Tensor) -> Element:
        return (symmetric.unpack(compressed, self.k),)

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        return (matmul(grad[0], a[0].mT) if left else matmul(a[0].mT, grad[0]),)

    def scale(self, eta: Element) -> Element:
        return (0.25 * (eta[0] + eta[0].mT),)

    def unscale(self, n: Element) -> Element:
        return (n[0] + n[0].mT,)

    def retract(self, a: Element, eta: Element, order: int | None = 2, left: bool = False, sign: int = 1) -> Element:
        if order != 2:
            return super().retract(a, eta, order, left, sign)
        # The general form with the scaling inside the sums: as few passes over memory as there can be.
        start, doubled = a[0], eta[0] + eta[0].mT
        first = doubled @ start if left else start @ doubled
        second = doubled @ first if left else first @ doubled
        return (torch.add(start, first, alpha=0.25 * sign).add_(second, alpha=0.5 * 0.25**2),)

    def transpose(self, a: Element) -> Element:
        return (a[0].mT,)

    def to_dense(self, a: Element) -> Tensor:
        return a[0]

    def from_dense(self, matrix: Tensor) -> Element:
        return (matrix,)

    def from_diagonal(self, diagonal: Tensor) -> Element:
        return (torch.diag_embed(diagonal),)

    def factor(self, tau: Tensor) -> Element:
        return (torch.linalg.cholesky(tau),)
