"""Random matrices for the generators."""

from __future__ import annotations

import torch
from torch import Tensor


def random_spd(
    k: int,
    condition: float = 10.0,
    *,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return an SPD matrix with random eigenvectors and logarithmically spaced eigenvalues 1 ... ``condition``."""
    if not condition >= 1:
        raise ValueError(f"condition must be at least 1, got {condition!r}")
    basis, _ = torch.linalg.qr(torch.randn(k, k, dtype=torch.float64, generator=generator))
    values = torch.logspace(0, 1, k, base=condition, dtype=torch.float64)
    matrix = (basis * values) @ basis.mT
    return (0.5 * (matrix + matrix.mT)).to(dtype)
