"""Layers that are left out, used twice, frozen or without a gradient."""

import copy

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from support.perceptron import batches, perceptron, train

OPTIMIZERS = [INGD, KFAC]


class Fickle(nn.Module):
    """Leaves a layer out at times, and uses another twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.use = True

    def forward(self, x):
        x = self.a(torch.tanh(self.a(x)))
        return self.c(self.b(x) if self.use else x)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_that_is_not_used_and_one_that_is_used_twice(kind):
    torch.manual_seed(0)
    model = Fickle()
    optimizer = kind(model, 1e-2, update_every=2)
    model.use = False
    before = model.b.weight.clone()
    train(model, optimizer, batches(3))
    assert torch.equal(model.b.weight, before)
    model.use = True
    losses = train(model, optimizer, batches(40))
    assert not torch.equal(model.b.weight, before)
    assert losses[-1] < 0.7 * losses[0]


def test_frozen_before_and_after():
    model = perceptron()
    model[0].bias.requires_grad_(False)
    optimizer = INGD(model, 1e-2)
    assert [row.treatment for row in optimizer.summary().rows if row.name == "0.bias"] == ["frozen"]
    train(model, optimizer, batches(5))
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    frozen = model[0].weight.clone(), model[3].bias.clone(), model[0].bias.clone()
    moving = model[3].weight.clone()
    train(model, optimizer, batches(5))
    assert torch.equal(frozen[0], model[0].weight)
    assert torch.equal(frozen[1], model[3].bias)
    assert torch.equal(frozen[2], model[0].bias)
    assert not torch.equal(moving, model[3].weight)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, batches(2))
    assert not torch.equal(frozen[0], model[0].weight)


def test_a_layer_without_gradient_stays():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.on = nn.Linear(5, 3), nn.Linear(5, 3), 1.0

        def forward(self, x):
            return self.a(x) + self.on * self.b(x)

    model = Branch()
    optimizer = INGD(model)
    train(model, optimizer, batches(5))
    model.on = 0.0
    before = copy.deepcopy(model)
    train(model, optimizer, batches(50))
    assert torch.equal(model.b.weight, before.b.weight)
    assert not torch.equal(model.a.weight, before.a.weight)
