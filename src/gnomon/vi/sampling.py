"""Standard normal draws with less variance than independent ones."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

ORTHOGONAL_SHARE = 64
"""Draws are made orthogonal up to this many dimensions for each. Beyond, random directions nearly are, and it costs."""
_TABLE = 4096


def standard_draws(
    n: int, d: int, *, generator: torch.Generator | None = None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return ``(n, d)`` draws of N(0, I) with orthogonal directions and stratified lengths.

    Each has the standard normal distribution, and is to be used with its mirror image. With ``n = d`` the second
    moment of the batch is the identity but for the lengths, whose squares are spread as evenly as they can be. So the
    expectation of a quadratic function, over the draws and their mirror images, has nearly no variance.
    """
    if d > ORTHOGONAL_SHARE * n:  # in single precision, in which torch draws five times as fast
        return torch.randn(n, d, generator=generator, dtype=torch.float32, device=device).to(dtype)
    rows = [min(d, n - first) for first in range(0, n, d)]
    blocks = [torch.randn(size, d, generator=generator, dtype=dtype, device=device) for size in rows]
    if d == 1:
        return torch.cat(blocks)
    directions = torch.cat([_orthonormal(block) for block in blocks])
    return directions * _radii(n, d, generator, directions).unsqueeze(-1)


def _orthonormal(rows: Tensor) -> Tensor:
    """Return uniformly distributed orthonormal rows from as many normal ones."""
    q, r = torch.linalg.qr(rows.mT)
    return (q * r.diagonal().sign()).mT


def _radii(n: int, d: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return lengths of n standard normal vectors, one from each of n equally likely intervals, in random order."""
    options: Any = {"generator": generator, "dtype": like.dtype, "device": like.device}
    levels = (torch.arange(n, dtype=like.dtype, device=like.device) + torch.rand(n, **options)) / n
    shuffled = levels[torch.rand(n, **options).argsort()]
    quantiles = _chi_quantiles(d).to(like)
    place = shuffled * (_TABLE - 1)
    low = place.floor().clamp(max=_TABLE - 2)
    share = place - low
    index = low.long()
    return quantiles[index] * (1 - share) + quantiles[index + 1] * share


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _chi_quantiles(d: int) -> Tensor:
    """Return quantiles of the length of a standard normal vector, at even levels, by bisection of ``gammainc``."""
    levels = (torch.arange(_TABLE, dtype=torch.float64) / (_TABLE - 1)).clamp(0.1 / _TABLE, 1 - 0.1 / _TABLE)
    low = torch.zeros_like(levels)
    high = torch.full_like(levels, math.sqrt(d) + 8)
    shape = torch.full_like(levels, d / 2)
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.gammainc(shape, middle.square() / 2) < levels
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2
