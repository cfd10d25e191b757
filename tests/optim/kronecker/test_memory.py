"""How much the optimizer stores, and the ways to store less."""

import functools

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.structures import NAMES
from support.marks import slow_where
from support.matrices import F64
from support.runs import same_run, trained, wide, wide_batches


@pytest.mark.parametrize(
    ("structure", "limit"),
    slow_where([("dense", 8.5), ("triangular", 5.0), ("diagonal", 1.1)], lambda case: case[0] == "triangular"),
)
def test_memory_of_the_state(structure, limit):
    """On the perceptron 784-512-512-10, with the momentum and the cached products."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = INGD(model, structure=structure, growing_intervals=False)
    model(torch.randn(128, 784)).square().mean().backward()
    optimizer.step()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert optimizer.memory_usage() <= limit * parameters
    assert optimizer.summary().bytes == pytest.approx(optimizer.memory_usage(), rel=0.01)


@pytest.mark.parametrize("settings", [{}, {"precond_momentum": 0.5}], ids=["no-momentum", "momentum"])
def test_low_memory(settings):
    """On the perceptron 784-512-512-10: at most five times the parameters, and the summary says so."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = INGD(model, memory="low", growing_intervals=False, **settings)
    model(torch.randn(128, 784)).square().mean().backward()
    optimizer.step()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert optimizer.memory_usage() <= (5 if settings else 3) * parameters
    assert optimizer.summary().bytes == pytest.approx(optimizer.memory_usage(), rel=0.01)


@pytest.mark.parametrize("samples", [4, 50])
@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_low_memory_takes_the_same_steps(preset, samples):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 9, bias=False), nn.Tanh(), nn.Linear(9, 3)).double()
    batches = [torch.randn(samples, 12, dtype=F64) for _ in range(12)]
    build = functools.partial(INGD, preset=preset, update_every=4, growing_intervals=False)
    low, default = (trained(functools.partial(build, memory=memory), model, batches) for memory in ("low", "default"))
    same_run(low, default)
    assert not low[1]._factors._products
    assert bool(default[1]._factors._products) == (preset == "paper")
    assert low[1].memory_usage() < default[1].memory_usage()


@pytest.mark.parametrize("memory", ["default", "low"])
@pytest.mark.parametrize("structure", NAMES)
def test_no_momentum_takes_no_memory(structure, memory):
    build = functools.partial(INGD, structure=structure, memory=memory)
    model, optimizer = trained(build, wide(), wide_batches(1))
    for layer in (model[0], model[2]):
        kept = optimizer.state[layer.weight].keys()
        assert {"K", "C"} <= kept
        assert {"m_K", "m_C"}.isdisjoint(kept)
    with_momentum = trained(functools.partial(build, precond_momentum=0.5), wide(), wide_batches(1))[1]
    assert optimizer.memory_usage() < with_momentum.memory_usage()


def test_momentum_that_begins_later_has_its_place():
    """A schedule that is zero at first."""
    build = functools.partial(INGD, precond_momentum=lambda step: 0.5 * (step > 2), update_every=1)
    model, optimizer = trained(build, wide(), wide_batches(6))
    assert optimizer.state[model[0].weight]["m_K"].abs().max() > 0


def test_momentum_that_is_set_by_hand_later():
    """Dense factors that were built without it have no room for it, and nothing changes."""
    model, optimizer = trained(functools.partial(INGD, update_every=1), wide(), wide_batches(2))
    optimizer.param_groups[0]["precond_momentum"] = 0.5
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="precond_momentum was 0 when the optimizer was built"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
