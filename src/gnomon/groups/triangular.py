"""Triangular matrices in packed storage."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..linalg import SMALL_SIZE, spectral_bound, spectral_norm, widen
from .base import Element, Group, positive_size

_LEAF = 64  # below this size a plain product is faster than splitting


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept, and so fit for every later use
def _packed_index(k: int, upper: bool, device: torch.device) -> Tensor:
    """Return the positions of the packed entries in the row-major k x k matrix."""
    rows, columns = (torch.triu_indices if upper else torch.tril_indices)(k, k, device=device)
    return rows * k + columns


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept, and so fit for every later use
def _packed_scales(k: int, upper: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the scaling D of packed coordinates: 1/2 on the diagonal, 1/sqrt(2) off it."""
    index = _packed_index(k, upper, device)
    scales = torch.full(index.shape, math.sqrt(0.5), dtype=dtype, device=device)
    scales[index // k == index % k] = 0.5
    return scales


def _lower_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``A B`` for lower triangular matrices in a third of the operations of a full product."""
    k = a.shape[-1]
    if k <= _LEAF:
        return a @ b
    h = k // 2
    top = torch.cat([_lower_product(a[..., :h, :h], b[..., :h, :h]), torch.zeros_like(a[..., :h, h:])], -1)
    corner = a[..., h:, :h] @ b[..., :h, :h] + a[..., h:, h:] @ b[..., h:, :h]
    bottom = torch.cat([corner, _lower_product(a[..., h:, h:], b[..., h:, h:])], -1)
    return torch.cat([top, bottom], -2)


class Triangular(Group):
    """Lower (or upper) triangular matrices with non-zero diagonal: the Cholesky-like factor.

    An element is one packed vector of ``k (k + 1) / 2`` numbers. D is 1/2 on the diagonal and 1/sqrt(2)
    off it. The coordinates are not symmetric, so vectors carried along a step need the correction of
    :meth:`gnomon.frames.Chart.carry`.
    """

    def __init__(self, k: int, upper: bool = False) -> None:
        self.k = k = positive_size("k", k)
        self.upper = upper
        self.dim = k * (k + 1) // 2
        self.shapes = ((self.dim,),)
        self.trivial_transport = k == 1

    def _arguments(self) -> str:
        return f"{self.k}, upper=True" if self.upper else str(self.k)

    def _pack(self, matrix: Tensor) -> Element:
        return (matrix.flatten(-2).index_select(-1, _packed_index(self.k, self.upper, matrix.device)),)

    def _unpack(self, a: Element) -> Tensor:
        packed = a[0]
        zeros = packed.new_zeros(*packed.shape[:-1], self.k * self.k)
        index = _packed_index(self.k, self.upper, packed.device)
        return zeros.index_copy(-1, index, packed).unflatten(-1, (self.k, self.k))

    def mul(self, a: Element, b: Element) -> Element:
        left, right = self._unpack(a), self._unpack(b)
        if self.upper:
            return self._pack(_lower_product(right.mT, left.mT).mT)
        return self._pack(_lower_product(left, right))

    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        matrix = self._unpack(a)
        return rows @ (matrix if transpose else matrix.mT)

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        matrix = widen(self._unpack(a))
        solution = torch.linalg.solve_triangular(
            matrix.mT if transpose else matrix, widen(rows).mT, upper=self.upper != transpose
        )
        return solution.mT.to(rows.dtype)

    def ldiv(self, a: Element, b: Element) -> Element:
        return self._pack(self.apply_inverse(a, self._unpack(b).mT).mT)

    def logabsdet(self, a: Element) -> Tensor:
        return self._unpack(a).diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def restrict(self, x: Tensor, y: Tensor) -> Element:
        return self._pack(x.mT @ y)

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        matrix, g = self._unpack(a), self._unpack(grad)
        return self._pack(g @ matrix.mT if left else matrix.mT @ g)

    def _scales(self, like: Tensor) -> Tensor:
        return _packed_scales(self.k, self.upper, like.dtype, like.device)

    def scale(self, eta: Element) -> Element:
        return (eta[0] * self._scales(eta[0]),)

    def unscale(self, n: Element) -> Element:
        return (n[0] / self._scales(n[0]),)

    def dual(self, n: Element) -> Element:
        return n

    def stretch(self, eta: Element) -> Tensor:
        n = self._unpack(self.scale(eta))
        return spectral_norm(widen(n + n.mT)).to(n.dtype)

    def quick_stretch(self, eta: Element) -> Tensor | None:
        if self.k <= SMALL_SIZE:
            return None
        n = self._unpack(self.scale(eta))
        return spectral_bound(widen(n + n.mT)).to(n.dtype)

    @property
    def transposed(self) -> Group:
        return Triangular(self.k, not self.upper)

    def to_dense(self, a: Element) -> Tensor:
        return self._unpack(a)

    def from_dense(self, matrix: Tensor) -> Element:
        return self._pack(matrix)

    def from_diagonal(self, diagonal: Tensor) -> Element:
        return self._pack(torch.diag_embed(diagonal))

    def factor(self, tau: Tensor) -> Element:
        if self.upper:  # U U^T = tau: the Cholesky factor of tau with its order reversed
            return self._pack(torch.linalg.cholesky(tau.flip(-1, -2)).flip(-1, -2))
        return self._pack(torch.linalg.cholesky(tau))
