"""Rounding at random, and the seed that fixes it."""

import pytest
import torch

from gnomon.optim import INGD
from gnomon.optim.kronecker.rounding import rounded
from support.teaching import kept, student, teacher, train

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("value", [1 + 2.0**-12, -0.3, 0.7e-3, 1.7e-7, -2.1e-8])
def test_rounding_is_right_on_average(dtype, value):
    """Also where float16 has few digits left, and none."""
    x = torch.full((40_000,), value)
    values = rounded(x, dtype, seed=3).float()
    below, above = values.min().item(), values.max().item()
    assert below <= value <= above
    assert set(values.tolist()) == {below, above}
    assert torch.nextafter(torch.tensor(below, dtype=dtype), torch.tensor(1e4, dtype=dtype)).item() == above
    assert values.double().mean().item() == pytest.approx(value, abs=4 * 0.5 * (above - below) / 200)


def test_rounding_is_seeded_and_leaves_what_needs_none():
    x = torch.randn(1000)
    assert torch.equal(rounded(x, torch.bfloat16, seed=3), rounded(x, torch.bfloat16, seed=3))
    assert not torch.equal(rounded(x, torch.bfloat16, seed=3), rounded(x, torch.bfloat16, seed=4))
    assert torch.equal(rounded(x, torch.float64, seed=3), x.double())
    for dtype in HALF:
        short = torch.cat([x.to(dtype).float(), torch.zeros(3)])
        assert torch.equal(rounded(short, dtype, seed=0).float(), short)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_a_seed_fixes_the_run(dtype):
    """Whatever else draws random numbers; see test_state.py for runs that are resumed."""
    runs = []
    for seed, others in ((0, 5), (0, 6), (1, 5)):
        model, (x, y) = student(), teacher()
        optimizer = INGD(model, precond_dtype=dtype, precond_momentum=0.5, seed=seed)
        torch.manual_seed(others)
        train(optimizer, lambda model=model, x=x, y=y: (model(x) - y).square().mean(), 30)
        runs.append(kept(optimizer))
        assert all(tensor.dtype == dtype for tensor in runs[-1])
    assert len(runs[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))
