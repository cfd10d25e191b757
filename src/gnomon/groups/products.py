"""Products of matrices, as quick as they can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .base import is_differentiated

LINE = 16
"""Numbers in a cache line, in float32."""
LARGE = 600
"""From this size on a product with rows at odd places in memory takes 1.3 times as long."""
PANEL = 128
"""Rows of a symmetric product that are computed at a time, at least: fewer would take as long."""
PANELS = 16
"""At most so many, whose rows are more then: devices with many cores need large products."""


def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for a matrix, with rows that begin at cache lines where that counts."""
    width = shape[-1]
    if width < LARGE or width % LINE == 0:
        return like.new_empty(shape)
    return like.new_empty(*shape[:-1], math.ceil(width / LINE) * LINE)[..., :width]


def _shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    batch, other = a.shape[:-2], b.shape[:-2]
    if batch != other:
        batch = torch.broadcast_shapes(batch, other)
    return (*batch, a.shape[-2], b.shape[-1])


def _is_traced(a: Tensor, b: Tensor) -> bool:
    """Whether somebody looks at how a product is made, to differentiate or to compile it."""
    return torch.compiler.is_compiling() or is_differentiated(a, b)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``A B`` of small matrices; for two batches torch's ``matmul`` would take five calls more."""
    return torch.bmm(a, b) if a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] else torch.matmul(a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``A B`` of large matrices."""
    return a @ b if _is_traced(a, b) else torch.matmul(a, b, out=empty(a, _shape(a, b)))


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """``A B`` where that is known to be symmetric: its lower half is computed, its upper half is a copy.

    At sizes above 500 it takes 0.6 to 0.7 of a product's time.
    """
    if _is_traced(a, b):
        return a @ b
    result = empty(a, _shape(a, b))
    for first, end in _panels(a.shape[-2]):
        torch.matmul(a[..., first:end, :], b[..., :, :end], out=result[..., first:end, :end])
        if first:
            result[..., :first, first:end] = result[..., first:end, :first].mT
    return result


def mirror(matrix: Tensor) -> Tensor:
    """Make a sum of symmetric matrices and results of :func:`symmetric_product` symmetric to the last bit, in place."""
    for first, end in _panels(matrix.shape[-1]):
        block = matrix[..., first:end, first:end]
        torch.mul(block + block.mT, 0.5, out=block)  # a sum does not depend on the order of two numbers
    return matrix


def _panels(k: int) -> Iterator[tuple[int, int]]:
    """Where panels of a matrix begin, at cache lines, and end."""
    width = max(PANEL, k // PANELS // LINE * LINE)
    return itertools.pairwise([*range(0, max(round(k / width), 1) * width, width), k])
