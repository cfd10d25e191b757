"""The multiplications of an update of factors and of a step, counted on tensors without data."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .dense_factor import DenseFactor
from .factor_forms import FactorForm, FactorPair, Projection
from .gram_factor import GramFactor
from .layers.base import Turn
from .statistics import MatrixMoment, Moment, RowMoment, summed_moment


@functools.lru_cache(maxsize=256)
def update_and_step(pair: FactorPair, blocks: int, order: int) -> tuple[int, int]:
    """Return the multiplications of an update of both factors, and of preconditioning a gradient.

    The update is one from many rows; few rows make that of a dense factor cheaper.
    """
    sides = [(form, form.unpack(form.identity(blocks, torch.float32, "meta"))) for form in pair]
    ones, rows = torch.ones(blocks, device="meta"), torch.ones(blocks, pair.right.size, pair.left.size, device="meta")
    entries = blocks * (sum(_stored(form) for form in pair) + pair.left.size * pair.right.size)
    with _counter() as counter:
        for form, a in sides:
            m = form.tangent(a, _projection(form, a, blocks), ones, ones, float("inf"), 1.0)
            form.moved(a, m, order, -1.0)
            if isinstance(form, DenseFactor):
                form.square(a)
    update = counter.get_total_flops() // 2
    with _counter() as counter:
        for (form, a), gradient in zip(sides, (rows, rows.mT), strict=True):
            if isinstance(form, (DenseFactor, GramFactor)):
                gradient @ a[0]  # by the product of the factor with itself, which is stored
            else:
                form.apply_square(form.square(a), gradient)
    return update + entries, counter.get_total_flops() // 2 + entries


@functools.lru_cache(maxsize=256)
def turn_work(turn: Turn | None, blocks: int, d: int, p: int) -> int:
    """Return the multiplications that turn averages into directions; 0 where averages are directions as they are."""
    if turn is None:
        return 0
    with _counter() as counter:
        turn(torch.empty(blocks, d, p, device="meta"), 0)
    return counter.get_total_flops() // 2


def _stored(form: FactorForm) -> int:
    return sum(torch.Size(shape).numel() for shape in form.covector_shapes)


def _projection(form: FactorForm, a: tuple[Tensor, ...], blocks: int) -> Projection:
    """Return the projection of a single row, or of the matrix of many rows where a form stores that."""
    ones, k = torch.ones(blocks, device="meta"), form.size
    moment: Moment = RowMoment(torch.ones(blocks, 1, k, device="meta"), ones)
    if form.keeps_matrix:
        moment = MatrixMoment(torch.ones(blocks, k, k, device="meta"), ones)
    return form.project(a, moment)


@functools.lru_cache(maxsize=256)
def moment_work(form: FactorForm, blocks: int, rows: int) -> int:
    """Return the multiplications of a moment of so many rows."""
    factor = None if form.keeps_matrix else form.unpack(form.identity(blocks, torch.float32, "meta"))
    with _counter() as counter:
        ones = torch.ones(blocks, device="meta")
        summed_moment(form, factor, torch.empty(blocks, rows, form.size, device="meta"), ones)
    return counter.get_total_flops() // 2 + blocks * rows * form.size


def _counter():  # type: ignore[no-untyped-def]
    """Return a counter of multiplications and additions, which is imported here because that takes a while."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)
