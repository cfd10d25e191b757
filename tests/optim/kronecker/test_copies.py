"""Copies of a model, and of a model with its optimizer."""

import copy

import pytest
import torch

from gnomon.optim import INGD, KFAC
from support.perceptron import batches, equal, perceptron, train

OPTIMIZERS = [INGD, KFAC]


def test_a_copy_of_the_model_is_free():
    model = perceptron()
    optimizer = INGD(model)
    data = batches(4)
    train(model, optimizer, data[:2])
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    train(twin, plain, data)
    reference = perceptron()
    other = INGD(reference)
    train(reference, other, data)
    train(model, optimizer, data[2:])
    assert equal(model, reference)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_copy_of_both_goes_on_alike(kind):
    model = perceptron()
    optimizer = kind(model, lambda step: 1e-2 / (1 + step), update_every=2)
    data = batches(8)
    train(model, optimizer, data[:4])
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, data[4:])
    assert not equal(model, twin)
    train(twin, other, data[4:])
    assert equal(model, twin)
    assert other.state[twin[0].weight]
