"""Parts of a model that are replaced or taken away after the optimizer was built."""

import copy

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from support.perceptron import batches, perceptron, train

OPTIMIZERS = [INGD, KFAC]


def squared(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_head_that_is_replaced(kind):
    model = perceptron()
    optimizer = kind(model, update_every=1)
    train(model, optimizer, batches(2))
    old, body = model[3], model[0].weight.clone()
    model[3] = nn.Linear(8, 4)
    with (
        pytest.warns(UserWarning, match="a part of the model was replaced .* '3' of before is dropped, with its state"),
        pytest.raises(RuntimeError, match=r"3\.weight has a gradient but is in no group.*not a part of the model yet"),
    ):
        train(model, optimizer, batches(1), squared)
    assert torch.equal(model[0].weight, body)
    assert old.weight not in optimizer.state
    optimizer.add_param_group({"params": model[3].parameters()})
    before = copy.deepcopy(model)
    losses = train(model, optimizer, batches(20), squared)
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert [row.name for row in optimizer.summary().rows][:2] == ["0.weight + 0.bias", "3.weight + 3.bias"]
    assert not old._forward_hooks
    assert optimizer.factors("3")[1].shape == (4, 4) if kind is INGD else True


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_new_head_that_is_added_at_once(kind):
    model = perceptron()
    optimizer = kind(model, update_every=1)
    train(model, optimizer, batches(2))
    model[3] = nn.Linear(8, 4)
    with pytest.warns(UserWarning, match="'3' of before is dropped"):
        optimizer.add_param_group({"params": model[3].parameters(), "lr": 1e-3})
    assert optimizer.summary().rows
    train(model, optimizer, batches(3), squared)
    twin, resumed = copy.deepcopy((model, optimizer))
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, batches(3), squared)
    train(twin, resumed, batches(3), squared)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_layers_that_come_after_others_are_gone_are_told_apart():
    """The number of a layer, under which products and memory are kept, is never given again."""
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)], nn.Linear(5, 3))
    optimizer = INGD(model, preset="paper", lr=1e-3)
    train(model, optimizer, batches(2))
    for _ in range(3):
        model[1] = nn.Linear(5, 5)
        with pytest.warns(UserWarning, match="'1' of before is dropped"):
            optimizer.add_param_group({"params": model[1].parameters()})
        train(model, optimizer, batches(2))
    numbers = [layer.index for layer in optimizer._layers.values()]
    assert len(set(numbers)) == len(numbers) == 4


def test_a_weight_that_is_replaced_without_its_bias():
    """The bias, which was a column of the layer's matrix, has to be added with the weight."""
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(2))
    model[0].weight = nn.Parameter(torch.randn(8, 5))
    with (
        pytest.warns(UserWarning, match="'0' of before is dropped"),
        pytest.raises(RuntimeError, match=r"0\.weight has a gradient but is in no group"),
    ):
        train(model, optimizer, batches(1))
    optimizer.add_param_group({"params": model[0].parameters()})
    before = copy.deepcopy(model)
    train(model, optimizer, batches(2))
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_parts_that_are_taken_away():
    """A norm and a layer without anything in their place."""
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(2))
    model[2] = nn.Identity()
    with pytest.warns(UserWarning, match=r"parameters \[\(8,\), \(8,\)\] of before is dropped"):
        train(model, optimizer, batches(2))
    model[3] = nn.Identity()
    with pytest.warns(UserWarning, match="'3' of before is dropped"):
        train(model, optimizer, batches(2), squared)
    assert [row.name for row in optimizer.summary().rows] == ["0.weight + 0.bias"]


def test_a_bias_that_is_taken_away():
    model = perceptron()
    optimizer = INGD(model)
    model[0].bias = None
    with pytest.warns(UserWarning, match="of before is dropped"):
        train(model, optimizer, batches(2))
    assert "0.weight" in [row.name for row in optimizer.summary().rows]


def test_nothing_is_left():
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = INGD(model)
    model[0] = nn.Linear(5, 3)
    with pytest.raises(RuntimeError, match="none of this optimizer's parameters is in the model any more"):
        train(model, optimizer, batches(1))


def test_a_part_that_comes_later():
    model = nn.Sequential(nn.Linear(5, 8))
    optimizer = INGD(model)
    model.append(nn.Linear(8, 3))
    with pytest.raises(
        RuntimeError, match=r"1\.weight has a gradient but is in no group, because it was frozen, or not"
    ):
        train(model, optimizer, batches(1))
    optimizer.add_param_group({"params": model[1].parameters()})
    before = model[1].weight.clone()
    train(model, optimizer, batches(1))
    assert not torch.equal(before, model[1].weight)
