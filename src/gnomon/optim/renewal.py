"""An update of a layer's factors as a function of tensors: what there was and what was seen to what there will be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..groups import Element, Group
from ..groups.base import align
from .factors import KroneckerFactors, Statistics

LEVEL_MEMORY = 0.9
"""How much of the running mean of the curvature an update keeps."""


@dataclass(frozen=True)
class Rule:
    """The settings of an update, by their names in the paper where they have one."""

    a1: float
    b1: float
    damping: float
    bound: float
    """On the spectral norm of what is added to a momentum."""
    order: int
    """Of the exponential."""
    inside: bool
    """Whether b1 is a part of the momentum."""


class Renewed(NamedTuple):
    """What an update gives; all as it was in layers that are not finite."""

    k: Tensor
    c: Tensor
    m_k: Tensor | None
    m_c: Tensor | None
    level: Tensor | None
    finite: Tensor
    """Whether each layer's curvature is."""


def renewed(
    factors: KroneckerFactors,
    rule: Rule,
    k: Element,
    c: Element,
    momenta: tuple[Tensor | None, Tensor | None],
    level: Tensor | None,
    seen: Statistics | Tensor,
    ok: Tensor,
    layers: int,
) -> Renewed:
    """Factors of so many layers, block after block, from their statistics or from their gradients."""
    if isinstance(seen, Statistics):
        curvature = factors.curvature(k, c, seen)
    else:
        curvature = factors.gradient_curvature(k, c, seen)
    mean = curvature.absolute_mean
    if level is None:
        curvature = curvature.absolute()
    else:
        # A batch's curvature is in units of its own mean, so that the loss's scale may change at any time. A single
        # gradient matrix is too noisy for that: the mean would turn with it, and the fixed point would move.
        curvature = curvature.relative_to(None if isinstance(seen, Statistics) else level)
    rate, limit = (rule.b1, rule.bound) if rule.inside else (1.0, rule.bound / rule.b1 if rule.b1 else math.inf)
    pressures = factors.pressure(k, c, curvature, rule.damping, limit, rate)
    finite = finite_layers([*pressures[0], *pressures[1]], layers)
    may = (ok & finite).repeat_interleave(len(mean) // layers)
    sides = zip((factors.left, factors.right), (k, c), pressures, momenta, strict=True)
    (new_k, m_k), (new_c, m_c) = (_moved(*side, rule, may.to(k[0].dtype)) for side in sides)
    excess = factors.imbalance(k, c)
    if excess is not None:
        excess = torch.where(may, excess, 1)
        new_k, new_c = factors.left.scaled(new_k, 1 / excess), factors.right.scaled(new_c, excess)
    new_level = None if level is None else torch.where(may, _followed(level, mean), level)
    return Renewed(factors.left.pack(new_k), factors.right.pack(new_c), m_k, m_c, new_level, finite)


def finite_layers(tensors: Iterable[Tensor], layers: int) -> Tensor:
    """Whether all blocks of each layer are finite in all tensors."""
    sums = [tensor.sum(tuple(range(1, tensor.ndim))) for tensor in tensors]  # not finite where an entry is not
    return torch.stack(sums).isfinite().all(0).view(layers, -1).all(1)


def _followed(level: Tensor, now: Tensor) -> Tensor:
    """The running mean of the curvature; it begins with the first that is not zero."""
    return torch.where(level > 0, level.lerp(now, 1 - LEVEL_MEMORY), now)


def _moved(
    group: Group, factor: Element, pressure: Element, momentum: Tensor | None, rule: Rule, gates: Tensor
) -> tuple[Element, Tensor | None]:
    """``m <- a1 m + pressure`` and ``A <- A Exp(-m)``, b1 being in one of them; nothing where a gate is zero."""
    # Zeros where nothing may change: to choose between old and new values would take longer.
    along = tuple(block.nan_to_num_(0.0, 0.0, 0.0).mul_(align(gates, block)) for block in pressure)
    if momentum is not None:
        kept = gates * (rule.a1 - 1) + 1
        pairs = zip(along, group.expand(momentum), strict=True)
        along = tuple(block.addcmul_(past, align(kept, past)) for block, past in pairs)
        momentum = group.compress(along)
        along = tuple(block * align(gates, block) for block in along)
    return group.advance(factor, along, rule.order, -1.0 if rule.inside else -rule.b1), momentum
