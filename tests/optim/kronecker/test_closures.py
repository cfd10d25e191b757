"""Ways to call a step: with a closure, without a new gradient, before another optimizer."""

import copy
import math

import pytest
import torch

from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.layer_steps import LEAST_WIDTH, PLAIN
from support.perceptron import batches, equal, objective, perceptron, train

OPTIMIZERS = [INGD, KFAC]


def test_a_step_without_a_new_backward_pass_and_without_gradients():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(2))
    optimizer.step()
    after = copy.deepcopy(model)
    optimizer.zero_grad()
    steps = optimizer.param_groups[0]["step"]
    optimizer.step()
    assert equal(model, after)
    assert optimizer.param_groups[0]["step"] == steps


def test_closures():
    data = batches(6)
    model, twin = perceptron(), perceptron()
    one, other = INGD(model), INGD(twin)
    train(model, one, data)
    for x in data:

        def closure(x=x):
            other.zero_grad()
            loss = objective(twin, x)
            loss.backward()
            return loss

        assert other.step(closure).item() > 0
    assert equal(model, twin)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_as_a_preconditioner_of_another_optimizer(kind):
    model, twin = perceptron(), perceptron()
    preconditioner = kind(model, precondition_only=True)
    length = 0.5 * PLAIN * math.sqrt(128 / LEAST_WIDTH) if kind is INGD else 0.5
    plain = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for x in batches(40):
        plain.zero_grad()
        loss = objective(model, x)
        loss.backward()
        raw = model[2].weight.grad.clone()
        preconditioner.step()
        assert torch.equal(raw, model[2].weight.grad)  # norms are left to the other optimizer
        rms = torch.cat([p.grad.flatten() for p in model[0].parameters()]).square().mean().sqrt()
        assert rms.item() == pytest.approx(length, rel=1e-3)
        plain.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not equal(model, twin)
    assert "momentum_buffer" not in preconditioner.state[model[0].weight]
