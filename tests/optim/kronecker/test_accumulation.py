"""Gradients that are accumulated, and statistics that are thrown away with them."""

import copy

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from support.perceptron import batches, close, equal, objective, perceptron, train

OPTIMIZERS = [INGD, KFAC]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("update_every", [1, 3])
def test_accumulation_equals_the_large_batch(kind, update_every):
    """In equal and unequal parts, and with two forward passes before one backward pass."""
    data = batches(7, torch.float64)
    reference = perceptron(torch.float64)
    train(reference, kind(reference, update_every=update_every, subsample=False), data)
    for sizes, together in (((8, 8), False), ((4, 12), False), ((8, 8), True)):
        model = perceptron(torch.float64)
        optimizer = kind(model, update_every=update_every, subsample=False)
        for x in data:
            optimizer.zero_grad()
            losses = []
            for part in x.split(sizes):
                losses.append(objective(model, part) * len(part) / len(x))
                if not together:
                    losses.pop().backward()
            if together:
                sum(losses).backward()
            optimizer.step()
        close(model, reference)


@pytest.mark.parametrize("how", ["optimizer", "model", "by hand"])
def test_stale_statistics_are_forgotten(how):
    data = batches(8)
    reference = perceptron()
    train(reference, INGD(reference, update_every=1), data)
    model = perceptron()
    optimizer = INGD(model, update_every=1)
    for x in data:
        objective(model, 100 * x.flip(0)).backward()  # thrown away
        if how == "optimizer":
            optimizer.zero_grad()
        elif how == "model":
            model.zero_grad()
        else:
            for p in model.parameters():
                p.grad = None
        objective(model, x).backward()
        optimizer.step()
        model.zero_grad()
    assert equal(model, reference)


def test_accumulation_of_four_parts_equals_the_large_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()
    twin = copy.deepcopy(model)
    whole, parts = INGD(model, update_every=1), INGD(twin, update_every=1)
    for _ in range(5):
        x = torch.randn(16, 5, dtype=torch.float64)
        whole.zero_grad()
        model(x).square().sum(-1).mean().backward()
        whole.step()
        parts.zero_grad()
        for rows in x.split(4):
            (twin(rows).square().sum(-1).mean() / 4).backward()
        parts.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
