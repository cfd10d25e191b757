"""What batteries of optimizer tests ask of states. ``BATTERIES.md`` has the list of all cases."""

import copy
import io

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from support.bare import classifier, closure_of, contiguous, equal, fall_of_the_loss

KINDS = [INGD, KFAC]

SETTINGS = {
    "defaults": lambda model: {},
    "rate as a tensor": lambda model: {"lr": torch.tensor(1e-2)},
    "no momentum": lambda model: {"momentum": 0.0},
    "two groups": lambda model: {"groups": [{"params": [model.weight]}, {"params": [model.bias], "lr": 3e-3}]},
    "one group": lambda model: {"groups": [{"params": model.bias, "lr": 3e-3}]},
    "gradient": lambda model: {"curvature": "gradient"},
    "paper": lambda model: {"lr": 1e-3, "preset": "paper"},
}


def assert_equal(one, other):
    """Nested dictionaries and lists of tensors and numbers."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_states_go_through_files_and_are_deterministic(kind, name):
    model = contiguous()
    optimizer = kind(model, **SETTINGS[name](model))
    for _ in range(8):
        optimizer.step(closure_of(model, optimizer))
    twin = copy.deepcopy(model)
    other = kind(twin, **SETTINGS[name](twin))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_equal(loaded, optimizer.state_dict())
    kept = copy.deepcopy(loaded)
    other.load_state_dict(loaded)
    assert_equal(loaded, kept)
    for _ in range(8):
        optimizer.step(closure_of(model, optimizer))
        other.step(closure_of(twin, other))
        assert equal(model, twin)
    assert_equal(optimizer.state_dict(), other.state_dict())
    # A group that is there twice has the same numbers for its parameters.
    other.param_groups.extend(other.param_groups)
    assert_equal(optimizer.state_dict()["param_groups"][-1], other.state_dict()["param_groups"][-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_a_step_has_made_is_not_empty(kind):
    model = contiguous()
    optimizer = kind(model)
    assert not optimizer.state_dict()["state"]
    optimizer.step(closure_of(model, optimizer))
    assert set(optimizer.state) == set(model.parameters())
    assert all(optimizer.state[p] for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_all_public_attributes(kind):
    model = contiguous()
    optimizer = kind(model)
    optimizer.step(closure_of(model, optimizer))
    copied = copy.deepcopy(optimizer)
    public = [{name for name in vars(one) if not name.startswith("_")} for one in (optimizer, copied)]
    assert public[0] == public[1]


def steps_go_on(optimizer, model, twin, other):
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer))
        other.step(closure_of(twin, other))
        assert equal(model, twin)


def test_a_state_of_an_earlier_version():
    """Without settings that were added later; they mean that all is as it was."""
    model = contiguous()
    optimizer = INGD(model, base_width=None, scheduled_decay=False)
    optimizer.step(closure_of(model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["base_width"], group["peak_lr"]
    twin = copy.deepcopy(model)
    other = INGD(twin)
    other.load_state_dict(saved)
    assert "base_width" not in saved["param_groups"][0]
    assert all(group["base_width"] is group["peak_lr"] is None for group in other.param_groups)
    steps_go_on(optimizer, model, twin, other)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_steps_that_are_numbers(kind):
    model = contiguous()
    optimizer = kind(model)
    optimizer.step(closure_of(model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    counts = [state for state in saved["state"].values() if "steps" in state]
    assert counts
    for state in counts:
        state["steps"] = state["steps"].item()
    twin = copy.deepcopy(model)
    other = kind(twin)
    other.load_state_dict(saved)
    steps_go_on(optimizer, model, twin, other)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("was_named", [True, False])
def test_states_with_names_and_without(is_named, was_named):
    """Of parameters that came with names, into an optimizer of those that came without, and the reverse."""

    def build(model, named):
        if named:
            return INGD.from_groups([{"params": model.named_parameters()}], 1e-2)
        return INGD(model, 1e-2, curvature="gradient")

    model = contiguous()
    optimizer = build(model, was_named)
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer))
    twin = copy.deepcopy(model)
    other = build(twin, is_named)
    other.load_state_dict(optimizer.state_dict())
    names = [group.get("names") for group in other.state_dict()["param_groups"]]
    assert names == ([["weight"], ["bias"]] if was_named or is_named else [None, None])
    steps_go_on(optimizer, model, twin, other)


@pytest.mark.parametrize("kind", KINDS)
def test_named_parameters_in_groups(kind):
    """As torch's optimizers take them; the model knows the names already."""
    model = contiguous()
    optimizer = kind(model, groups=[{"params": [("weight", model.weight)], "lr": 3e-3}])
    plain = kind(model, groups=[{"params": [model.weight], "lr": 3e-3}])
    assert_equal(optimizer.state_dict(), plain.state_dict())


