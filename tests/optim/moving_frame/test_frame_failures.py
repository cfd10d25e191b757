"""Gradients, closures and arguments that are bad."""

import copy
import math
import warnings

import pytest
import torch
from torch import optim

import gnomon
from gnomon.problems import LogDet
from support.framed import OPTIMIZERS, Model, descend, train


def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing():
    model = Model()
    optimizer = gnomon.moving_frame(optim.Adam(model.parameters(), lr=0.1))
    train(model, optimizer, 2, seed=0)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    for bad in (math.nan, math.inf):
        optimizer.zero_grad()
        model.loss(torch.ones(2, 4)).backward()
        model.cov.eta.grad[0] = bad
        with (
            pytest.warns(RuntimeWarning, match="the step was skipped, and nothing changed") if bad != bad else _quiet()
        ):
            assert optimizer.step() is None
    assert optimizer.skipped_steps == 2
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key]), key
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1][index][key])
    train(model, optimizer, 1, seed=1)
    assert optimizer.skipped_steps == 2


def test_a_huge_but_finite_gradient_is_not_refused():
    point = gnomon.SPD(2, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=1e-37), max_step=1.0)
    point.logdet().backward()
    point.eta.grad.fill_(2e38)  # whose sum overflows
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert point.distance(torch.eye(2)).item() == pytest.approx(1, rel=0.1)


class _quiet(warnings.catch_warnings):  # noqa: N801
    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("error")


@pytest.mark.parametrize("name", ["adam", "lbfgs"])
def test_a_closure_with_a_bad_gradient_skips_the_step(name):
    point = gnomon.SPD(3)
    optimizer = gnomon.moving_frame(OPTIMIZERS[name](point.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = point.matrix().sum() * math.nan
        loss.backward()
        return loss

    with pytest.warns(RuntimeWarning, match="gradient or step of a manifold parameter is not finite"):
        assert math.isnan(optimizer.step(closure))
    assert optimizer.skipped_steps == 1
    torch.testing.assert_close(point.matrix(), torch.eye(3))
    problem = LogDet(torch.eye(3) * 2)
    assert descend(optimizer, lambda: problem(point), 60) - problem.minimum < 0.05


@pytest.mark.parametrize("failure", ["interrupt", "nan"])
def test_a_closure_that_fails_late_leaves_everything_where_it_was(failure):
    point, weight = gnomon.SPD(3), torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        point.eta.add_(0.1 * torch.eye(3))  # moved by hand, not yet folded
    tau = point.matrix().detach()
    optimizer = gnomon.moving_frame(optim.LBFGS([point.eta, weight], line_search_fn="strong_wolfe"))
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        if evaluations == 3 and failure == "interrupt":
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = LogDet(torch.eye(3) * 5)(point) + weight.square().sum()
        if evaluations >= 2 and failure == "nan":
            loss = loss * math.nan
        loss.backward()
        return loss

    expected = pytest.raises(KeyboardInterrupt) if failure == "interrupt" else pytest.warns(RuntimeWarning)
    with expected:
        optimizer.step(closure)
    assert not bool(point.eta.any())
    torch.testing.assert_close(point.matrix(), tau)
    torch.testing.assert_close(weight.detach(), torch.ones(2))


def test_a_step_that_overflows_is_given_up_with_its_momentum():
    point = gnomon.SPD(3, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=1e30, momentum=0.9), max_step=None)
    point.matrix().sum().backward()
    with pytest.warns(RuntimeWarning, match="a point would have overflowed: it stays where it is"):
        optimizer.step()
    torch.testing.assert_close(point.matrix(), torch.eye(3))
    assert not bool(optimizer.state[point.eta]["momentum_buffer"].any())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: gnomon.moving_frame(optim.SGD([torch.nn.Parameter(torch.ones(2))])),
            "holds no coordinates of a living",
        ),
        (lambda p: gnomon.moving_frame(p), "optimizer must be a torch.optim.Optimizer, got SPD"),
        (
            lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), transport="exact"),
            "transport must be one of 'auto'",
        ),
        (
            lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), max_step=0.0),
            "positive number, 'auto', or None .* got 0.0",
        ),
        (lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), max_step=math.nan), "max_step must be"),
        (lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), max_step="1"), "max_step must be .* got '1'"),
    ],
)
def test_bad_arguments(build, message):
    point = gnomon.SPD(2)
    with pytest.raises((ValueError, TypeError), match=message):
        build(point)


def test_an_optimizer_that_does_not_fold_is_noticed_once():
    point = gnomon.SPD(3)
    optimizer = optim.SGD(point.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        (point.matrix().sum() - point.logdet()).backward()
        optimizer.step()

    with _quiet():
        step()
        step()
    with pytest.warns(RuntimeWarning, match=r"moved twice and not folded .* wrap the optimizer: gnomon.moving_frame"):
        step()
    with _quiet():
        step()
        gnomon.moving_frame(optimizer).step()


def test_a_point_that_is_moved_by_hand_or_wrapped_is_not_warned_about():
    point = gnomon.SPD(3)
    optimizer = gnomon.moving_frame(optim.Adam(point.parameters(), lr=0.1))
    with _quiet():
        for _ in range(3):
            with torch.no_grad():
                point.eta.add_(0.1 * torch.eye(3))
            point.matrix()
            descend(optimizer, lambda: LogDet(torch.eye(3))(point), 2)
