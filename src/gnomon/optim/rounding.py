"""Rounding to half precision that is right on average."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """``x`` in another type; to half precision each entry goes up or down at random, so that its mean is kept.

    A change of a factor that is smaller than the spacing of bfloat16 (2^-8) would otherwise be lost every time.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) - 0.5
    spacing = torch.ldexp(torch.full_like(x, torch.finfo(dtype).eps / 2), torch.frexp(x).exponent)
    return (x + noise * spacing).to(dtype)
