"""Models whose type changes during training."""

import pytest
import torch

from gnomon.optim import INGD
from support.perceptron import batches, perceptron, train


@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16])
def test_another_type_after_construction_and_later(target):
    model = perceptron()
    optimizer = INGD(model, update_every=2)
    model.to(target)
    train(model, optimizer, batches(3, target))
    model.float()
    train(model, optimizer, batches(3))
    model.to(target)
    losses = train(model, optimizer, batches(30, target))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precond_dtype", [None, torch.bfloat16])
def test_another_type_between_updates(precond_dtype):
    model = perceptron()
    optimizer = INGD(model, precond_dtype=precond_dtype, growing_intervals=False)
    train(model, optimizer, batches(2))
    model.double()
    train(model, optimizer, batches(2, torch.float64))
