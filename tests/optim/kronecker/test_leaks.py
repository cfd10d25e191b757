"""Steps leave nothing behind."""

import gc

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from support.runs import OPTIMIZERS


@pytest.mark.slow
def test_steps_do_not_leave_anything_behind():
    """State and memory are the same in each interval."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 2))
    optimizer = INGD(model, growing_intervals=False)
    sizes = []
    for step in range(200):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        if step in (20, 199):
            sizes.append(optimizer.memory_usage())
    assert sizes[0] == sizes[1]


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["robust", "kfac"])
def test_a_thousand_steps_leave_nothing_behind(name):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = OPTIMIZERS[name](model, update_every=10, growing_intervals=False)
    found = []
    for step in range(1, 1001):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).cos().mean().backward()
        optimizer.step()
        if step in (100, 1000):
            found.append((live_tensors(), optimizer.memory_usage()))
    (early, early_bytes), (late, late_bytes) = found
    assert late <= early  # fewer where torch lets go of what another test has left
    assert late_bytes == early_bytes
