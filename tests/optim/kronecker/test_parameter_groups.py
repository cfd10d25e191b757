"""Groups of parameters and their schedules."""

import copy

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from support.perceptron import batches, close, equal, perceptron, train

OPTIMIZERS = [INGD, KFAC]


def test_parameters_that_join_later():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = INGD(model, 1e-2)
    train(model, optimizer, batches(12))
    for p in model[0].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    before = model[0].weight.clone()
    losses = train(model, optimizer, batches(30))
    assert not torch.equal(before, model[0].weight)
    assert losses[-1] < losses[0]
    assert "INGD" in next(row.treatment for row in optimizer.summary().rows if row.name.startswith("0."))
    with pytest.raises(ValueError, match="not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_groups_have_their_own_settings():
    model = perceptron()
    still = {"params": model[0].parameters(), "lr": 0.0}
    optimizer = INGD(model, 1e-2, groups=[still])
    before = copy.deepcopy(model)
    train(model, optimizer, batches(3))
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[3].weight, before[3].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


def test_weight_and_bias_in_different_groups():
    """The first step decays weights and no bias; what follows trains."""
    plain, model = perceptron(), perceptron()
    before = copy.deepcopy(model)
    train(plain, INGD(plain, 1e-2, weight_decay=0.0), batches(1))
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = INGD(model, 1e-2, weight_decay=0.5, groups=[{"params": biases, "weight_decay": 0.0}])
    losses = train(model, optimizer, batches(1))
    for i in (0, 3):
        torch.testing.assert_close(model[i].bias, plain[i].bias)
        torch.testing.assert_close(model[i].weight, plain[i].weight - 1e-2 * 0.5 * before[i].weight)
    losses += train(model, optimizer, batches(30)[1:])
    assert losses[-1] < losses[0]


def test_schedulers_and_functions_of_the_step():
    model = perceptron()
    optimizer = INGD(
        model,
        lambda step: 1e-2 / (1 + step),
        damping=lambda step: 0.1 * 0.9**step,
        update_every=lambda step: 1 + step // 2,
    )
    train(model, optimizer, batches(5))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.1 * 0.9**4)
    assert optimizer.param_groups[0]["update_every"] == 3
    optimizer = INGD(model, 1e-2, fallback_lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, batches(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-4]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", ["biases", "weights", "weights alone"])
def test_the_order_of_groups_does_not_matter(kind, first):
    """The usual recipe: no decay for biases and norms."""
    reference = perceptron()
    train(reference, kind(reference, 1e-2), batches(3))
    model = perceptron()
    weights = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": others}, {"params": weights}]
    groups = {"biases": groups, "weights": groups[::-1], "weights alone": groups[1:]}[first]
    kept = copy.copy(groups[0])
    optimizer = kind(model, 1e-2, groups=groups)
    train(model, optimizer, batches(3))
    assert equal(model, reference)
    assert groups[0] == kept
    assert "exp_avg" not in optimizer.state[model[0].bias]


def test_a_weight_that_joins_without_its_bias():
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = INGD(model)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight has a gradient but is in no group, because it was frozen"):
        train(model, optimizer, batches(1))
    model[0].bias.requires_grad_(False)
    optimizer.add_param_group({"params": [model[0].weight]})
    train(model, optimizer, batches(2))
    model[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model[0].bias]})
    before = model[0].bias.clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(before, model[0].bias)
    assert "exp_avg" in optimizer.state[model[0].bias]  # its weight goes without it by now


def test_a_group_that_fails_changes_nothing():
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = INGD(model)
    model[0].requires_grad_(True)
    groups, hooks = len(optimizer.param_groups), len(model[0]._forward_hooks)
    for group, message in (
        ({"params": [model[0].weight, model[3].weight]}, r"3\.weight, which is in another group already"),
        ({"params": [model[0].weight], "lr": -1.0}, "lr must be finite"),
        ({"params": [model[0].weight], "structure": "diagonal"}, "a group has no setting structure; there are"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
        assert (len(optimizer.param_groups), len(model[0]._forward_hooks)) == (groups, hooks)
    with pytest.raises(TypeError, match="a group must be a dictionary with 'params'"):
        INGD(model, groups=["params"])


# ---------------------------------------------------------------------- rates that are tensors
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("settings", [{}, {"preset": "paper"}, {"kl_clip": 1e-3}, {"fallback": "sgd"}])
def test_rates_of_one_element_and_any_dimension(kind, shape, settings):
    plain, model = perceptron(), perceptron()
    train(plain, kind(plain, 1e-2, **settings), batches(3))
    rate = torch.full(shape, 1e-2)
    train(model, kind(model, rate, **settings), batches(3))
    close(model, plain)
    assert rate.shape == shape


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "damping", "precond_lr", "fallback_lr", "step_rms"])
def test_other_settings_that_are_tensors(name):
    plain, model = perceptron(), perceptron()
    train(plain, INGD(plain, **{name: 0.1}), batches(3))
    train(model, INGD(model, **{name: torch.tensor([0.1])}), batches(3))
    close(model, plain)


def test_functions_that_give_tensors():
    plain, model = perceptron(), perceptron()
    train(plain, INGD(plain, lambda step: 0.1 / (1 + step), damping=lambda step: 0.1), batches(3))
    optimizer = INGD(model, lambda step: torch.tensor([0.1]) / (1 + step), damping=lambda step: torch.tensor([[0.1]]))
    train(model, optimizer, batches(3))
    close(model, plain)


def test_a_tensor_is_no_rate_of_two_groups():
    """INGD makes two groups of one, and a scheduler changes the rate of each."""
    model, rate = perceptron(), torch.tensor(1e-2)
    optimizer = INGD(model, rate)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    train(model, optimizer, batches(1))
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([1e-3, 1e-3])
    assert rate.item() == pytest.approx(1e-2)
    before = model[0].weight.clone()
    optimizer.param_groups[0]["lr"] = torch.tensor([1e-3])  # by hand, of another shape
    train(model, optimizer, batches(1))
    assert not torch.equal(before, model[0].weight)


def test_a_rate_that_is_no_number():
    for rate in (torch.ones(2), torch.tensor([])):
        with pytest.raises(TypeError, match="lr must be a number"):
            INGD(perceptron(), rate)
