"""Directions from the rows of a batch: the same steps, and each change of a gradient is noticed."""

import copy
import functools
import math

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.shortcut import THROUGH_ROWS, Shortcut
from support.marks import slow_where
from support.matrices import F64
from support.runs import OPTIMIZERS, same_run, trained, wide, wide_batches


@pytest.fixture
def through_rows(monkeypatch):
    """For each step, whether a layer went through its rows."""
    taken = []
    verified = Shortcut.verified

    def spy(self, candidates, settings):
        right = verified(self, candidates, settings)
        taken.append(any(record.rows is not None for _, record in candidates))
        return right

    monkeypatch.setattr(Shortcut, "verified", spy)
    return taken


def plainly(monkeypatch, taken, *args, **kwargs):
    """The same run, without rows."""
    with monkeypatch.context() as patch:
        patch.setattr(Shortcut, "may_serve", lambda *arguments: False)
        before = len(taken)
        result = trained(*args, **kwargs)
        assert not any(taken[before:])
        del taken[before:]
    return result


@pytest.mark.parametrize("bias", slow_where([True, False], lambda bias: not bias), ids=["bias", "no-bias"])
@pytest.mark.parametrize("every", slow_where([1, 5], lambda every: every == 1))
@pytest.mark.parametrize(("name", "steps"), [("robust", 30), ("paper", 30), ("kfac", 30), ("kl_clip", 6)])
def test_few_rows_give_the_same_steps(name, steps, every, bias, monkeypatch, through_rows):
    build = functools.partial(OPTIMIZERS[name], update_every=every, growing_intervals=False)
    run = (build, wide(bias), wide_batches(steps))
    ours = trained(*run)
    assert through_rows == [True] * steps
    assert ours[1].param_groups[0][THROUGH_ROWS] is True
    same_run(ours, plainly(monkeypatch, through_rows, *run))


@pytest.mark.parametrize("structure", ["triangular", "diagonal", "arrow", "block"])
def test_few_rows_with_structures(structure, monkeypatch, through_rows):
    """Where they are cheap for a whole gradient too, rows are taken only if there are very few."""
    run = (functools.partial(INGD, structure=structure, update_every=3), wide(), wide_batches(9, 1))
    ours = trained(*run)
    assert all(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run))


def test_few_rows_of_sequences_and_of_some_steps_only(monkeypatch, through_rows):
    torch.manual_seed(0)
    batches = [torch.randn(samples, 2, 40, dtype=F64) for samples in (3, 40, 2, 3, 40, 40, 3, 1, 3)]
    run = (functools.partial(INGD, update_every=2), wide(), batches)
    ours = trained(*run)
    assert through_rows == [len(x) < 40 for x in batches]
    same_run(ours, plainly(monkeypatch, through_rows, *run))


def penalized(model, x):
    """torch adds the two parts of a gradient in place, which shows by its version."""
    return model(x).cos().sum(1).mean() + 0.05 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_penalty_in_the_loss_is_noticed(name, monkeypatch, through_rows):
    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(8), penalized)
    ours = trained(*run)
    assert ours[1].param_groups[0].get(THROUGH_ROWS) is not True
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_penalty_that_leaves_no_version_is_noticed_at_the_first_step(name, monkeypatch, through_rows):
    """As a hook of the parameter adds it: in a new tensor."""

    def build(model):
        model[0].weight.register_hook(lambda g: g + 0.1 * model[0].weight.detach())
        return OPTIMIZERS[name](model, update_every=2)

    run = (build, wide(), wide_batches(8))
    ours = trained(*run)
    assert ours[1].param_groups[0][THROUGH_ROWS] is False
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run))


