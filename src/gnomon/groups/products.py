"""Products of matrices, as quick as they can be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import is_differentiated

LINE = 16
"""Numbers in a cache line, in float32."""
LARGE = 600
"""From this size on a product with rows at odd places in memory takes 1.3 times as long."""
LEAF = 200
"""Blocks up to this size are multiplied in full: a half would not cost less. At least 32, the step of block sizes."""


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

    At sizes above 500 it takes 0.6 to 0.8 of a product's time.
    """
    if _is_traced(a, b):
        return a @ b
    result = empty(a, _shape(a, b))
    _fill(result, a, b)
    return result


def mirror(matrix: Tensor) -> Tensor:
    """Make a sum of symmetric matrices and results of :func:`symmetric_product` symmetric to the last bit, in place."""
    k = matrix.shape[-1]
    if k <= LEAF:
        return torch.add(matrix.tril(), matrix.tril(-1).mT, out=matrix)
    mirror(matrix[..., : _half(k), : _half(k)])
    mirror(matrix[..., _half(k) :, _half(k) :])
    return matrix


def _half(k: int) -> int:
    """Where the second block begins: at a cache line."""
    return (k // 2 + 31) // 32 * 32


def _fill(result: Tensor, a: Tensor, b: Tensor) -> None:
    k = a.shape[-2]
    if k <= LEAF:
        torch.matmul(a, b, out=result)
        return
    h = _half(k)
    _fill(result[..., :h, :h], a[..., :h, :], b[..., :, :h])
    _fill(result[..., h:, h:], a[..., h:, :], b[..., :, h:])
    torch.matmul(a[..., h:, :], b[..., :, :h], out=result[..., h:, :h])
    result[..., :h, h:] = result[..., h:, :h].mT
