"""Steps of layers whose weights are stored in other orders, and settings of parameter groups."""

import math

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.layers import layer_of


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_grouped_transposed_convolution(groups):
    """Its step has the given root mean square, and a gradient that is not finite changes nothing."""
    torch.manual_seed(0)
    model = nn.ConvTranspose2d(4, 8, 3, groups=groups, bias=False)
    optimizer = INGD(model, lr=0.1, weight_decay=0.0, step_rms=0.5, base_width=None, update_every=1)
    for _ in range(4):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.randn(3, 4, 5, 5)).square().mean().backward()
        optimizer.step()
        assert (model.weight - before).square().mean().sqrt().item() == pytest.approx(0.05, rel=1e-4)
    kept = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    model(torch.randn(3, 4, 5, 5)).square().mean().backward()
    model.weight.grad[0, 0, 0, 0] = math.nan
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(model.weight, before)
    assert all(torch.equal(optimizer.state[model.weight][key], value) for key, value in kept.items())


def test_a_group_without_a_rate_for_its_fallback():
    """None means the learning rate of the group, as in the signature."""
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    norm = {"params": list(model[1].parameters()), "lr": 3e-3, "fallback_lr": None}
    optimizer = INGD(model, fallback_lr=1e-4, groups=[norm])
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(model[1].weight)] == 3e-3


def test_a_number_for_the_fallback_beside_a_schedule():
    """The learning rate of layers follows its function, that of other parameters stays."""
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = INGD(model, lr=lambda step: 0.01 / (step + 1), fallback_lr=5e-4)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    rates = {group["role"]: group["lr"] for group in optimizer.param_groups}
    assert rates["layer"] == pytest.approx(0.01 / 3)
    assert rates["fallback"] == 5e-4


def test_indices_are_counted_as_they_are_used():
    """An embedding never reduces its positions, so each index is a row."""
    layer = layer_of(nn.Embedding(7, 3))
    x, g = torch.randint(0, 7, (4, 10)), torch.randn(4, 10, 3)
    assert layer.count(x, g, "reduce") == layer.rows(x, g, "reduce")[1].shape[1] == 40


@pytest.mark.parametrize(
    ("name", "value"), [("relative", "yes"), ("precondition_only", "no"), ("growing_intervals", 1), ("compile", 0)]
)
def test_flags_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        INGD(nn.Linear(2, 2), **{name: value})


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_gradients_beyond_float32(scale):
    """A float64 gradient is judged in float64: neither too large nor too small to be one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = INGD(model)
    before = model.weight.detach().clone()
    (scale * model(torch.randn(8, 4, dtype=torch.float64)).square().mean()).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert not torch.equal(model.weight, before)
