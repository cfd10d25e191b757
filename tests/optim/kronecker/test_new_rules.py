"""A new rule for factors and a new rule for directions: each is written here alone, without touching another file."""

import pytest
import torch
from torch import nn

from gnomon import groups
from gnomon.optim.kronecker.factor_forms import FactorPair
from gnomon.optim.kronecker.optimizer import KroneckerOptimizer
from gnomon.optim.kronecker.statistics import Statistics, mean_moments
from gnomon.optim.kronecker.structured_factor import StructuredFactor
from support.teaching import teacher, train

SETTINGS = {
    "lr": 1e-2,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "damping": 1e-2,
    "update_every": 2,
    "step_rms": 0.5,
    "kl_clip": None,
}


class RootMeanSquares:
    """A toy: each side of a gradient is divided by the root of a running mean of the squares of its rows."""

    name, relative, shared_keys, cached_tensors = "toy", True, ("K", "C"), ()

    def pair(self, chosen, dtype, settings):
        left, right = (StructuredFactor(groups.Diagonal(group.k)) for group in chosen)
        return FactorPair(left, right)

    def shapes(self, layer):
        return {key: (layer.layer.blocks, layer.form(key).size) for key in "KC"}

    def dtypes(self, layer):
        return dict.fromkeys("KC", layer.computing_dtype)

    def initial(self, layer, key):
        return torch.zeros(self.shapes(layer)[key], dtype=layer.computing_dtype, device=layer.weight.device)

    def projection_factors(self, layer, state):
        return None, None

    def update(self, stack, settings, source, ok):
        if isinstance(source, Statistics):
            means = [m.tensors[0] * m.unit.square()[:, None] for m in mean_moments(stack.pair, (None, None), source)]
        else:
            means = [source.square().mean(1), source.square().mean(2)]
        for key, mean in zip("KC", means, strict=True):
            old = stack.get(key)
            stack.set(key, torch.where(ok, old.lerp(mean, 0.1), old))
        return torch.ones(len(stack), dtype=torch.bool)

    def apply(self, stack, side, rows, uses, overwrite, scratch):
        return rows / (stack.get(side) + settings_damping(stack)).sqrt().unsqueeze(-2)

    def levels(self, stack):
        return None

    def loaded(self, layer, state):
        return state

    def check(self, layers, settings):
        pass

    def forget_products(self, layers):
        pass

    def work(self, layer):
        return layer.layer.size, layer.layer.size

    def product_bytes(self, layer, uses):
        return 0


def settings_damping(stack):
    """Relative to the mean of each diagonal, so that the scale of the loss does not matter."""
    return 1e-2 * stack.get("K").mean().clamp(min=1e-30)


def to_signs(averages, step):
    averages.sign_()


class Signs:
    """A toy: the signs of the averages, for all layers."""

    def check(self, layers):
        pass

    def turn(self, layer):
        return to_signs


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))


@pytest.mark.parametrize("direction", [None, Signs()], ids=["averages", "signs"])
def test_a_new_rule_for_factors_trains_and_resumes(direction):
    """The toy learns, its state has what it says, and a run that is resumed takes the same steps."""
    (x, y), model = teacher(), network()
    optimizer = KroneckerOptimizer(model, SETTINGS, rule=RootMeanSquares(), direction=direction)
    losses = train(optimizer, lambda: (model(x) - y).square().mean(), 40)
    assert losses[-1] < 0.4 * losses[0]
    assert set(optimizer.state[model[0].weight]) == {"K", "C", "momentum_buffer"}
    assert optimizer.summary().rows[0].treatment == "toy, kfac curvature"
    other = network()
    other.load_state_dict(model.state_dict())
    again = KroneckerOptimizer(other, SETTINGS, rule=RootMeanSquares(), direction=direction)
    again.load_state_dict(optimizer.state_dict())
    train(optimizer, lambda: (model(x) - y).square().mean(), 3)
    train(again, lambda: (other(x) - y).square().mean(), 3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_new_rule_for_directions_is_applied():
    """Without momentum, a step by signs moves each entry of a weight by ``lr step_rms``."""
    (x, y), model = teacher(), network()
    before = model[0].weight.detach().clone()
    options = {**SETTINGS, "momentum": 0.0}
    optimizer = KroneckerOptimizer(model, options, rule=RootMeanSquares(), direction=Signs())
    train(optimizer, lambda: (model(x) - y).square().mean(), 1)
    moved = (model[0].weight - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-2 * 0.5))
