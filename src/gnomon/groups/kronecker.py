"""Kronecker products of two groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..linalg import widen
from .base import Element, Group, times
from .marginal import Marginal


class Kronecker(Group):
    """``A = K (x) C`` with ``K`` (p x p) in ``left`` and ``C`` (d x d) in ``right`` (Eq. mat_sub_manifold).

    The joint metric is singular, because ``(s K) (x) (C / s)`` is the same matrix. So the coordinates are
    blockwise, each with the other factor frozen (Eq. mat_gauss_norm_coord): ``K <- K Exp(eta_K /
    (2 sqrt d))`` and ``C <- C Exp(eta_C / (2 sqrt p))`` for dense factors. The metric is the identity on
    each block, not jointly; a step along a common scale moves twice. :class:`~gnomon.optim.INGD` has Kronecker code of
    its own with the same geometry, and does not use this class.
    """

    is_algebra = False

    def __init__(self, left: Group, right: Group) -> None:
        for name, part in (("left", left), ("right", right)):
            if not isinstance(part, Group):
                raise TypeError(f"{name} must be a group, got {part!r}; for a plain size use Dense({part!r})")
            if isinstance(part, Marginal):
                raise ValueError(f"{name} cannot be {part}, which is no group; use one, such as Arrow")
        self.left, self.right = left, right
        self.k = left.k * right.k
        self.shapes = left.shapes + right.shapes
        self.dim = left.dim + right.dim - 1
        self.trivial_transport = left.trivial_transport and right.trivial_transport

    def _arguments(self) -> str:
        return f"{self.left!r}, {self.right!r}"

    @property
    def coordinate_sets(self) -> tuple[tuple[int, ...], ...]:
        cut = len(self.left.shapes)
        right = tuple(tuple(i + cut for i in blocks) for blocks in self.right.coordinate_sets)
        return self.left.coordinate_sets + right

    def _open(self, a: Element) -> tuple[Element, Element]:
        cut = len(self.left.shapes)
        return a[:cut], a[cut:]

    def _each(self, operation: Callable[..., Element], *elements: Element) -> Element:
        """Return ``operation(group, *blocks)`` of both factors."""
        opened = [self._open(a) for a in elements]
        return (
            *operation(self.left, *(parts[0] for parts in opened)),
            *operation(self.right, *(parts[1] for parts in opened)),
        )

    def _on_grid(self, rows: Tensor, left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``left`` to the p-vectors and ``right`` to the d-vectors of rows seen as p x d grids."""
        n, p, d = rows.shape[-2], self.left.k, self.right.k
        x = right(rows.unflatten(-1, (p, d)).flatten(-3, -2))  # (n p) rows of length d
        x = left(x.unflatten(-2, (n, p)).mT.flatten(-3, -2))  # (n d) rows of length p
        return x.unflatten(-2, (n, d)).mT.flatten(-2)

    def mul(self, a: Element, b: Element) -> Element:
        return self._each(lambda g, a, b: g.mul(a, b), a, b)

    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        k, c = self._open(a)
        return self._on_grid(
            rows, lambda x: self.left.apply(k, x, transpose), lambda x: self.right.apply(c, x, transpose)
        )

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        k, c = self._open(a)
        return self._on_grid(
            rows,
            lambda x: self.left.apply_inverse(k, x, transpose),
            lambda x: self.right.apply_inverse(c, x, transpose),
        )

    def ldiv(self, a: Element, b: Element) -> Element:
        return self._each(lambda g, a, b: g.ldiv(a, b), a, b)

    def logabsdet(self, a: Element) -> Tensor:
        k, c = self._open(a)
        return self.right.k * self.left.logabsdet(k) + self.left.k * self.right.logabsdet(c)

    def restrict(self, x: Tensor, y: Tensor) -> Element:
        p, d = self.left.k, self.right.k
        x, y = x.unflatten(-1, (p, d)), y.unflatten(-1, (p, d))
        return (
            *self.left.restrict(x.mT.flatten(-3, -2), y.mT.flatten(-3, -2)),
            *self.right.restrict(x.flatten(-3, -2), y.flatten(-3, -2)),
        )

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        return self._each(lambda g, a, grad: g.pullback(a, grad, left), a, grad)

    def scale(self, eta: Element) -> Element:
        left, right = self._open(eta)
        return (
            *times(1 / math.sqrt(self.right.k), self.left.scale(left)),
            *times(1 / math.sqrt(self.left.k), self.right.scale(right)),
        )

    def unscale(self, n: Element) -> Element:
        left, right = self._open(n)
        return (
            *times(math.sqrt(self.right.k), self.left.unscale(left)),
            *times(math.sqrt(self.left.k), self.right.unscale(right)),
        )

    def dual(self, n: Element) -> Element:
        """Return the covector factor by factor, as the coordinates are: ``<N_K (x) I, E (x) I>`` and its twin."""
        left, right = self._open(n)
        return (*times(self.right.k, self.left.dual(left)), *times(self.left.k, self.right.dual(right)))

    def trace(self, covector: Element) -> Tensor:
        """Return the trace from the left factor's part, ``<E (x) I, M>``; the right factor's part gives the same."""
        return self.left.trace(self._open(covector)[0])

    def squared_norm(self, a: Element) -> Tensor:
        left, right = self._open(a)
        return self.left.squared_norm(left) * self.right.squared_norm(right)

    def square_diagonal(self, a: Element) -> Tensor:
        left, right = self._open(a)
        diagonals = self.left.square_diagonal(left).unsqueeze(-1) * self.right.square_diagonal(right).unsqueeze(-2)
        return diagonals.flatten(-2)

    def length(self, eta: Element) -> Tensor:
        """Return the sum of both factors' lengths, which no step exceeds: a common scale moves twice."""
        left, right = self._open(eta)
        return self.left.length(left) + self.right.length(right)

    def norm_bound(self, n: Element) -> Tensor:
        """Return a bound on the norm of ``N_K (x) I + I (x) N_C``."""
        left, right = self._open(n)
        return self.left.norm_bound(left) + self.right.norm_bound(right)

    def norm_estimate(self, n: Element) -> Tensor:
        """Return a bound on the norm of ``N_K (x) I + I (x) N_C``.

        It is far above the norm where the two cancel, as for a common scale of opposite signs.
        """
        left, right = self._open(n)
        return self.left.norm_estimate(left) + self.right.norm_estimate(right)

    def stretch(self, eta: Element) -> Tensor:
        left, right = self._open(eta)
        return self.left.stretch(left) / math.sqrt(self.right.k) + self.right.stretch(right) / math.sqrt(self.left.k)

    def bracket(self, n: Element, m: Element) -> Element:
        return self._each(lambda g, n, m: g.bracket(n, m), n, m)

    def exp(self, n: Element, order: int | None = None) -> Element:
        return self._each(lambda g, n: g.exp(n, order), n)

    def move(self, a: Element, n: Element, order: int | None = None, left: bool = False) -> Element:
        return self._each(lambda g, a, n: g.move(a, n, order, left), a, n)

    @property
    def transposed(self) -> Group:
        return Kronecker(self.left.transposed, self.right.transposed)

    def transpose(self, a: Element) -> Element:
        return self._each(lambda group, part: group.transpose(part), a)

    def to_dense(self, a: Element) -> Tensor:
        k, c = self._open(a)
        k_dense, c_dense = self.left.to_dense(k), self.right.to_dense(c)
        grid = k_dense[..., :, None, :, None] * c_dense[..., None, :, None, :]
        return grid.flatten(-4, -3).flatten(-2)

    def _nearest_factors(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``K`` and ``C`` of the nearest Kronecker product.

        They are the leading singular pair of the rearranged matrix.
        """
        p, d = self.left.k, self.right.k
        grid = matrix.unflatten(-1, (p, d)).unflatten(-3, (p, d)).transpose(-3, -2)
        u, s, v = torch.linalg.svd(widen(grid.flatten(-4, -3).flatten(-2)), full_matrices=False)
        root = s[..., :1].sqrt()
        k = (root * u[..., 0]).unflatten(-1, (p, p)).to(matrix.dtype)
        c = (root * v[..., 0, :]).unflatten(-1, (d, d)).to(matrix.dtype)
        sign = torch.where(k.diagonal(dim1=-2, dim2=-1).sum(-1) < 0, -1.0, 1.0).to(k)[..., None, None]
        return sign * k, sign * c

    def from_dense(self, matrix: Tensor) -> Element:
        k, c = self._nearest_factors(matrix)
        return (*self.left.from_dense(k), *self.right.from_dense(c))

    def from_diagonal(self, diagonal: Tensor) -> Element:
        grid = diagonal.unflatten(-1, (self.left.k, self.right.k))
        overall = grid.mean((-2, -1)).sqrt().unsqueeze(-1)
        return (
            *self.left.from_diagonal(grid.mean(-1) / overall),
            *self.right.from_diagonal(grid.mean(-2) / overall),
        )

    def factor(self, tau: Tensor) -> Element:
        k, c = self._nearest_factors(tau)
        return (*self.left.factor(k), *self.right.factor(c))
