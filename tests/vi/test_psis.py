"""Pareto-smoothed importance weights."""

import math

import pytest
import torch

from gnomon.vi.psis import fit_pareto, pareto_smooth


@pytest.mark.parametrize("k", [-0.3, 0.2, 0.7, 1.2])
def test_shape_of_a_pareto_tail_is_found(k):
    torch.manual_seed(0)
    x = (torch.expm1(-k * torch.log1p(-torch.rand(20000, dtype=torch.float64))) / k).sort().values
    shape, sigma = fit_pareto(x)
    assert shape == pytest.approx(k, abs=0.05)
    assert sigma == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_agrees_with_arviz(scale):
    arviz = pytest.importorskip("arviz")
    torch.manual_seed(1)
    ratios = scale * torch.randn(1000, dtype=torch.float64).square()
    weights, khat = arviz.psislw(ratios.numpy().copy())
    smoothed = pareto_smooth(ratios)
    assert smoothed.khat == pytest.approx(float(khat), abs=1e-6)
    torch.testing.assert_close(smoothed.log_weights, torch.as_tensor(weights.copy()), atol=1e-6, rtol=0)


def test_weights_are_normalized_and_ratios_that_are_not_finite_have_none():
    ratios = torch.randn(500)
    ratios[:3] = torch.tensor([math.nan, -math.inf, math.inf])
    smoothed = pareto_smooth(ratios)
    assert float(smoothed.log_weights.exp().sum()) == pytest.approx(1.0)
    assert bool((smoothed.log_weights[:3] == -math.inf).all())
    assert math.isfinite(smoothed.khat)


def test_equal_ratios_have_no_tail_and_few_have_no_estimate():
    assert pareto_smooth(torch.full((100,), -3.0)).khat == 0.0
    assert pareto_smooth(torch.randn(10)).khat == math.inf
    assert pareto_smooth(torch.full((100,), math.nan)).khat == math.inf
    one_large = torch.zeros(1000)
    one_large[0] = 2000.0
    assert pareto_smooth(one_large).khat == math.inf
