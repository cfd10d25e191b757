"""Gradients and curvature that are not finite, tiny or absent."""

import copy
import math

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from support.marks import slow_where
from support.perceptron import batches, equal, objective, perceptron, train

OPTIMIZERS = [INGD, KFAC]


def test_a_first_gradient_that_is_tiny():
    torch.manual_seed(0)
    model, q = nn.MultiheadAttention(8, 2), torch.randn(4, 3, 8)
    optimizer = INGD(model)
    train(model, optimizer, range(60), lambda m, i: (m(q, q, q)[0] - q).square().mean() * (1e-8 if i < 1 else 1))
    assert optimizer.skipped_updates == 0
    assert all(factor.abs().max() < 1e6 for factor in optimizer.factors("out_proj"))


def test_natural_directions_that_overflow_are_not_taken():
    model = perceptron()
    optimizer = INGD(model, preset="paper")
    before = copy.deepcopy(model)
    (objective(model, batches(1)[0]) * 1e25).backward()
    optimizer.step()
    assert equal(model, before) or all(torch.isfinite(p).all() for p in model.parameters())
    assert optimizer.skipped_updates + optimizer.skipped_steps > 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"kl_clip": 1e-3}, {"preset": "paper"}])
@pytest.mark.parametrize("bad", slow_where([math.nan, math.inf], math.isinf))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_that_is_not_finite_changes_nothing(kind, settings, bad, dtype):
    data = batches(9, dtype)
    model, twin = perceptron(dtype), perceptron(dtype)
    optimizer, other = kind(model, update_every=1, **settings), kind(twin, update_every=1, **settings)
    train(model, optimizer, data[:4])
    train(twin, other, data[:4])
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    (objective(model, data[4]) * bad).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert equal(model, before)
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, state[number][key]), key
    optimizer.zero_grad()
    assert all(math.isfinite(loss) for loss in train(model, optimizer, data[5:]))
    assert optimizer.skipped_steps == 1


def test_the_first_step_may_fail_too():
    model = perceptron()
    optimizer = INGD(model)
    before = copy.deepcopy(model)
    (objective(model, batches(1)[0]) * math.nan).backward()
    optimizer.step()
    assert equal(model, before)
    assert train(model, optimizer, batches(40))[-1] < 0.7


def factors_of(optimizer, layer):
    state = optimizer.state[layer.weight]
    return {key: state[key].clone() for key in ("K", "C", "A", "S", "A_inverse", "S_inverse") if key in state}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_squares_of_rows_that_overflow_and_vanish_skip_nothing(kind):
    """Relative curvature is computed in units of its own."""
    model = nn.Linear(3, 2)
    optimizer = kind(model, update_every=1)
    x = torch.full((4, 3), 1e25)
    before = model.weight.clone()
    (model(x) * 1e-26).sum().backward()
    optimizer.step()
    assert (optimizer.skipped_updates, optimizer.skipped_steps) == (0, 0)
    factors = factors_of(optimizer, model)
    assert len(factors) >= 2
    for key, value in factors.items():
        assert value.isfinite().all(), key
        assert not torch.equal(value[0], torch.eye(value.shape[-1])), key
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_absolute_curvature_that_overflows_skips_the_update_alone(kind):
    model = nn.Linear(3, 2)
    optimizer = kind(model, preset="paper", update_every=1)
    x = torch.full((4, 3), 1e25)  # gradients are finite, but their squares are not
    before = model.weight.clone()
    model(x).sum().backward()
    optimizer.step()
    assert (optimizer.skipped_updates, optimizer.skipped_steps) == (1, 0)
    for key, value in factors_of(optimizer, model).items():
        assert torch.equal(value[0], torch.eye(value.shape[-1])), key
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}], ids=["robust", "paper"])
def test_rows_that_are_not_finite_skip_the_update_alone(kind, settings):
    """Where the user has made the gradients finite again."""
    model = nn.Linear(3, 2)
    optimizer = kind(model, 1e-3, update_every=1, **settings)
    for number in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 3)
        if number == 2:
            x[0, 1] = math.inf
            known, before = factors_of(optimizer, model), model.weight.clone()
        model(x).cos().sum().backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.1, 0.1, 0.1)
        optimizer.step()
        if number == 2:
            assert (optimizer.skipped_updates, optimizer.skipped_steps) == (1, 0)
            for key, value in factors_of(optimizer, model).items():
                assert torch.equal(value, known[key]), key
            assert not torch.equal(model.weight, before)
    assert optimizer.skipped_updates == 1
    assert not any(torch.equal(value, known[key]) for key, value in factors_of(optimizer, model).items())
    assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_batches_of_one_and_of_none(kind, size):
    model = perceptron()
    optimizer = kind(model, update_every=1)
    train(model, optimizer, batches(3))
    train(model, optimizer, batches(1, size=size))
    assert optimizer.skipped_updates == (2 if size == 0 else 0)  # one for each layer
    train(model, optimizer, batches(3, size=1))
    assert all(torch.isfinite(p).all() for p in model.parameters())
