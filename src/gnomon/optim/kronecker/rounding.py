"""Rounding to half precision that is right on average."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...linalg import HALF


def rounded(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Convert ``x`` to another type.

    To half precision each entry is rounded up or down at random, so that its mean is kept. Rounding to nearest would
    lose each change of a factor that is smaller than the spacing of bfloat16, 2^-8.
    """
    if dtype not in HALF:
        return x.to(dtype)
    generator = torch.Generator(x.device).manual_seed(seed)
    up = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    near = x.to(dtype)
    other = torch.nextafter(near, torch.where(near.to(x.dtype) < x, math.inf, -math.inf).to(dtype))
    distance = (x - near.to(x.dtype)) / (other.to(x.dtype) - near.to(x.dtype))
    return torch.where(up < distance, other, near)
