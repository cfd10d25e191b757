"""The summary of layers, their memory and their work."""

import re

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.structures import NAMES
from gnomon.optim.kronecker.summary import Row, collapsed, ranges, short_name
from support.perceptron import batches, perceptron, train


def test_the_summary_says_it_before_training(capsys):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6))
    summary = INGD(model).summary()
    rows = summary.rows
    assert capsys.readouterr().out == ""  # who wants to see it prints it
    text = str(summary)
    for part in ("0.weight", "10 x 4", "Diagonal(10)", "2 of Dense(7)", "adamw", "total"):
        assert part in text
    dense = next(row for row in rows if row.name.startswith("1."))
    # An update of K K^T takes a product, for each of two groups; and C C^T likewise.
    assert dense.update >= 2 * (7**3 + 3**3)
    assert dense.step >= 2 * 3 * 7 * (7 + 3)
    paper = next(row for row in INGD(model, preset="paper").summary().rows if row.name.startswith("1."))
    assert paper.update >= 2 * 3 * (7**3 + 3**3)  # K^T K, the move and K K^T


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)


def blocks(count=12):
    model = nn.Module()
    model.blocks, model.head = nn.ModuleList(Block() for _ in range(count)), nn.Linear(4, 4)
    return model


def lines_of(optimizer):
    return [re.split(r"\s{2,}", line.strip()) for line in str(optimizer.summary()).splitlines()]


def test_equal_layers_are_one_line():
    optimizer = INGD(blocks())
    header, _, *lines = lines_of(optimizer)
    assert header == ["parameter", "shape", "treatment", "K", "C", "state (B)", "update (mul)", "step (mul)"]
    names = [line[0] for line in lines[:5]]
    assert names == ["blocks.0-11.first.weight + bias", "blocks.0-11.second.weight + bias", "head.weight + bias",
                     "blocks.0-11.norm.weight", "blocks.0-11.norm.bias"]  # fmt: skip
    assert lines[0][1] == "12 x (8 x 4)"
    rows = optimizer.summary().rows
    assert len(rows) == 12 * 4 + 1
    first = [row for row in rows if ".first." in row.name]
    assert lines[0][5] == f"{sum(row.bytes for row in first) / 1000:.3g} k"


def test_layers_with_settings_of_their_own_are_not_among_them():
    optimizer = INGD(blocks(), structure={"blocks.5.first": "diagonal", "*": "dense"})
    names = [line[0] for line in lines_of(optimizer)]
    assert {"blocks.0-4,6-11.first.weight + bias", "blocks.5.first.weight + bias"} <= set(names)


def test_frozen_parameters_are_one_line():
    model = blocks(3)
    model.blocks.requires_grad_(False)
    lines = lines_of(INGD(model))
    assert next(line[:3] for line in lines if "frozen" in line) == ["18 parameters", "252 numbers", "frozen"]
    model.blocks.requires_grad_(True)
    model.head.bias.requires_grad_(False)
    assert next(line[:3] for line in lines_of(INGD(model)) if "frozen" in line) == ["head.bias", "4", "frozen"]


def test_totals():
    model = nn.Sequential(nn.Linear(9, 10), nn.LayerNorm(10), nn.Linear(10, 5).requires_grad_(False))
    summary = INGD(model).summary()
    assert summary.share == pytest.approx(100 / 120)
    assert summary.multiple == pytest.approx(summary.bytes / (4 * 120))
    text = str(summary)
    assert "83.3% of 120 trained numbers belong to layers with factors" in text
    assert f"{summary.bytes / 1e6:.3g} MB, {summary.multiple:.3g} times the trained parameters" in text


def test_in_a_notebook():
    """A table and no list of rows; in a terminal the text."""
    model = nn.ModuleDict({"a<b": nn.Linear(3, 2), "c": nn.Linear(2, 2)})
    summary = INGD(model).summary()
    page = summary._repr_html_()
    assert page.startswith("<table>")
    assert "a&lt;b.weight + bias" in page
    assert page.count("<tr>") == 4
    assert repr(summary) == str(summary)
    assert "Row(" not in repr(summary)


def test_numbers_in_names():
    def named(*names):
        rows = [Row(name, (2, 2), "INGD") for name in names]
        return [name for name, _ in collapsed(rows)]

    grid = [f"a.{i}.b.{j}.weight + a.{i}.b.{j}.bias" for i in range(3) for j in range(2)]
    assert named(*grid) == ["a.0-2.b.0-1.weight + bias"]
    uneven = named(*grid, "a.3.b.0.weight + a.3.b.0.bias")
    assert uneven == ["a.0-3.b.0.weight + bias", "a.0-2.b.1.weight + bias"]
    assert named("weight", "w1", "w2") == ["weight", "w1", "w2"]
    assert named("0.weight", "2.weight", "2.bias") == ["0,2.weight", "2.bias"]
    assert [*map(short_name, ("a.weight + a.bias", "a.weight + b.bias"))] == ["a.weight + bias", "a.weight + b.bias"]
    assert ranges([7, 0, 1, 2, 3, 9]) == "0-3,7,9"


# ---------------------------------------------------------------------- memory
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *[(INGD, {"structure": name}) for name in NAMES],
        (INGD, {"memory": "low"}),
        (INGD, {"preset": "paper"}),
        (INGD, {"precond_dtype": torch.bfloat16}),
        (INGD, {"precondition_only": True}),
        (INGD, {"fallback": "sgd", "curvature": "gradient"}),
        (KFAC, {}),
        (KFAC, {"preset": "paper"}),
    ],
)
def test_memory_is_known_before_the_first_step(kind, settings):
    model = perceptron()
    optimizer = kind(model, growing_intervals=False, **settings)
    expected = optimizer.memory_usage()
    train(model, optimizer, batches(2))
    counts = 2 * 4  # AdamW's two counts of steps
    assert optimizer.memory_usage() == pytest.approx(expected, abs=counts)


def test_memory_beside_what_others_put_into_the_state():
    model = perceptron()
    optimizer = INGD(model)
    optimizer.state["seen"] = 3
    before = optimizer.memory_usage()
    train(model, optimizer, batches(1))
    known = optimizer.memory_usage()
    optimizer.state[model[0].weight]["marker"] = "a plain value"
    assert optimizer.memory_usage() == known >= before > 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["seen"] == 3
    assert optimizer.state[model[0].weight]["marker"] == "a plain value"
    train(model, optimizer, batches(1))


def test_the_work_of_polar_factors_is_counted():
    """A square matrix takes three iterations of three products, two of which are symmetric. Halves take fewer."""

    def products(rows):
        steps = []
        for polar in (False, True):
            model = nn.Linear(128, 128, bias=False)
            optimizer = INGD(model, polar=polar)
            model(torch.randn(rows, 128)).square().mean().backward()
            optimizer.step()
            steps.append(optimizer.summary().rows[0].step)
        return (steps[1] - steps[0]) / 128**3

    assert products(100) == 0
    assert 3 * (0.5 + 0.25 + 0.25) <= products(1000) <= 3 * (0.5 + 0.5 + 0.25)
    assert 3 * (1 + 2 * 0.5) <= products(2048) <= 3 * 3
