"""Structures by name, size, group and function."""

import pickle
from functools import partial

import pytest
import torch

import gnomon
from gnomon import groups as g

BY_NAME = {
    "dense": g.Dense(9),
    "triangular": g.Triangular(9),
    "diagonal": g.Diagonal(9),
    "toeplitz": g.Toeplitz(9),
    "block": g.BlockDiagonal(9, 2),
    "block:4": g.BlockDiagonal(9, 4),
    "arrow": g.Arrow(9),
    "arrow:3": g.Arrow(9, rank=3),
    "lowrank": g.LowRank(9),
    "lowrank:3": g.LowRank(9, rank=3),
    "heisenberg": g.Heisenberg(9, 1, 1),
    "heisenberg:2,3": g.Heisenberg(9, 2, 3),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_names(name):
    assert g.as_structure(name, 9) == BY_NAME[name]
    assert pickle.loads(pickle.dumps(g.as_factory(name)))(9) == BY_NAME[name]


def test_every_name_is_tested():
    assert {name.partition(":")[0] for name in BY_NAME} == set(g.STRUCTURE_NAMES)


def test_other_ways_to_write_a_structure():
    assert g.as_structure(g.Arrow, 5) == g.Arrow(5)
    assert g.as_structure(partial(g.BlockDiagonal, block=3), 5) == g.BlockDiagonal(5, 3)
    assert g.as_structure(g.Arrow(5), 5) == g.as_structure(g.Arrow(5)) == g.Arrow(5)
    assert g.as_structure(5) == g.Dense(5)


def test_points_take_the_size_of_a_name_from_what_else_is_given():
    matrix = 2 * torch.eye(4, dtype=torch.float64)
    assert gnomon.SPD("arrow:2", init=matrix).group == g.Arrow(4, rank=2)
    assert gnomon.Gaussian("lowrank", loc=torch.zeros(4)).structure == g.LowRank(4)
    assert gnomon.Gaussian(g.Arrow, loc=torch.zeros(4), init=1.0).structure == g.Arrow(4)


def test_optimizers_take_names():
    weight = torch.nn.Parameter(torch.zeros(6))
    optimizer = gnomon.optim.StructuredNewton([weight], "arrow:2")
    optimizer.step(lambda: (weight - 1).square().sum())
    layer = torch.nn.Linear(5, 6)
    ingd = gnomon.optim.INGD(layer, structure=("arrow:2", "block:3"))
    layer(torch.randn(4, 5)).square().sum().backward()
    ingd.step()
    K, C = ingd.factors("")
    assert torch.equal(C[:3, 3:], torch.zeros(3, 3))
    assert torch.count_nonzero(K[2:, 2:] - K[2:, 2:].diagonal().diag()) == 0


@pytest.mark.parametrize(
    ("structure", "k", "error", "message"),
    [
        ("sparse", 5, ValueError, "structure must be one of dense, triangular, .*, got 'sparse'"),
        ("arrow:", 5, ValueError, "give its rank as in 'arrow:2', got 'arrow:'"),
        ("arrow:x", 5, ValueError, "give its rank as in 'arrow:2', got 'arrow:x'"),
        ("heisenberg:2", 9, ValueError, "give its head and tail as in 'heisenberg:2,2', got 'heisenberg:2'"),
        ("dense:3", 5, ValueError, "structure is 'dense:3', but 'dense' takes no numbers"),
        ("arrow:7", 5, ValueError, r"rank must be below k = 5, got 7"),
        ("arrow:0", 5, ValueError, "rank must be a positive integer, got 0"),
        (g.Arrow(4), 5, ValueError, r"structure must be a group of size 5, got Arrow\(4, rank=1\); a name such as"),
        (lambda k: g.Arrow(k + 1), 5, ValueError, r"got Arrow\(6, rank=1\) from <function"),
        (lambda k: None, 5, ValueError, "got None from <function"),
        (4, 5, ValueError, r"must be a group of size 5, got Dense\(4\)"),
        ("arrow", None, TypeError, r"structure is 'arrow', which has no size; pass a size or a group such as"),
        (2.5, None, TypeError, r"structure must be a size or a group .* got 2\.5"),
    ],
)
def test_errors(structure, k, error, message):
    with pytest.raises(error, match=message):
        g.as_structure(structure, k)
