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