# ---------------------------------------------------------------------- hooks
def put_a_value(optimizer):
    optimizer.state["test"] = 1


def take_the_value(optimizer, state_dict):
    state_dict["was there"] = state_dict["state"].pop("test", None) is not None
    return state_dict


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_around_saving(kind):
    for before, after in [(True, False), (False, True), (True, True)]:
        model = contiguous()
        optimizer = kind(model)
        if before:
            optimizer.register_state_dict_pre_hook(put_a_value)
        if after:
            optimizer.register_state_dict_post_hook(take_the_value)
        saved = optimizer.state_dict()
        assert saved["state"].get("test") == (1 if before and not after else None)
        assert saved.get("was there") == (before if after else None)
        assert optimizer.memory_usage() > 0
        optimizer.step(closure_of(model, optimizer))


def change_the_rate(optimizer, state_dict):
    state_dict["param_groups"][0]["lr"] = 0.002


def give_another(optimizer, state_dict):
    mine = copy.deepcopy(state_dict)
    mine["param_groups"][0]["lr"] = 0.003
    return mine


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_before_loading(kind):
    optimizer = kind(contiguous())
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(change_the_rate)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.register_load_state_dict_pre_hook(give_another, prepend=True)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.param_groups[0]["lr"] == 0.002, "the hook that came first runs last"
    optimizer = kind(contiguous())
    optimizer.register_load_state_dict_pre_hook(give_another)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.003


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_after_loading(kind):
    for is_changed in (True, False):
        model = contiguous()
        optimizer = kind(model)
        if is_changed:
            optimizer.register_load_state_dict_pre_hook(give_another)

        def look(loaded):
            loaded.state["changed"] = loaded.param_groups[0]["lr"] == 0.003
            loaded.state["seen"] = True

        optimizer.register_load_state_dict_post_hook(look)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state["changed"] == is_changed
        assert optimizer.state["seen"]
        optimizer.step(closure_of(model, optimizer))


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_keep_in_the_state_comes_back_as_it_is(kind):
    """As wrappers keep tensors by parameter."""
    model = contiguous()
    optimizer = kind(model)
    optimizer.step(closure_of(model, optimizer))
    kept = {model.weight: torch.ones(3)}
    optimizer.state["wrapper"] = kept
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {**optimizer.state_dict()["state"], "wrapper": kept}})
    assert optimizer.state["wrapper"] is kept


# ---------------------------------------------------------------------- wrappers of other libraries
def wrapped(name, optimizer):
    library = pytest.importorskip("pytorch_optimizer")
    found = getattr(library, name)(optimizer)
    if hasattr(found, "train"):
        found.train()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Lookahead", "OrthoGrad", "TRAC", "ScheduleFreeWrapper"])
def test_wrappers_of_optimizers(kind, name):
    """They take an optimizer, save its state and load it; TRAC moves by little in so few steps."""
    model = classifier()
    optimizer = wrapped(name, kind(model, 5e-2))
    assert fall_of_the_loss(model, optimizer) > (1.1 if name != "TRAC" else 0.99)
    twin = copy.deepcopy(model)
    other = wrapped(name, kind(twin, 5e-2))
    other.load_state_dict(optimizer.state_dict())
    fall_of_the_loss(twin, other, 3)
    assert all(torch.isfinite(p).all() for p in twin.parameters())
    assert len(other.param_groups) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_a_wrapper_puts_in(kind):
    """PCGrad takes the gradients of two losses apart, and sets what it makes of them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"trunk": nn.Linear(2, 2), "one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})
    optimizer = wrapped("PCGrad", kind(model, 5e-2))
    x = torch.randn(50, 2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        h = model["trunk"](x).relu()
        parts = (model["one"](h) - 1).square().mean(), (model["two"](h) - x).abs().mean()
        optimizer.pc_backward(list(parts))
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_averages_of_weights_and_their_rates(kind):
    """``torch.optim.swa_utils``: an averaged model, and a scheduler that goes to its rate."""
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = kind(model, 5e-2)
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    schedule = SWALR(optimizer, swa_lr=1e-2, anneal_epochs=3)
    for _ in range(4):
        assert fall_of_the_loss(model, optimizer, 3) > 1
        for average in averages:
            average.update_parameters(model)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)
    x = torch.randn(20, 2)
    update_bn([x], averages[0])
    assert all(torch.isfinite(average(x)).all() for average in averages)
