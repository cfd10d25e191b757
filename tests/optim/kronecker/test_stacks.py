"""Layers that are alike are preconditioned together, with the results of each alone."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon import groups
from gnomon.optim import INGD
from gnomon.optim.kronecker.inverse_factor import InverseFactors
from gnomon.optim.kronecker.inverse_free_factor import InverseFreeFactors
from gnomon.optim.kronecker.layers import base
from support.marks import slow_where
from support.matrices import F64
from support.runs import OPTIMIZERS, convolutions, same_run, trained


def linear_layers():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(6, 6), nn.Tanh())]).double()


STACKED = {
    **OPTIMIZERS,
    **{name: functools.partial(INGD, structure=name) for name in ("diagonal", "triangular", "arrow")},
    "gradient": functools.partial(INGD, curvature="gradient"),
    "no-momentum": functools.partial(INGD, precond_momentum=0.0),
}
MODELS = {
    "linear": (linear_layers, (9, 6)),
    "few-rows": (linear_layers, (3, 6)),
    "convolutions": (convolutions, (5, 4, 3, 3)),
}


@pytest.fixture
def stack_sizes(monkeypatch):
    """How many layers were preconditioned together, for each product."""
    sizes = []
    for rule in (InverseFreeFactors, InverseFactors):

        def spy(self, stack, *args, _apply=rule.apply, **kwargs):
            sizes.append(len(stack))
            return _apply(self, stack, *args, **kwargs)

        monkeypatch.setattr(rule, "apply", spy)
    return sizes


def alone(monkeypatch, sizes, *args, **kwargs):
    """The same run, each layer on its own."""
    with monkeypatch.context() as patch:
        patch.setattr(base, "SMALL", -1)
        sizes.clear()
        result = trained(*args, **kwargs)
        assert max(sizes) == 1
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    slow_where(
        [
            *[(name, "linear") for name in STACKED if name != "kfac-paper"],
            *[(name, "convolutions") for name in ("robust", "paper", "diagonal", "triangular", "arrow", "kfac")],
            ("robust", "few-rows"),
            ("kfac", "few-rows"),
        ],
        lambda case: case[0] not in OPTIMIZERS or case[1] == "convolutions",
    ),
)
def test_layers_that_are_alike_together(name, kind, monkeypatch, stack_sizes):
    make, shape = MODELS[kind]
    build = functools.partial(STACKED[name], update_every=3, growing_intervals=False)
    run = (build, make(), [torch.randn(shape, dtype=F64) for _ in range(15)])
    ours = trained(*run)
    assert max(stack_sizes) == 8
    same_run(ours, alone(monkeypatch, stack_sizes, *run))


def frozen_for_a_while(step, model, optimizer):
    model[4].requires_grad_(step not in (2, 3, 4))


def without_gradient(step, model, optimizer):
    if step in (0, 3, 4):
        model[2].weight.grad = model[2].bias.grad = None
    if step in (5, 6):
        model[6].bias.grad = None


@pytest.mark.slow
@pytest.mark.parametrize(
    "meddle",
    [frozen_for_a_while, without_gradient],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("robust", "linear"),
        ("robust", "few-rows"),
        ("paper", "convolutions"),
        ("triangular", "linear"),
        ("kfac", "linear"),
    ],
)
def test_stacks_of_changing_layers(name, kind, meddle, monkeypatch, stack_sizes):
    make, shape = MODELS[kind]
    run = (functools.partial(STACKED[name], update_every=2), make(), [torch.randn(shape, dtype=F64) for _ in range(8)])
    ours = trained(*run, before_step=meddle)
    assert {7, 8} <= set(stack_sizes)
    same_run(ours, alone(monkeypatch, stack_sizes, *run, before_step=meddle))


@pytest.mark.parametrize("name", ["robust", "paper", "diagonal", "kfac"])
def test_curvature_that_is_not_finite_skips_its_layer_only(name, monkeypatch, stack_sizes):
    seen = {}

    def spoil(step, model, optimizer):
        keys = ("K", "C", "m_K", "m_C", "level", "A", "S", "A_unit", "S_unit", "A_inverse", "S_inverse", "A_updates")
        states = [optimizer.state[model[i].weight] for i in range(0, 16, 2)]
        if step == 4:
            layer, collector = optimizer._layers[model[6].weight], optimizer._collector
            s = collector.statistics(layer)
            spoilt = s.inputs.of([t * float("nan") for t in s.inputs.tensors], s.inputs.unit)
            collector.put_statistics(layer, replace(s, inputs=spoilt))
            seen["before"] = [{key: s[key].clone() for key in keys if key in s} for s in states]
        if step == 5:
            seen["after"] = [{key: s[key].clone() for key in keys if key in s} for s in states]

    build = functools.partial(STACKED[name], update_every=1)
    run = (build, linear_layers(), [torch.randn(9, 6, dtype=F64) for _ in range(6)])
    ours = trained(*run, before_step=spoil)
    assert (ours[1].skipped_updates, ours[1].skipped_steps) == (1, 0)
    assert max(stack_sizes) == 8
    stayed = [
        all(torch.equal(before[key], after[key]) for key in before)
        for before, after in zip(seen["before"], seen["after"], strict=True)
    ]
    assert stayed == [index == 3 for index in range(8)]
    same_run(ours, alone(monkeypatch, stack_sizes, *run, before_step=spoil))


class Weighted(groups.Diagonal):
    """A structure of a user's own, whose name does not tell all of it."""

    def __init__(self, k, rate):
        super().__init__(k)
        self.rate = rate

    def scale(self, eta):
        return (0.5 * self.rate * eta[0],)

    def unscale(self, n):
        return (2 / self.rate * n[0],)


def test_layers_of_different_structures_are_not_alike(monkeypatch, stack_sizes):
    structure = {"[0-6]": lambda k: Weighted(k, 1.0), "*": lambda k: Weighted(k, 0.5)}
    build = functools.partial(INGD, structure=structure, update_every=2)
    run = (build, linear_layers(), [torch.randn(9, 6, dtype=F64) for _ in range(4)])
    ours = trained(*run)
    same_run(ours, alone(monkeypatch, stack_sizes, *run))


class Operators(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


def calls_of_a_step(build):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(32)])
    optimizer = build(model)
    for counting in (False, True):
        optimizer.zero_grad()
        model(torch.randn(64, 32)).square().mean().backward()
        with Operators() as operators:
            optimizer.step()
        if counting:
            return operators.calls.total()
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_where(["robust", "paper", "kfac"], lambda name: name != "robust"))
def test_stacks_need_fewer_calls(name, monkeypatch):
    build = functools.partial(OPTIMIZERS[name], update_every=1)
    stacked = calls_of_a_step(build)
    monkeypatch.setattr(base, "SMALL", -1)
    assert 3 * stacked <= calls_of_a_step(build)
