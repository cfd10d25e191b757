"""States that are saved, loaded and resumed."""

import copy
import io

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from support.marks import slow_where
from support.perceptron import batches, equal, perceptron, train

OPTIMIZERS = [INGD, KFAC]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precond_dtype": torch.bfloat16},
        {"precond_dtype": torch.float16},
        {"structure": "arrow"},
        {"preset": "paper"},
    ],
)
@pytest.mark.parametrize("after", slow_where([3, 37], lambda after: after == 3))
def test_resume_is_bit_for_bit(settings, after):
    """Also in the middle of an interval between updates, through a file that torch loads at its defaults."""
    data = batches(60)
    model = perceptron()
    optimizer = INGD(model, update_every=7, **settings)
    train(model, optimizer, data[:after])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    twin = perceptron()
    resumed = INGD(twin, update_every=7, **settings)
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, data[after:])
    train(twin, resumed, data[after:])
    assert equal(model, twin)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_loading_leaves_the_dictionary_alone_and_shares_nothing(kind):
    model = perceptron()
    optimizer = kind(model)
    train(model, optimizer, batches(5))
    saved = copy.deepcopy(optimizer.state_dict())
    twin = perceptron()
    other = kind(twin)
    other.load_state_dict(saved)
    before = copy.deepcopy(saved)
    train(twin, other, batches(5))
    for number, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before["state"][number][key])), key
    assert saved["param_groups"] == before["param_groups"]


def test_state_is_plain_tensors():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(3))
    for state in optimizer.state_dict()["state"].values():
        assert all(type(value) is torch.Tensor for value in state.values())


def test_a_state_of_another_model_is_refused():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(3))
    saved = optimizer.state_dict()
    other = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 3))
    fresh = INGD(other)
    with pytest.raises(ValueError, match=r"another model, structure or preset: .* of 0\.weight has shape"):
        fresh.load_state_dict(saved)
    with pytest.raises(ValueError, match="another model, structure or preset: K of"):
        INGD(perceptron(), structure="diagonal").load_state_dict(saved)
    with pytest.raises(ValueError, match="another optimizer: its groups have no decay"):
        KFAC(perceptron()).load_state_dict(saved)
    paper = INGD(perceptron(), preset="paper")
    train(paper._model, paper, batches(2))
    with pytest.raises(ValueError, match="another model, structure or preset: K of"):
        INGD(perceptron(), preset="paper", structure="diagonal").load_state_dict(paper.state_dict())
    fresh = INGD(perceptron())
    with pytest.raises(ValueError, match=r"preset: level of .* is missing"):
        fresh.load_state_dict(paper.state_dict())
    with pytest.raises(ValueError, match="state_dict must have 'state' and 'param_groups'"):
        fresh.load_state_dict({})
    with pytest.raises(ValueError, match="another model or other groups"):
        INGD(nn.Linear(5, 3)).load_state_dict(saved)
    assert not fresh.state
    assert fresh.param_groups[0]["step"] == 0


def test_a_state_with_other_forms_of_factors_is_converted():
    """A small damping stores K, a large one K K^T; test_saved_forms.py has every pair of forms."""
    model = perceptron(torch.float64)
    optimizer = INGD(model, damping=1e-9)
    train(model, optimizer, batches(5, torch.float64))
    fresh = INGD(perceptron(torch.float64))
    fresh.load_state_dict(optimizer.state_dict())
    weights = optimizer._model[0].weight, fresh._model[0].weight
    assert optimizer.state[weights[0]]["forms"].tolist() != fresh.state[weights[1]]["forms"].tolist()
    for name in ("0", "3"):
        for ours, theirs in zip(fresh.factors(name), optimizer.factors(name), strict=True):
            torch.testing.assert_close(ours @ ours.mT, theirs @ theirs.mT)


# ---------------------------------------------------------------------- hooks of others, and damage
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hooks_before_loading_change_what_is_loaded(kind):
    """A state that is wrapped, renamed or changed by somebody else's hook."""
    model, twin = perceptron(), perceptron()
    optimizer, other = kind(model, update_every=2), kind(twin, update_every=2)
    train(model, optimizer, batches(3))
    seen = []
    other.register_load_state_dict_pre_hook(lambda _, given: given["wrapped"])
    other.register_load_state_dict_post_hook(lambda loaded: seen.append(loaded.state[twin[0].weight]))
    twin.load_state_dict(model.state_dict())
    wrapped = {"wrapped": optimizer.state_dict()}
    other.load_state_dict(wrapped)
    assert [*wrapped] == ["wrapped"]
    assert seen[0] is other.state[twin[0].weight]  # what the optimizer will use
    train(model, optimizer, batches(3))
    train(twin, other, batches(3))
    assert equal(model, twin)


def test_a_hook_that_gives_a_state_of_another_model():
    """What the hook gives is checked, and nothing changes."""
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(2))
    before = copy.deepcopy(optimizer.state_dict())
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, given: {**given, "param_groups": []})
    with pytest.raises(ValueError, match="another model or other groups"):
        optimizer.load_state_dict(before)
    handle.remove()
    assert str(optimizer.state_dict()) == str(before)
    optimizer.load_state_dict(before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_counters_of_a_wrong_kind(kind):
    model = perceptron()
    optimizer = kind(model)
    train(model, optimizer, batches(2))
    weight, norm = (str(optimizer.state[p].keys()) for p in (model[0].weight, model[2].weight))
    numbers = {0: weight, len(optimizer.param_groups[0]["params"]): norm}
    cases = [("steps", torch.zeros(3)), ("steps", "2"), ("steps", torch.zeros(1))]
    if kind is KFAC:
        cases += [
            (key, value) for key in ("A_updates", "S_updates") for value in (3.0, torch.zeros(()), torch.zeros(4))
        ]
    for key, value in cases:
        number = next(number for number, keys in numbers.items() if f"'{key}'" in keys)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][number][key] = value
        with pytest.raises(ValueError, match=rf"another model, structure or preset: {key} of .* needs"):
            optimizer.load_state_dict(saved)
    for key, value in (
        ("step", 2.5),
        ("step", torch.zeros(2, dtype=torch.long)),
        ("interval", None),
        ("next_update", -1),
        ("skipped_steps", torch.zeros(3, dtype=torch.long)),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0][key] = value
        with pytest.raises(ValueError, match=f"the state is damaged: {key} must be an integer of at least 0, got"):
            optimizer.load_state_dict(saved)
    train(model, optimizer, batches(1))
