"""All invertible matrices, with symmetric coordinates: the full SPD manifold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import SMALL_SIZE, apply_symmetric, matmul, spectral_bound, spectral_norm, symmetric_product, widen
from .base import Element, Group, positive_size


def solve_rows(matrix: Tensor, rows: Tensor, transpose: bool) -> Tensor:
    """Return ``M^-1 x`` (or ``M^-T x``) for each row, by LU in at least float32."""
    wide, columns = widen(matrix.mT if transpose else matrix), widen(rows).mT
    if matrix.shape[:-2] != rows.shape[:-2]:
        # Expanded, because torch.linalg.solve takes a right-hand side with fewer dimensions for a batch of vectors.
        batch = torch.broadcast_shapes(matrix.shape[:-2], rows.shape[:-2])
        columns = columns.expand(*batch, rows.shape[-1], rows.shape[-2])
    return torch.linalg.solve(wide, columns).mT.to(rows.dtype)


def _plus_product(start: Tensor, x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Return ``start + alpha x y`` of batches, for which there is no such function in torch."""
    return torch.add(start, matmul(x, y), alpha=alpha)


class Dense(Group):
    """GL(k). ``A <- A Exp(eta / 2)`` with symmetric eta (Eq. gen_normal_param); D = 1/2.

    ``A`` is determined up to a rotation, ``tau = A A^T`` is not; with symmetric coordinates parallel
    transport is the identity, so that momentum is exact.
    """

    trivial_transport = True

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

    def trace(self, covector: Element) -> Tensor:
        return covector[0].diagonal(dim1=-2, dim2=-1).sum(-1)

    def squared_norm(self, a: Element) -> Tensor:
        return torch.linalg.vector_norm(a[0], dim=(-2, -1)).square()

    def norm_estimate(self, n: Element) -> Tensor:
        return spectral_norm(n[0]) if self.k <= SMALL_SIZE else super().norm_estimate(n)

    def stretch(self, eta: Element) -> Tensor:
        return spectral_norm(widen(0.5 * (eta[0] + eta[0].mT))).to(eta[0].dtype)

    def quick_stretch(self, eta: Element) -> Tensor | None:
        if self.k <= SMALL_SIZE:
            return None
        return spectral_bound(widen(0.5 * (eta[0] + eta[0].mT))).to(eta[0].dtype)

    def metric_dual(self, covector: Element) -> Element:
        return (covector[0].mul_(0.5),)

    def apply_squared(self, a: Element, rows: Tensor, overwrite: bool = False) -> Tensor:
        return self.apply(a, self.apply(a, rows, transpose=True))  # cheaper than A A^T, for a few rows

    def squared(self, a: Element) -> Element:
        return (symmetric_product(a[0], a[0].mT),)

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        return apply_symmetric(square[0], rows, scratch)

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        return (matmul(grad[0], a[0].mT) if left else matmul(a[0].mT, grad[0]),)

    def scale(self, eta: Element) -> Element:
        return (0.25 * (eta[0] + eta[0].mT),)

    def unscale(self, n: Element) -> Element:
        return (n[0] + n[0].mT,)

    def dual(self, n: Element) -> Element:
        return n

    def retract(self, a: Element, eta: Element, order: int | None = 2, left: bool = False, sign: int = 1) -> Element:
        if order != 2:
            return super().retract(a, eta, order, left, sign)
        # A + (A + A N / 2) N with the scaling inside the products: as few passes over memory as there can be.
        start, doubled = a[0], eta[0] + eta[0].mT
        plus_product = torch.addmm if start.ndim == doubled.ndim == 2 else _plus_product
        if left:
            half = plus_product(start, doubled, start, alpha=0.125 * sign)
            return (plus_product(start, doubled, half, alpha=0.25 * sign),)
        half = plus_product(start, start, doubled, alpha=0.125 * sign)
        return (plus_product(start, half, doubled, alpha=0.25 * sign),)

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
