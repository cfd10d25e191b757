"""A saved state has one layout: factors that were saved in one form are loaded into another."""

import copy

import pytest
import torch
from torch import nn

from gnomon import groups
from gnomon.optim import INGD
from gnomon.optim.kronecker.inverse_free_factor import FORMS

SETTINGS = {
    "gram": {"damping": 0.2},
    "packed gram": {"damping": 0.2, "memory": "low"},
    "factor": {"damping": 1e-9},
    "with momentum": {"precond_momentum": 0.5},
}


def trained(options, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = INGD(model, update_every=1, **options)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def form_of(optimizer, model):
    return {FORMS[number] for number in optimizer.state[model[0].weight]["forms"].tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("new", SETTINGS)
@pytest.mark.parametrize("old", SETTINGS)
def test_a_state_is_loaded_into_any_form(old, new):
    """``K K^T`` and ``C C^T`` are the same to rounding, and the optimizer goes on in its own form."""
    model, optimizer = trained(SETTINGS[old])
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = copy.deepcopy(model)
    fresh = INGD(other, update_every=1, **SETTINGS[new])
    if old == "with momentum" != new:
        # The settings of groups are loaded too, and these factors have no room for a momentum.
        with pytest.raises(RuntimeError, match=r"precond_momentum was 0 when the optimizer was built and is 0\.5 now"):
            fresh.load_state_dict(saved)
        assert fresh.param_groups[0]["precond_momentum"] == 0
        return
    fresh.load_state_dict(saved)
    for name in ("0", "2"):
        for ours, theirs in zip(fresh.factors(name), optimizer.factors(name), strict=True):
            torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=2e-5, atol=2e-5)
    assert saved["state"].keys() == kept["state"].keys()
    assert all(
        torch.equal(saved["state"][n][key], kept["state"][n][key]) for n in kept["state"] for key in kept["state"][n]
    )
    expected = trained(SETTINGS[new], steps=1)
    assert {k: v.shape for k, v in fresh.state[other[0].weight].items()} == {
        k: v.shape for k, v in expected[1].state[expected[0][0].weight].items()
    }
    assert form_of(fresh, other) == form_of(expected[1], expected[0])
    before = other[0].weight.detach().clone()
    step(other, fresh, 2, seed=2)
    assert fresh.skipped_updates == 0
    assert not torch.equal(other[0].weight, before)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_the_same_form_is_resumed_bit_for_bit(options):
    model, optimizer = trained(options)
    other = copy.deepcopy(model)
    fresh = INGD(other, update_every=1, **options)
    fresh.load_state_dict(optimizer.state_dict())
    for pair in ((model, optimizer), (other, fresh)):
        step(*pair, 4, seed=3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_directions_after_a_conversion_are_the_same():
    """With no update before it, a step from ``K K^T`` and one from its factor agree to rounding."""
    model, optimizer = trained(SETTINGS["gram"])
    moved = []
    for options in ({"damping": 0.2}, {"damping": 1e-9}):
        other = copy.deepcopy(model)
        fresh = INGD(other, update_every=100, growing_intervals=False, **options)
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["next_update"] = 1000
        fresh.load_state_dict(state)
        step(other, fresh, 1, seed=4)
        moved.append(torch.cat([p.detach().flatten() for p in other.parameters()]))
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dense", "diagonal"),
        ("diagonal", "dense"),
        ("diagonal", "toeplitz"),
        ("triangular", lambda k: groups.Triangular(k, upper=True)),
        ("dense", "triangular"),
    ],
    ids=["dense-diagonal", "diagonal-dense", "diagonal-toeplitz", "lower-upper", "dense-triangular"],
)
def test_another_structure_is_refused(old, new):
    """The number of a form tells structures apart whose tensors have equal shapes; nothing changes."""
    _, optimizer = trained({"structure": old})
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    fresh = INGD(model, structure=new)
    with pytest.raises(ValueError, match=r"structure or preset: K of 0 was not saved as"):
        fresh.load_state_dict(optimizer.state_dict())
    assert not fresh.state


def test_another_size_is_refused():
    _, optimizer = trained(SETTINGS["gram"])
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for options in SETTINGS.values():
        with pytest.raises(ValueError, match=r"structure or preset: \w+ of 0.weight has shape"):
            INGD(other, **options).load_state_dict(optimizer.state_dict())
