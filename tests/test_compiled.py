"""Updates of sparse factors by ``torch.compile``: the same results, from whole graphs."""

import functools
import shutil

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.renewal import compiled

F64 = torch.float64


def trained(structure, **settings):
    """Parameters after a few steps, and how many graphs torch made on the way."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.cache_clear()
    model = nn.Sequential(nn.Linear(19, 18), nn.Tanh(), nn.Linear(18, 17)).double()
    optimizer = INGD(model, update_every=2, structure=structure, **settings)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(6, 19, dtype=F64)).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def eager_compiler(monkeypatch):
    """torch.compile as far as the graph, which must be whole."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


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
    plain, none = trained(structure, **settings)
    found, graphs = trained(structure, compile=True, **settings)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert none == 0
    assert 2 <= graphs <= 4  # one for each layer, and one more if b1 is another in the next update


@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.parametrize("structure", ["dense", "triangular", "toeplitz"])
def test_what_is_not_compiled(structure):
    plain, _ = trained(structure)
    found, graphs = trained(structure, compile=True)
    assert graphs == 0
    assert all(map(torch.equal, found, plain))


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler")
def test_updates_that_are_compiled_to_code():
    found, plain = trained("diagonal", compile=True)[0], trained("diagonal")[0]
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


def test_bad_values_are_refused():
    with pytest.raises(TypeError, match="compile must be True or False, got 'inductor'"):
        INGD(nn.Linear(3, 2), compile="inductor")
