"""Elements of groups as tuples of tensors: their sums and multiples, and how they are stored."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

Element: TypeAlias = tuple[Tensor, ...]
"""The blocks of a group or algebra element, each with the same leading batch dimensions."""


def add(a: Element, b: Element, factor: float = 1) -> Element:
    """Return ``A + factor B``, block by block."""
    return tuple([torch.add(x, y, alpha=factor) for x, y in zip(a, b, strict=True)])


def accumulate(a: Element, b: Element, factor: float = 1) -> Element:
    """Add ``factor B`` to A in the memory of A, which must be a fresh result, and return A."""
    for x, y in zip(a, b, strict=True):
        x.add_(y, alpha=factor)
    return a


def times(factor: float, element: Element) -> Element:
    """Return the element with each block multiplied by a factor."""
    return tuple(factor * block for block in element)


class Blocks:
    """The storage of elements whose blocks have given shapes, behind any leading batch dimensions."""

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each block."""

    @property
    def numel(self) -> int:
        """Numbers stored for an element."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of an element kept in one tensor: its only block's, or that of all blocks end to end."""
        return self.shapes[0] if len(self.shapes) == 1 else (self.numel,)

    def pack(self, a: Element) -> Tensor:
        """Return the blocks as one tensor, ``(*batch, *storage_shape)``."""
        return a[0] if len(a) == 1 else self.flatten(a)

    def unpack(self, stored: Tensor) -> Element:
        """Return the blocks of one tensor, as views."""
        return (stored,) if len(self.shapes) == 1 else self.unflatten(stored)

    def flatten(self, a: Element) -> Tensor:
        """Return the blocks as one vector, ``(*batch, numel)``."""
        return torch.cat([block.flatten(-len(shape)) for block, shape in zip(a, self.shapes, strict=True)], -1)

    def unflatten(self, flat: Tensor) -> Element:
        """Return the blocks of one vector, as views."""
        parts = zip(flat.split(self._sizes, -1), self.shapes, strict=True)
        return tuple(part if len(shape) == 1 else part.unflatten(-1, shape) for part, shape in parts)

    def batch_shape(self, a: Element) -> torch.Size:
        """Return the leading dimensions of the blocks."""
        return a[0].shape[: a[0].ndim - len(self.shapes[0])]
