"""Structures of factors: by name, by pattern, by size and by block."""

import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

from gnomon import groups
from gnomon.optim import INGD
from gnomon.optim.kronecker.gram_factor import GramFactor
from support.marks import slow_where

NAMES = ["dense", "triangular", "diagonal", "block", "arrow", "heisenberg", "toeplitz", "identity"]
FACTORIES = {
    "upper": lambda k: groups.Triangular(k, upper=True),
    "small blocks": lambda k: groups.BlockDiagonal(k, min(k, 3)),
    "pair": (groups.Triangular, groups.Arrow),
    "pattern": {"0": "diagonal", "[3-9]": ("toeplitz", "dense")},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure",
    slow_where([*NAMES, *FACTORIES], lambda structure: structure not in ("dense", "diagonal", "pair", "pattern")),
)
@pytest.mark.parametrize("curvature", slow_where(["kfac", "gradient"], lambda curvature: curvature == "gradient"))
def test_every_structure_trains(structure, curvature):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 27), nn.LayerNorm(27), nn.Tanh(), nn.Linear(27, 2))
    x = torch.randn(64, 5)
    y = x[:, :2].sin()
    optimizer = INGD(model, 5e-3, structure=FACTORIES.get(structure, structure), update_every=2, curvature=curvature)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_structures_by_pattern_and_by_size():
    model = nn.ModuleDict({"small": nn.Linear(3, 4), "large": nn.Linear(3, 40), "other": nn.Linear(3, 4)})
    optimizer = INGD(model, structure={"small": ("diagonal", "triangular"), "lar*": "toeplitz"}, max_dim=20)
    rows = {row.name.split(".")[0]: (row.k, row.c) for row in optimizer.summary().rows}
    assert rows == {
        "small": ("Diagonal(4)", "Triangular(4)"),
        "large": ("Toeplitz(4)", "Diagonal(40)"),
        "other": ("Dense(4)", "Dense(4)"),
    }


def test_grouped_convolutions_apart_and_averaged():
    conv = nn.Conv2d(4, 6, 3, groups=2)
    assert INGD(conv).factors("")[0].shape == (2, 19, 19)
    average = INGD(conv, grouped="average", preset="paper", precond_lr=1.0, damping=0.0, update_every=1)
    x = torch.randn(5, 4, 6, 6)
    y = conv(x)
    g = torch.randn_like(y)
    (y * g).sum().backward()
    average.step()
    patches = unfold(x.unflatten(1, (2, 2)).mean(1), 3).mT.flatten(0, 1)
    rows = torch.cat([patches, torch.ones(len(patches), 1)], 1)
    outputs = g.flatten(2).mT.flatten(0, 1)
    mu_aa, mu_gg = rows.T @ rows / len(rows), 5 * outputs.T @ outputs
    wanted = torch.eye(19) - 0.5 * (mu_gg.trace() / 6 * mu_aa - torch.eye(19))
    torch.testing.assert_close(average.factors("")[0], wanted, rtol=1e-4, atol=1e-2)


def test_auto_is_diagonal_on_much_longer_sides():
    """Work and memory grow with the cube and the square of the longer side; small sides are dense."""
    shapes = {(256, 1024): "DG", (8, 4096): "DG", (4096, 8): "GD", (512, 784): "GG", (10, 512): "GG", (700, 200): "GG"}
    for (inputs, outputs), expected in shapes.items():
        optimizer = INGD(nn.Linear(outputs, inputs, bias=False))
        pair = next(iter(optimizer._layers.values())).pair
        kinds = ["G" if isinstance(form, GramFactor) else "D" for form in pair]
        assert "".join(kinds) == expected, (inputs, outputs)


def adapted(width, rank, layers):
    """Low-rank adapters beside frozen layers, without their data."""
    with torch.device("meta"):
        frozen = [nn.Linear(width, width).requires_grad_(False) for _ in range(layers)]
        pairs = [nn.Linear(*sizes, bias=False) for _ in range(layers) for sizes in ((width, rank), (rank, width))]
    return nn.ModuleList([*frozen, *pairs])


@pytest.mark.parametrize(
    ("width", "rank", "layers", "least", "most"),
    [
        (512, 8, 24, 1, 4),  # 48 dense factors of 512 would take 65 times the adapters
        (512, 64, 24, 1, 4),
        (256, 8, 24, 1, 4),
        (512, 8, 2, 60, 70),  # 4 MB in all
    ],
)
def test_small_long_sides_are_dense_while_they_cost_little(width, rank, layers, least, most):
    optimizer = INGD(adapted(width, rank, layers))
    trained = sum(4 * p.numel() for group in optimizer.param_groups for p in group["params"])
    assert least <= optimizer.memory_usage() / trained <= most


USUAL = {
    "an output layer on frozen features": lambda: nn.ModuleList(
        [nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 10)]
    ),
    "few features, a wide hidden layer": lambda: nn.Sequential(nn.Linear(10, 512), nn.ReLU(), nn.Linear(512, 1)),
    "blocks of narrow perceptrons": lambda: nn.ModuleList(
        [nn.Linear(*s) for _ in range(12) for s in ((64, 256), (256, 64))]
    ),
    "an autoencoder": lambda: nn.Sequential(*(nn.Linear(*s) for s in ((640, 160), (160, 30), (30, 160), (160, 640)))),
    "convolutions": lambda: nn.ModuleList([nn.Conv2d(64, 64, 3) for _ in range(40)] + [nn.Linear(64, 10)]),
    "many outputs of one network": lambda: nn.ModuleList(
        [nn.Conv2d(128, 256, 3)] + [nn.Linear(256, 2) for _ in range(30)]
    ),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_networks_are_dense_on_sides_up_to_640(name):
    with torch.device("meta"):
        optimizer = INGD(USUAL[name]())
    small = [row for row in optimizer.summary().rows if row.k and max(row.shape) <= 640]
    sides = [side for row in small for side in (row.k, row.c) if int(side.split("(")[1].rstrip(")")) <= 640]
    assert sides
    assert all(side.startswith("Dense") for side in sides)


def test_long_sides_between_two_layers_are_diagonal():
    """Those of inputs and outputs of the model are not, nor those of adapters, nor queries, keys and values."""
    with torch.device("meta"):
        blocks = [nn.Linear(*s) for s in ((128, 384), (128, 128), (128, 512), (512, 128))]
        model = nn.Sequential(nn.Linear(512, 128), *blocks, nn.Linear(128, 512), nn.Linear(512, 8), nn.Linear(8, 512))
        optimizer = INGD(model)
    found = [[str(form) for form in layer.pair] for layer in optimizer._layers.values()]
    assert found == [
        ["Dense(513)", "Dense(128)"],
        ["Dense(129)", "Dense(384)"],
        ["Dense(129)", "Dense(128)"],
        ["Dense(129)", "Diagonal(512)"],
        ["Diagonal(513)", "Dense(128)"],
        ["Dense(129)", "Diagonal(512)"],
        ["Dense(513)", "Dense(8)"],
        ["Dense(9)", "Dense(512)"],
    ]
