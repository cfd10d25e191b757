"""Types of numbers, and rounding to half precision that is right on average."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
promoted = functools.cache(torch.promote_types)
"""The type of a result; torch's own function takes as long as an operation."""


def power_of_two(size: Tensor) -> Tensor:
    """The power of two next above each size, by which a product is exact; 1 where a size is zero or not finite."""
    mantissa, _ = torch.frexp(size)
    return torch.where((size > 0) & size.isfinite(), size / mantissa, 1.0)


def rounded(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """``x`` in another type; to half precision each entry goes up or down at random, so that its mean is kept.

    A change of a factor that is smaller than the spacing of bfloat16 (2^-8) would otherwise be lost every time.
    """
    if dtype not in HALF:
        return x.to(dtype)
    generator = torch.Generator(x.device).manual_seed(seed)
    up = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    near = x.to(dtype)
    other = torch.nextafter(near, torch.where(near.to(x.dtype) < x, math.inf, -math.inf).to(dtype))
    distance = (x - near.to(x.dtype)) / (other.to(x.dtype) - near.to(x.dtype))
    return torch.where(up < distance, other, near)
