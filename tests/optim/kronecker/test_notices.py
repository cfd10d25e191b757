"""What an optimizer notices of the program around it, and says once."""

import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gnomon
from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.preconditioner import Skips
from support.perceptron import batches, objective, perceptron, train
from support.ranks import on_ranks

OPTIMIZERS = [INGD, KFAC]


def said(function):
    """The messages of warnings that a function gives rise to."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in found]


# ---------------------------------------------------------------------- steps that are skipped
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_that_are_never_finite(kind):
    """The first one is said, and that a hundred in a row were skipped."""
    model = perceptron()
    optimizer = kind(model)
    data = [x * math.nan for x in batches(150)]
    first, many = said(lambda: train(model, optimizer, data))
    assert "is not finite: the step was skipped, and nothing changed" in first
    assert "the last 100 steps were all skipped" in many
    assert optimizer.skipped_steps == 150
    assert said(lambda: train(model, optimizer, data)) == []


def test_gradients_that_are_not_finite_now_and_then():
    model = perceptron()
    optimizer = INGD(model)
    data = [x * (math.inf if number % 2 else 1) for number, x in enumerate(batches(300))]
    assert len(said(lambda: train(model, optimizer, data))) == 1
    assert optimizer.skipped_steps == 150


def test_a_gradient_that_is_no_product_of_rows_is_not_called_infinite():
    """A change behind torch's back skips a step; see test_through_rows.py."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30).double()
    optimizer = INGD(model)

    def run():
        for number in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 40, dtype=torch.float64)).cos().sum().backward()
            if number == 2:
                model.weight.grad.data.mul_(2)
            optimizer.step()

    assert said(run) == []
    assert optimizer.skipped_steps == 1


def test_the_count_is_not_waited_for():
    """Where the copy has not come yet the host reads what was there before."""
    skips, skipped = Skips(1, 3), torch.tensor([True])
    assert skips.count(("steps",), ~skipped) == []
    late = skips._read["steps",]
    skips._read["steps",] = torch.zeros(1, dtype=torch.long)
    skips._read["steps",].copy_ = lambda *_, **__: None
    assert skips.count(("steps",), skipped) == []
    skips._read["steps",] = late
    assert skips.count(("steps",), skipped) == [("steps", 2)]
    assert skips.count(("steps",), skipped) == [("steps", 3)]
    assert skips.count(("steps",), skipped) == []


# ---------------------------------------------------------------------- layers that are not seen
@pytest.mark.slow
@pytest.mark.parametrize("given", ["the model", "the compiled model"])
def test_a_model_that_was_called_compiled_before(given):
    torch._dynamo.reset()
    model = perceptron()
    compiled = torch.compile(model, backend="eager")
    compiled(batches(1)[0])
    optimizer = INGD(model if given == "the model" else compiled)
    (message,) = said(lambda: train(compiled, optimizer, batches(3)))
    assert "no module of them was called since this optimizer was built" in message
    assert "torch.compiler.reset()" in message
    torch.compiler.reset()  # as it says
    train(compiled, optimizer, batches(3))
    assert all(optimizer._collector.was_reached(layer) for layer in optimizer._layers.values())


def test_gradients_from_elsewhere():
    model = perceptron()
    for optimizer, count in ((INGD(model), 1), (INGD(model, curvature="gradient"), 0)):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        assert len(said(optimizer.step)) == count
        assert said(optimizer.step) == []


def test_parameters_that_join_between_the_backward_pass_and_the_step():
    model = perceptron()
    model[2].requires_grad_(False)
    optimizer = INGD(model)
    objective(model, batches(1)[0]).backward()
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": model[2].parameters()})
    assert said(optimizer.step) == []


# ---------------------------------------------------------------------- ranks
def _averaging(rank, count, settings):
    model = perceptron()
    optimizer = INGD(model, update_every=1, **settings)

    def run():
        for x in batches(4):
            optimizer.zero_grad()
            objective(model, x.chunk(count)[rank]).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= count
            optimizer.step()

    return said(run), [p.detach() for p in model.parameters()]


@pytest.mark.spawns
def test_ranks_that_average_gradients_by_themselves():
    (messages, ours), (_, theirs) = on_ranks(2, _averaging, {})
    assert len(messages) == 1
    assert "this process is one of 2 ranks, but the model is neither in DistributedDataParallel" in messages[0]
    assert not all(map(torch.equal, ours, theirs))  # the weights drift apart, as it says
    (messages, ours), (_, theirs) = on_ranks(2, _averaging, {"curvature": "gradient"})  # as it says
    assert messages == []
    assert all(map(torch.equal, ours, theirs))


# ---------------------------------------------------------------------- points on manifolds
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_points_in_the_model(kind):
    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.metric = nn.Linear(5, 4), gnomon.SPD(4)

        def forward(self, x):
            return self.map(x) @ self.metric()

    model = Metric()
    (message,) = said(lambda: kind(model))
    assert "metric.eta (of SPD)" in message
    assert re.search(r"gnomon\.optim\.moving_frame\(torch\.optim\.SGD\(point\.parameters", message)
    # As it says.
    with pytest.warns(UserWarning, match="points on manifolds"):
        optimizer = kind(model)
    assert all(p is not model.metric.eta for group in optimizer.param_groups for p in group["params"])
    assert {row.name: row.treatment for row in optimizer.summary().rows}["metric.eta"] == "left to moving_frame"
    framed = gnomon.optim.moving_frame(torch.optim.SGD(model.metric.parameters(), lr=0.1))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        framed.zero_grad()
        loss = (model(batches(1)[0]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        assert not model.metric.eta.any()
        framed.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match=r"params holds metric\.eta, coordinates of a point of SPD"):
        optimizer.add_param_group({"params": [model.metric.eta]})
    model.metric.requires_grad_(False)
    assert said(lambda: kind(model)) == []


@pytest.mark.parametrize(
    "make", [lambda: gnomon.SPD(4), lambda: gnomon.Gaussian(3), lambda: gnomon.SPD(4, batch_shape=(6,))]
)
def test_nothing_but_points(make):
    with pytest.raises(ValueError, match=r"nothing but points on manifolds to train; give points to gnomon\.optim"):
        INGD(make())
