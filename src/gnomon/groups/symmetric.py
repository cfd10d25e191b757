"""Symmetric matrices with every number stored once."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(k: int) -> int:
    """Numbers that a packed k x k matrix takes: ``k (k + 1) / 2``, and at most ``k`` more."""
    h = k // 2
    q = k - h
    return q * (q + 1) + q * h


def pack(matrix: Tensor) -> Tensor:
    """The blocks ``[[A, B^T], [B, C]]`` as B and a rectangle of A's upper and, one row lower, C's lower triangle.

    Rectangles are copied by rows; packing a triangle entry by entry would take thirty times as long.
    """
    k = matrix.shape[-1]
    h = k // 2
    rectangle = matrix.new_empty(*matrix.shape[:-2], k - h + 1, k - h)
    rectangle[..., 1:, :] = matrix[..., h:, h:]
    rectangle[..., :h, :h] = matrix[..., :h, :h].triu() + rectangle[..., :h, :h].tril(-1)
    rectangle[..., : h + 1, h:] = 0  # what is left, where k is odd
    return torch.cat([rectangle.flatten(-2), matrix[..., h:, :h].flatten(-2)], -1)


def unpack(packed: Tensor, k: int) -> Tensor:
    """The reverse of :func:`pack`."""
    h = k // 2
    q = k - h
    rectangle = packed[..., : q * (q + 1)].unflatten(-1, (q + 1, q))
    coupling = packed[..., q * (q + 1) :].unflatten(-1, (q, h))
    upper, lower = rectangle[..., :h, :h].triu(), rectangle[..., 1:, :].tril()
    matrix = packed.new_empty(*packed.shape[:-1], k, k)
    matrix[..., :h, :h] = upper + upper.triu(1).mT
    matrix[..., h:, h:] = lower + lower.tril(-1).mT
    matrix[..., h:, :h] = coupling
    matrix[..., :h, h:] = coupling.mT
    return matrix
