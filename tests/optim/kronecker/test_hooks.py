"""The hooks of an optimizer end with it."""

import weakref

import pytest
import torch

from gnomon.optim import INGD, KFAC
from support.perceptron import batches, perceptron, train

OPTIMIZERS = [INGD, KFAC]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_freed_with_its_hooks(kind):
    model = perceptron()
    optimizer = kind(model)
    train(model, optimizer, batches(2))
    reference = weakref.ref(optimizer)
    del optimizer  # at once, without the garbage collector
    assert reference() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_close_removes_the_hooks_and_training_goes_on():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(2))
    before = optimizer.factors("0")
    optimizer.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    train(model, optimizer, batches(2))
    assert torch.equal(optimizer.factors("0")[0], before[0])
