"""What keeps INGD stable: each of its defaults cures something, and a test here fails without it."""

import itertools
import math

import pytest
import torch
from torch import nn

from gnomon import groups
from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.config import preset_arguments
from support.teaching import teacher, train


def regression(inputs=1.0, scale=1.0, steps=150, normalized=True, **settings):
    """The last loss of a small regression whose inputs and loss are scaled, in units of the unscaled loss."""
    x, y = teacher()
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(32, eps=1e-12) if normalized else nn.Identity()
    model = nn.Sequential(nn.Linear(6, 32), norm, nn.Tanh(), nn.Linear(32, 2))
    # At the default base_width the layer of six inputs takes such long steps that noise is the larger part of the loss.
    optimizer = INGD(model, base_width=None, **settings)
    values = train(optimizer, lambda: scale * (model(inputs * x) - y).square().mean(), steps)
    return values[0] / scale, values[-1] / scale


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [1e-3, 1e-1, 1e1, 1e3])
def test_the_scale_of_inputs_does_not_matter(inputs):
    _, unscaled = regression()
    _, scaled = regression(inputs=inputs)
    assert scaled < 1.3 * unscaled


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 1e-1, 1e1, 1e3])
@pytest.mark.parametrize("settings", [{}, {"curvature": "gradient"}, {"structure": "diagonal"}])
def test_the_scale_of_the_loss_does_not_matter(scale, settings):
    _, unscaled = regression(normalized=False, **settings)
    first, scaled = regression(scale=scale, normalized=False, **settings)
    assert scaled < 1.1 * unscaled
    assert scaled < 0.5 * first


@pytest.mark.slow
def test_absolute_curvature_is_not_enough():
    """Without relative curvature the same scales need other settings."""
    ends = [regression(scale=scale, normalized=False, relative=False)[1] for scale in (1e-3, 1.0, 1e3)]
    assert not all(end < 1.1 * min(ends) for end in ends)


def steep(**settings):
    """Factors after a few updates at a curvature of 1e4 in some directions and of nothing in others."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False).double()
    x = 100 * torch.randn(64, 6, dtype=torch.float64) * torch.tensor([1.0, 1, 1, 1e-4, 1e-4, 1e-4])
    optimizer = INGD(model, 0.0, update_every=1, **settings)
    train(optimizer, lambda: model(x).square().mean(), 20)
    return optimizer, optimizer.factors("")


def condition(factor):
    values = torch.linalg.svdvals(factor)
    return (values[0] / values[-1]).item()


def test_bounded_factor_steps():
    settings = {"preset": "paper", "precond_lr": 0.01}
    with pytest.warns(UserWarning, match="have missed 10 updates in a row, because the curvature"):
        unbounded, _ = steep(**settings)
    assert unbounded.skipped_updates > 0  # it is not finite within a few updates; the guard alone stops it
    bounded, factors = steep(**settings, max_factor_step=0.5)
    assert bounded.skipped_updates == 0
    assert all(torch.isfinite(f).all() for f in factors)


def test_second_order_keeps_factors_invertible():
    """A step of norm one takes (I - m) to a singular matrix, and (I - m + m^2/2) to half of it."""
    group = groups.Dense(3)
    eye = group.identity(dtype=torch.float64)
    step = (torch.diag(torch.tensor([-1.0, -0.5, 0.1], dtype=torch.float64)),)
    assert torch.linalg.svdvals(group.move(eye, step, order=1)[0])[-1] < 1e-12
    assert torch.linalg.svdvals(group.move(eye, step, order=2)[0])[-1] > 0.49
    settings = {"precond_lr": 0.9, "max_factor_step": 0.55, "precond_momentum": 0.9}
    assert condition(steep(order=2, **settings)[1][0]) < condition(steep(order=1, **settings)[1][0])


def fit(**settings):
    """How far the factors are from the inverse of the curvature after forty steps."""
    torch.manual_seed(0)
    mix = torch.randn(6, 6, dtype=torch.float64)
    model = nn.Linear(6, 3, bias=False).double()
    optimizer = INGD(model, 0.0, damping=1e-3, **settings)
    for _ in range(40):
        x = torch.randn(256, 6, dtype=torch.float64) @ mix
        optimizer.zero_grad()
        y = model(x)
        (y * torch.randn_like(y)).sum(-1).mean().backward()
        optimizer.step()
    K, C = optimizer.factors("")
    curvature = torch.kron(mix.T @ mix, torch.eye(3, dtype=torch.float64))
    seen = torch.kron(K, C).T @ curvature @ torch.kron(K, C)
    return (seen - torch.eye(18, dtype=torch.float64)).norm().item() / math.sqrt(18)


def test_early_updates_shorten_the_wait():
    growing, constant = fit(update_every=20), fit(update_every=20, growing_intervals=False)
    assert growing < 0.5
    assert constant > 1.5 * growing


@pytest.mark.parametrize(("kind", "growth"), [(INGD, 5), (KFAC, 20)])
def test_intervals_grow_sooner_where_factors_forget_sooner(kind, growth):
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    optimizer, updated = kind(model), []
    for step in range(3 * growth):
        due = optimizer.param_groups[0]["next_update"] <= step
        updated += [step] * due
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert updated[: growth + 1] == list(range(growth + 1))
    assert updated[growth + 1] == growth + 2


def test_the_first_updates_are_averages():
    assert fit(update_every=20) < 0.7 * fit(update_every=20, precond_lr=0.01)


def deep_autoencoder():
    torch.manual_seed(0)
    sizes = [64, 48, 24, 8, 24, 48, 64]
    layers = [m for i, o in itertools.pairwise(sizes) for m in (nn.Linear(i, o), nn.Tanh())]
    from sklearn.datasets import load_digits

    return nn.Sequential(*layers[:-1]), torch.tensor(load_digits().data, dtype=torch.float32)[:512] / 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"base_width": None}, {"kl_clip": 1e-3}],
)
def test_a_deep_autoencoder_does_not_diverge_at_five_times_the_rate(settings):
    for factor in (1, 5):
        model, x = deep_autoencoder()
        optimizer = INGD(model, preset_arguments(INGD, "robust")["lr"] * factor, **settings)
        values = train(optimizer, lambda model=model, x=x: (model(x) - x).square().sum(1).mean(), 150)
        assert values[-1] < 0.7 * values[0]
        assert max(values[20:]) < values[0]


@pytest.mark.slow
def test_natural_steps_of_their_own_length_diverge():
    model, x = deep_autoencoder()
    optimizer = INGD(model, 0.1, step_rms=None)
    values = train(optimizer, lambda: (model(x) - x).square().sum(1).mean(), 150)
    assert optimizer.skipped_steps > 0 or max(values) > 5 * values[0]
