"""Symmetric matrices by a factor in a group: ``A A^T`` and its inverse."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Element, Group
from .low_rank import LowRank
from .operator import SymmetricOperator
from .parts import is_whole, lower_factor, part_of_inverse, part_of_square
from .triangular import Triangular

LARGEST = 2**26
"""Numbers of a factor's rows that are formed where a part of a matrix has no structure of its own."""


class Square(NamedTuple):
    """``S = A A^T``, or with ``inverse`` its inverse ``A^-T A^-1``, for an element A of a group."""

    group: Group
    element: Element
    inverse: bool

    @property
    def inverted(self) -> Square:
        return self._replace(inverse=not self.inverse)

    @property
    def batch_shape(self) -> torch.Size:
        return self.group.batch_shape(self.element)

    def to(self, dtype: torch.dtype) -> Square:
        """Return the same matrix in another precision."""
        return self._replace(element=tuple(block.to(dtype) for block in self.element))

    @property
    def products(self) -> int:
        """How many products with H :meth:`trace_with` takes."""
        return self.group.rank if isinstance(self.group, LowRank) else self.group.products

    def _root(self) -> tuple[Group, Element]:
        """Return R and its group, for ``S = R R^T``."""
        group, a = self.group, self.element
        if not self.inverse:
            return group, a
        return group.transposed, group.transpose(group.ldiv(a, group.identity_like(a)))

    def trace_with(self, other: Square) -> Tensor:
        """Return ``tr(S H)`` for another such matrix H.

        It is the trace of ``R^T H R``, which takes as few products with H as the structure of R needs.
        """
        h = other.operator()
        if isinstance(self.group, LowRank):
            trace = self.group.inverse_trace_with if self.inverse else self.group.trace_with
            return trace(self.element, h)
        group, root = self._root()
        return group.trace(group.congruence(root, h))

    def operator(self) -> SymmetricOperator:
        """Return S as an operator, by its products and its diagonal."""
        diagonal = self.diagonal()
        return SymmetricOperator(self.group.k, self._product, lambda part: diagonal[..., part.where])

    def _product(self, rows: Tensor) -> Tensor:
        act = self.group.apply_inverse if self.inverse else self.group.apply
        return act(self.element, act(self.element, rows, not self.inverse), self.inverse)

    def diagonal(self) -> Tensor:
        """Return the diagonal of S, of shape ``(*batch, k)``."""
        if self.inverse and isinstance(self.group, LowRank):
            return self.group.inverse_diagonal(self.element)
        group, root = self._root()
        return group.square_diagonal(root)

    def logdet(self) -> Tensor:
        return (-2 if self.inverse else 2) * self.group.logabsdet(self.element)

    # ------------------------------------------------------------------ vectors (*sample, *batch, k)
    def color(self, z: Tensor) -> Tensor:
        """Return ``R z`` for ``S = R R^T``, which turns vectors of unit covariance into vectors of covariance S."""
        return (self.group.rsolve if self.inverse else self.group.matvec)(self.element, z)

    def _half(self, x: Tensor) -> Tensor:
        """Return ``R^T x``."""
        return (self.group.solve if self.inverse else self.group.rmatvec)(self.element, x)

    def matvec(self, x: Tensor) -> Tensor:
        """Return ``S x``."""
        return self.color(self._half(x))

    def quadratic_form(self, x: Tensor) -> Tensor:
        """Return ``x^T S x``."""
        return self._half(x).square().sum(-1)

    # ------------------------------------------------------------------ parts
    def to_dense(self) -> Tensor:
        """Return S as a k x k matrix."""
        rows = self._rows(torch.arange(self.group.k, device=self.element[0].device))
        return rows @ rows.mT

    def _rows(self, where: Tensor) -> Tensor:
        """Return rows of R, of shape ``(*batch, len(where), k)``."""
        group, a = self.group, self.element
        units = a[0].new_zeros(len(where), group.k)
        units[torch.arange(len(where), device=where.device), where] = 1
        units = units.expand(*self.batch_shape, -1, -1)
        return group.apply_inverse(a, units) if self.inverse else group.apply(a, units, transpose=True)

    def part(self, where: Tensor) -> Square:
        """Return ``S[where, where]`` for different positions, in a structure of its own if it has one, else dense.

        A dense part costs as many products with R as it has rows; a large one is an error.
        """
        group, a, m = self.group, self.element, len(where)
        if is_whole(where, group.k):
            return self
        if self.inverse:
            inverse = part_of_inverse(group, a, where)
            if inverse is not None:
                return Square(*inverse)
        else:
            outer = part_of_square(group, a, where)
            if outer is not None:
                return Square(*outer, False)
        if m * group.k > LARGEST:
            raise ValueError(
                f"{m} of the {group.k} coordinates of {group}, in this order, have no structure of their own, and a "
                f"dense factor is made from {m * group.k:,} numbers, more than {LARGEST:,}; take fewer coordinates, "
                "or keep or leave out whole blocks of the structure, in increasing order"
            )
        triangular = Triangular(m)
        return Square(triangular, triangular.from_dense(lower_factor(self._rows(where))), False)
