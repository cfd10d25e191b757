"""A factor with a sparse structure: an element of a :class:`~gnomon.groups.Group`, moved by the group's own algebra."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...groups import BlockTriangular, Element, Fixed, Group, Toeplitz, Triangular
from ...groups.base import times
from ...linalg import align
from .factor_forms import Projection
from .statistics import MatrixMoment, Moment, ProjectedMoment, RowMoment


@dataclass(frozen=True)
class StructuredFactor:
    """An element A of a group, with a momentum in the group's Lie algebra."""

    group: Group
    has_momentum: bool = True

    form = "factor"
    has_root = True

    def __str__(self) -> str:
        return str(self.group)

    @property
    def size(self) -> int:
        return self.group.k

    @property
    def keeps_matrix(self) -> bool:
        """A triangular factor costs as much as a k x k matrix does, so that a moment may be one."""
        return isinstance(self.group, Triangular)

    @property
    def has_scale(self) -> bool:
        return _holds_scalars(self.group)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        return self.group.storage_shape

    @property
    def momentum_shape(self) -> tuple[int, ...]:
        return self.group.storage_shape

    @property
    def covector_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.group.shapes

    @property
    def row_cost(self) -> int:
        if isinstance(self.group, Toeplitz):  # four transforms of twice the length, at a tenth of a product's speed
            return int(10 * 4 * 2 * self.size * max(math.log2(2 * self.size), 1))
        return 2 * self.size**2 if isinstance(self.group, Triangular) else 2 * self.group.numel

    @property
    def square_size(self) -> int:
        return _square_size(self.group)

    def identity(self, blocks: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return self.group.pack(self.group.identity((blocks,), dtype=dtype, device=device)).contiguous()

    def pack(self, a: Element) -> Tensor:
        return self.group.pack(a)

    def unpack(self, stored: Tensor) -> Element:
        return self.group.unpack(stored)

    def pack_momentum(self, m: Element) -> Tensor:
        return self.group.pack(m)

    def unpack_momentum(self, stored: Tensor) -> Element:
        return self.group.unpack(stored)

    def to_dense(self, a: Element) -> Tensor:
        return self.group.to_dense(a)

    def from_dense(self, matrix: Tensor) -> Element:
        return self.group.from_dense(matrix)

    # ------------------------------------------------------------------ the update
    def project_rows(self, a: Element | None, rows: Tensor) -> Element:
        return self.group.restrict(rows, rows) if a is None else self.group.gram(a, rows)

    def project(self, a: Element, moment: Moment) -> Projection:
        if isinstance(moment, MatrixMoment):
            half = self.group.from_dense(moment.matrix @ self.group.to_dense(a))
            return Projection((self.group.flatten(a) * self.group.flatten(half)).sum(-1), None, half)
        if isinstance(moment, ProjectedMoment):
            h = moment.covector
        else:
            assert isinstance(moment, RowMoment)
            h = self.project_rows(a, moment.rows)
        return Projection(self.group.trace(h), h)

    def through(self, a: Element, rows: Tensor) -> Tensor:
        return self.group.apply(a, rows, transpose=True)

    def project_product(self, x: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor]) -> Projection:
        return Projection((x[1] * z[1]).sum((-2, -1)), self.group.restrict(x[1], z[1]))

    def mean_square(self, a: Element) -> Tensor:
        return self.group.squared_norm(a) / self.size

    def tangent(self, a: Element, h: Projection, weight: Tensor, damping: Tensor, limit: float, rate: float) -> Element:
        group = self.group
        if h.half is not None:
            scaled = [block * align(damping, block) for block in group.dual(a)]
            m = group.pullback(a, _added(scaled, h.half, weight))
        else:
            assert h.covector is not None
            damped = [block.mul_(align(damping, block)) for block in group.pullback(a, group.dual(a))]
            m = _added(damped, h.covector, weight)
        identity = _identity_covector(group, m)
        m = group.metric_dual(tuple(block.sub_(one) for block, one in zip(m, identity, strict=True)))
        if limit < math.inf:
            scale = (limit / group.norm_estimate(m)).clamp(max=rate)
            return tuple(block.mul_(align(scale, block)) for block in m)
        return m if rate == 1 else tuple(block.mul_(rate) for block in m)

    def moved(self, a: Element, m: Element, order: int, factor: float) -> Element:
        return self.group.move(a, m if factor == 1 else times(factor, m), order)

    def rescaled(self, a: Element, factor: Tensor) -> Element:
        return tuple(block.mul_(align(factor, block)) for block in a)

    # ------------------------------------------------------------------ the preconditioner
    def square(self, a: Element) -> Element:
        return self.group.squared(a)

    def apply_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        return self.group.times_square(square, rows, overwrite, scratch)

    def project_outer(self, x: Tensor, y: Tensor) -> Tensor:
        return self.group.pack(self.group.restrict(x, y))

    def keeps_square(self, rows: int, uses: int) -> bool:
        return True


def _added(blocks: list[Tensor], more: Element, weight: Tensor) -> Element:
    """Add ``weight more`` to blocks in their memory."""
    return tuple(block.addcmul_(other, align(weight, other)) for block, other in zip(blocks, more, strict=True))


def _holds_scalars(group: Group) -> bool:
    """Return whether multiples of an element, block by block, are its multiples as a matrix, and elements too."""
    if isinstance(group, BlockTriangular):
        return all(_holds_scalars(block) for block in group.blocks)
    return group.is_algebra and not isinstance(group, Fixed)


@functools.lru_cache(maxsize=256)
def _square_size(group: Group) -> int:
    a = group.identity((1,), device="meta")
    square = group.squared(a)
    return 0 if square is a else sum(block.numel() for block in square)


def _identity_covector(group: Group, like: Element) -> Element:
    """Return ``<E_j, I>`` for every generator; cached, except in a graph that ``torch.compile`` traces."""
    if torch.compiler.is_compiling():
        return group.dual(group.identity_like(like))
    return _cached_identity_covector(group, like[0].dtype, like[0].device)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached, so it must be usable outside of inference mode
def _cached_identity_covector(group: Group, dtype: torch.dtype, device: torch.device) -> Element:
    return group.dual(group.identity(dtype=dtype, device=device))
