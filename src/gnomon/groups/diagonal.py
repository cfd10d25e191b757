"""Diagonal matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Element, Group, positive_size
from .operator import SymmetricOperator


class Diagonal(Group):
    """Invertible diagonal matrices; D = 1/2. Abelian, so transport is the identity."""

    trivial_transport = True

    def __init__(self, k: int) -> None:
        self.k = k = positive_size("k", k)
        self.shapes = ((k,),)
        self.dim = k

    def mul(self, a: Element, b: Element) -> Element:
        return (a[0] * b[0],)

    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return rows * a[0].unsqueeze(-2)

    def squared(self, a: Element) -> Element:
        return (a[0].square(),)

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        squares = square[0].unsqueeze(-2)
        return rows.mul_(squares) if overwrite else torch.mul(rows, squares, out=scratch)

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return rows / a[0].unsqueeze(-2)

    def ldiv(self, a: Element, b: Element) -> Element:
        return (b[0] / a[0],)

    def logabsdet(self, a: Element) -> Tensor:
        return a[0].abs().log().sum(-1)

    def restrict(self, x: Tensor, y: Tensor) -> Element:
        return (torch.linalg.vecdot(x, y, dim=-2),)

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        return (a[0] * grad[0],)

    def scale(self, eta: Element) -> Element:
        return (0.5 * eta[0],)

    def unscale(self, n: Element) -> Element:
        return (2 * n[0],)

    def dual(self, n: Element) -> Element:
        return n

    def trace(self, covector: Element) -> Tensor:
        return covector[0].sum(-1)

    def squared_norm(self, a: Element) -> Tensor:
        return (a[0] * self.dual(a)[0]).sum(-1)

    def square_diagonal(self, a: Element) -> Tensor:
        return a[0].square()

    def norm_estimate(self, n: Element) -> Tensor:
        return n[0].abs().amax(-1)

    def stretch(self, eta: Element) -> Tensor:
        return torch.maximum(eta[0].amax(-1), -eta[0].amin(-1))  # without the memory of absolute values

    def transpose(self, a: Element) -> Element:
        return a

    @property
    def products(self) -> int:
        return 0

    def congruence(self, a: Element, h: SymmetricOperator) -> Element:
        return (a[0].square() * h.diagonal(),)

    def to_dense(self, a: Element) -> Tensor:
        return torch.diag_embed(a[0])

    def from_dense(self, matrix: Tensor) -> Element:
        return (matrix.diagonal(dim1=-2, dim2=-1).clone(),)

    def from_diagonal(self, diagonal: Tensor) -> Element:
        return (diagonal,)

    def factor(self, tau: Tensor) -> Element:
        return (tau.diagonal(dim1=-2, dim2=-1).sqrt(),)

    def _exact_exp(self, n: Element) -> Element:
        return (n[0].exp(),)


class Fixed(Diagonal):
    """The trivial group: ones that never move (D = 0). It closes the affine group of a Gaussian."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.dim = 0

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        return rows if overwrite else rows.clone() if scratch is None else scratch.copy_(rows)

    def scale(self, eta: Element) -> Element:
        return (torch.zeros_like(eta[0]),)

    def unscale(self, n: Element) -> Element:
        return (torch.zeros_like(n[0]),)

    def stretch(self, eta: Element) -> Tensor:
        return torch.zeros_like(eta[0][..., 0])

    def from_dense(self, matrix: Tensor) -> Element:
        return (torch.ones_like(super().from_dense(matrix)[0]),)

    def from_diagonal(self, diagonal: Tensor) -> Element:
        return (torch.ones_like(diagonal),)

    def factor(self, tau: Tensor) -> Element:
        return self.from_dense(tau)
