"""Moves, and updates of sparse factors, by ``torch.compile``: the same results, from whole graphs."""

import functools
import shutil
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gnomon.optim import INGD
from gnomon.optim.kronecker import layer_steps
from gnomon.optim.kronecker.compiling import compiled
from support.marks import slow_where

F64 = torch.float64


def network(*sizes):
    torch.manual_seed(0)
    layers = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def trained(model, steps=9, spoil=None, **settings):
    """Parameters and averages after a few steps, and how many graphs torch made on the way.

    Moves along polar factors are not compiled, so there are none unless a test asks for them.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.cache_clear()
    optimizer = INGD(model, **{"update_every": 2, "polar": False, **settings})
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        first = model[0].weight
        shape = (6, first.shape[1], 7, 7)[: first.ndim]
        model(torch.randn(shape, generator=generator, dtype=F64).to(first.dtype)).square().sum().backward()
        if spoil is not None:
            spoil(step, model)
        optimizer.step()
    params = [p.detach() for p in model.parameters()]
    averages = [optimizer.state[p].get("momentum_buffer", p) for p in model.parameters()]
    assert not torch._dynamo.utils.counters["graph_break"]
    return [*params, *averages], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def eager_compiler(monkeypatch):
    """torch.compile as far as the graph."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize(
    ("structure", "settings"),
    [
        ("diagonal", {}),
        ("diagonal", {"precond_momentum": 0.5}),
        ("block", {"curvature": "gradient"}),
        ("arrow", {"convention": "outside"}),
        ("heisenberg", {"preset": "paper"}),
    ],
)
def test_compiled_updates_of_sparse_factors(structure, settings):
    plain, none = trained(network(19, 18, 17), structure=structure, **settings)
    found, graphs = trained(network(19, 18, 17), structure=structure, compile=True, **settings)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert none == 0
    moves = settings.get("preset") != "paper"  # whose steps are as long as they are
    assert 2 <= graphs - moves <= 4  # one for each layer, and one more if b1 is another in the next update


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize("structure", ["dense", "triangular", "toeplitz"])
def test_updates_of_other_factors_are_not_compiled(structure):
    plain, _ = trained(network(19, 18, 17), structure=structure)
    found, graphs = trained(network(19, 18, 17), structure=structure, compile=True)
    assert graphs == 1
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------------- moves
def no_gradient(step, model):
    model[2].weight.grad.zero_()
    model[2].bias.grad.zero_()


def no_bias(step, model):
    model[2].bias.grad = None


def not_finite(step, model):
    if step in (2, 5):
        model[0].weight.grad[1, 2] = (torch.nan, torch.inf)[step == 5]


def scaled(factor):
    def spoil(step, model):
        for p in model.parameters():
            p.grad *= factor

    return spoil


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize(
    "spoil", slow_where([None, no_gradient, not_finite, scaled(1e-200)], lambda spoil: spoil is not not_finite)
)
def test_compiled_moves(spoil):
    plain, _ = trained(network(9, 8, 7, 6), spoil=spoil)
    found, graphs = trained(network(9, 8, 7, 6), spoil=spoil, compile=True)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
def test_moves_along_polar_factors_are_as_without():
    """Layers without polar factors are compiled beside them."""
    plain, _ = trained(network(9, 8, 7, 6), polar={"0": 0})
    found, graphs = trained(network(9, 8, 7, 6), polar={"0": 0}, compile=True)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize("factor", [1e-40, 1e-25, 1e18])
def test_compiled_moves_where_squares_vanish_or_overflow(factor):
    plain, _ = trained(network(9, 8, 7, 6).float(), spoil=scaled(factor), base_width=None)
    found, _ = trained(network(9, 8, 7, 6).float(), spoil=scaled(factor), compile=True, base_width=None)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
def test_compiled_moves_stay_finite_where_gradients_are_hardly_numbers():
    found, _ = trained(network(9, 8, 7, 6).float(), spoil=scaled(1e-44), compile=True)
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
def test_compiled_moves_of_layers_that_are_preconditioned_together():
    """Their order is another than the model's; the second one has no gradient."""
    plain, _ = trained(network(5, 6, 5, 6, 5), spoil=no_gradient)
    found, _ = trained(network(5, 6, 5, 6, 5), spoil=no_gradient, compile=True)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert torch.equal(found[2], network(5, 6, 5, 6, 5)[2].weight)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
def test_compiled_moves_of_convolutions():
    def convolutional():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3, bias=False)).double()

    plain, _ = trained(convolutional())
    found, graphs = trained(convolutional(), compile=True)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
def test_compiled_moves_follow_schedules_and_groups():
    def settings(model):
        biases = {"params": [module.bias for module in model[::2]], "weight_decay": 0.0, "lr": 0.02}
        return {"groups": [biases], "lr": lambda step: 0.01 / (1 + step), "momentum": lambda step: 0.9 - 0.01 * step}

    one, other = network(9, 8, 7), network(9, 8, 7)
    plain, _ = trained(one, weight_decay=0.1, **settings(one))
    found, graphs = trained(other, weight_decay=0.1, compile=True, **settings(other))
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert graphs == 1  # the numbers are in a tensor


@pytest.mark.slow
@pytest.mark.usefixtures("eager_compiler")
def test_compiled_moves_of_many_layers(monkeypatch):
    monkeypatch.setattr(layer_steps, "FUSED", 2)
    plain, _ = trained(network(5, 5, 5, 5, 5, 3), steps=4)
    found, graphs = trained(network(5, 5, 5, 5, 5, 3), steps=4, compile=True)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert graphs == 2  # two layers, two more that are alike, and the last


@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize("case", ["a bias without gradient", "bfloat16", "precondition_only", "natural steps"])
def test_moves_that_are_not_compiled(case):
    def made(**settings):
        model = network(9, 8, 7)
        if case == "bfloat16":
            model.bfloat16()
        own = {"precondition_only": {"precondition_only": True}, "natural steps": {"step_rms": None}}
        spoil = no_bias if case == "a bias without gradient" else None
        return trained(model, spoil=spoil, **own.get(case, {}), **settings)

    plain, _ = made()
    found, graphs = made(compile=True)
    assert graphs == 0
    assert all(map(torch.equal, found, plain))


@pytest.mark.usefixtures("eager_compiler")
def test_nothing_is_compiled_for_who_looks_at_each_operation():
    plain, _ = trained(network(9, 8, 7), structure="diagonal")
    with FlopCounterMode(display=False):
        found, graphs = trained(network(9, 8, 7), structure="diagonal", compile=True)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert graphs == 0


@pytest.mark.slow
@pytest.mark.spawns
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_compiled_to_code(dtype):
    found, _ = trained(network(19, 18, 17).to(dtype), structure="diagonal", compile=True)
    plain, _ = trained(network(19, 18, 17).to(dtype), structure="diagonal")
    tolerance = 1e-10 if dtype == F64 else 1e-4
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)


def test_bad_values_are_refused():
    with pytest.raises(TypeError, match="compile must be True or False, got 'inductor'"):
        INGD(nn.Linear(3, 2), compile="inductor")
