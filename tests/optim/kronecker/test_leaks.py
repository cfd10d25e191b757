"""Steps leave nothing behind."""

import gc

import pytest
import torch
from torch import nn

from support.runs import OPTIMIZERS


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


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
