"""What factors cost: the numbers that are kept of them, and the multiplications of an update and of a step."""

from __future__ import annotations

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..groups import Dense, Element, Group
from .factors import Covariance, Curvature, KroneckerFactors, Sight


@functools.lru_cache(maxsize=256)
def square_size(group: Group) -> int:
    """How many numbers ``A A^T`` takes beside A; none where it is applied by A itself."""
    a = group.identity((1,), device="meta")
    square = group.squared(a)
    return 0 if square is a else sum(block.numel() for block in square)


@functools.lru_cache(maxsize=256)
def costs(factors: KroneckerFactors, blocks: int, order: int) -> tuple[int, int]:
    """Multiplications of an update of both factors and of preconditioning a matrix, counted on tensors without data.

    The update is one from many rows; few make that of a dense factor cheaper.
    """
    groups = (factors.left, factors.right)
    k, c = (group.identity((blocks,), device="meta") for group in groups)
    ones = torch.ones(blocks, device="meta")
    entries = blocks * (sum(group.numel for group in groups) + factors.left.k * factors.right.k)
    with FlopCounterMode(display=False) as counter:
        seen = [_seen_once(group, a) for group, a in zip(groups, (k, c), strict=True)]
        pressures = factors.pressure(k, c, Curvature(seen[0], seen[1], ones, ones), 0.1)
        for group, factor, m in zip(groups, (k, c), pressures, strict=True):
            group.advance(factor, m, order)
            if type(group) is Dense:
                group.squared(factor)
    update = counter.get_total_flops() // 2
    with FlopCounterMode(display=False) as counter:
        matrix = torch.ones(blocks, factors.right.k, factors.left.k, device="meta")
        for group, factor, rows in ((factors.left, k, matrix), (factors.right, c, matrix.mT)):
            if isinstance(group, Dense):
                rows @ factor[0]  # by the product of the factor with itself, which is kept
            else:
                group.times_square(group.squared(factor), rows)
    return update + entries, counter.get_total_flops() // 2 + entries


def _seen_once(group: Group, a: Element) -> Sight:
    """A single row, or a sum of squares where many rows are kept as that."""
    blocks, k = group.batch_shape(a)[0], group.k
    rows = torch.ones(blocks, 1, k, device="meta")
    kept = Covariance(rows.new_ones(blocks, k, k), rows.new_ones(blocks)) if group.keeps_covariance else None
    return kept.sight(group, a) if kept else Sight(group.seen(a, rows), None, rows.new_ones(blocks), rows.new_ones(()))