def clipped(step, model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def in_place(step, model, optimizer):
    with torch.no_grad():
        model[0].bias.grad.add_(0.1)


def replaced(step, model, optimizer):
    model[2].weight.grad = 0.5 * model[2].weight.grad


@pytest.mark.parametrize("change", [clipped, in_place, replaced], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["robust", "paper", "kfac"])
def test_gradients_that_are_changed_before_the_step(name, change, monkeypatch, through_rows):
    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(6))
    ours = trained(*run, before_step=change)
    same_run(ours, plainly(monkeypatch, through_rows, *run, before_step=change))
    assert ours[1].skipped_steps == 0
    if change is clipped:
        assert not any(through_rows)
    if change is replaced:
        assert ours[1].param_groups[0][THROUGH_ROWS] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [*[(name, "all") for name in ("robust", "paper", "kfac")], ("robust", "0.weight"), ("robust", "2.bias")],
)
def test_a_gradient_changed_behind_the_back_skips_a_step(name, which, monkeypatch, through_rows):
    """That step alone, as if its gradients were not finite; then it trains on without rows."""

    def hidden(step, model, optimizer):
        if step == 10:
            for key, p in model.named_parameters():
                if which in ("all", key):
                    p.grad.data.mul_(0.5)

    def lost(step, model, optimizer):
        if step == 10:
            model[0].weight.grad.fill_(float("nan"))

    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(16))
    ours = trained(*run, before_step=hidden)
    assert through_rows == [True] * 11 + [False] * 5
    assert ours[1].skipped_steps == 1
    assert ours[1].param_groups[0][THROUGH_ROWS] is False
    same_run(ours, plainly(monkeypatch, through_rows, *run, before_step=lost))


@pytest.mark.parametrize("name", ["robust", "paper", "kfac"])
def test_accumulated_gradients(name, monkeypatch, through_rows):
    run = (functools.partial(OPTIMIZERS[name], update_every=2), wide(), wide_batches(6))
    ours = trained(*run, parts=2)
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run, parts=2))


def test_gradients_that_are_zeroed_and_modules_that_are_used_twice(monkeypatch, through_rows):
    def twice(model, x):
        return model(x).cos().sum(1).mean() + model(2 * x).sin().sum(1).mean()

    run = (functools.partial(INGD, update_every=2), wide(), wide_batches(6))
    ours = trained(*run, loss=twice)
    assert not any(through_rows)
    same_run(ours, plainly(monkeypatch, through_rows, *run, loss=twice))
    kept = trained(*run, before_step=lambda step, model, optimizer: None)
    model = copy.deepcopy(run[1])
    optimizer = run[0](model)
    for x in run[2]:
        optimizer.zero_grad(set_to_none=False)  # gradients are added to zeros: none is known to be a product
        model(x).cos().sum(1).mean().backward()
        optimizer.step()
    same_run((model, optimizer), kept)


def resumed(build, model, batches, at, before_step=None):
    """The end of a run, and that of one which goes on from the state saved at a step."""
    whole = trained(build, model, batches, before_step=before_step)
    half = trained(build, model, batches[:at], before_step=before_step)
    saved = copy.deepcopy((half[0].state_dict(), half[1].state_dict()))
    new = copy.deepcopy(model)
    optimizer = build(new)
    new.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for x in batches[at:]:
        optimizer.zero_grad()
        new(x).cos().sum(1).mean().backward()
        optimizer.step()
    return whole, (new, optimizer)


@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_through_rows_that_is_resumed(name, at):
    build = functools.partial(OPTIMIZERS[name], update_every=3, growing_intervals=False)
    same_run(*resumed(build, wide(), wide_batches(10), at), tolerance=0)


def test_a_run_that_is_resumed_after_a_step_was_skipped():
    """Right after it: the run goes on without rows, and so must the other."""

    def hidden(step, model, optimizer):
        if step == 6:
            model[0].weight.grad.data.mul_(0.5)

    whole, again = resumed(functools.partial(INGD, update_every=3), wide(), wide_batches(14), 7, hidden)
    assert whole[1].skipped_steps == again[1].skipped_steps == 1
    same_run(whole, again, tolerance=0)


def test_a_gradient_that_is_not_finite_leaves_rows_in_use():
    torch.manual_seed(0)
    model = wide()
    optimizer = INGD(model, growing_intervals=False)
    for factor in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        (factor * model(torch.randn(2, 40, dtype=F64)).cos().mean()).backward()
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert optimizer.param_groups[0][THROUGH_ROWS] is True
