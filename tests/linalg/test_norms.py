"""Bounds on spectral norms."""

import pytest
import torch

from gnomon.linalg import spectral_bound, spectral_norm
from support.matrices import F64


def symmetric(kind, k, generator):
    x = torch.randn(k, k, dtype=F64, generator=generator)
    if kind == "one direction":
        return x[:, :1] @ x[:, :1].mT + 1e-3 * (x + x.mT)
    if kind == "graded":
        q = torch.linalg.qr(x).Q
        return q @ torch.diag(torch.logspace(0, -6, k, dtype=F64)) @ q.mT
    return x + x.mT


@pytest.mark.parametrize("kind", ["one direction", "graded", "random"])
@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_bounds_are_above_the_norm_and_near_it(kind, scale):
    generator = torch.Generator().manual_seed(0)
    matrices = scale * torch.stack([symmetric(kind, 80, generator) for _ in range(100)])
    true = torch.linalg.matrix_norm(matrices, 2)
    ratios = spectral_norm(matrices) / true
    assert ratios.min() > 1 - 1e-9
    assert ratios.max() < 80 ** (1 / 16)
    ratios = spectral_bound(matrices) / true
    assert (ratios < 1).sum() <= 3  # it is one of probability
    assert ratios.min() > 0.9
    assert ratios.max() < 2.5


def test_the_bound_of_zero_is_zero():
    assert float(spectral_bound(torch.zeros(80, 80))) < 1e-30
