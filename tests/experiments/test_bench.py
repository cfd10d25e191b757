"""The timing of training steps: its command, its measures and its limit."""

import json

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments.bench import limit as bench_limit
from gnomon.experiments.bench import measure as bench_measure
from gnomon.experiments.bench import optimizers
from gnomon.experiments.bench import run as bench
from gnomon.experiments.bench.limit import multiplications
from gnomon.experiments.bench.models import MODELS, Model
from gnomon.experiments.bench.optimizers import Contestant
from gnomon.experiments.commands.bench import BenchModel
from gnomon.experiments.common.layer_sizes import Sizes


def command(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def tiny(monkeypatch):
    """A model that takes no time, in the place of the MLP."""
    model = Model("mlp", "a tiny model", lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (8, 4), 2)
    monkeypatch.setitem(MODELS, "mlp", model)
    return model


def run(output, patterns, **options):
    options = {"rounds": 2, "with_limit": False, "output": output, **options}
    return bench.bench(["mlp"], patterns, console=Console(quiet=True), **options)[0]


@pytest.mark.slow
def test_files_and_figures(tiny, tmp_path):
    report = run(tmp_path / "new", ["AdamW", "INGD dense T=*", "INGD diag*"], with_limit=True)
    names = ["gradient only", "SGD", "AdamW", "INGD dense T=1", "INGD dense T=10", "INGD diagonal T=10"]
    assert [row["name"] for row in report.page.measured] == names
    rows = {
        row["name"]: row
        for row in json.loads((tmp_path / "new" / "results.json").read_text())["models"]["mlp"]["measured"]
    }
    assert rows["SGD"]["multiple"] == 1
    assert rows["SGD"]["state bytes"] == 4 * 23  # a number for each parameter
    assert rows["INGD dense T=1"]["work over limit"] > 1
    assert rows["INGD diagonal T=10"]["limit"] is None
    assert rows["INGD diagonal T=10"]["state bytes"] < rows["INGD dense T=10"]["state bytes"]
    table = (tmp_path / "new" / "table.md").read_text()
    assert all(name in table for name in names)
    assert "work / limit" in table
    assert (tmp_path / "new" / "mlp.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_that_fails_is_reported_and_the_others_go_on(tiny, tmp_path, monkeypatch):
    def broken(model):
        raise RuntimeError("no such layer\nand more")

    class Diverging(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.fill_(float("nan"))

    added = [
        Contestant("broken", broken, "torch"),
        Contestant("missing", broken, "no_such_package"),
        Contestant("diverging", lambda model: Diverging(model.parameters()), "torch"),
        Contestant("fine", optimizers.UNIT.build, "torch"),
    ]
    monkeypatch.setattr(bench, "contestants", lambda model: added)
    report = run(tmp_path, [])
    assert [row["name"] for row in report.page.measured] == ["gradient only", "SGD", "fine"]
    assert report.page.failures["broken"] == "RuntimeError: no such layer"
    assert report.page.failures["missing"] == "no_such_package is not installed"
    assert "the loss became nan" in report.page.failures["diverging"]
    assert "no such layer" in (tmp_path / "table.md").read_text()


def test_slow_ones_have_fewer_rounds(tiny, monkeypatch):
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            torch.randn(300, 300) @ torch.randn(300, 300)

    monkeypatch.setattr(bench_measure, "SLOW", 2)
    figures = bench_measure.measure(tiny, [Contestant("slow", lambda m: Slow(m.parameters()), "torch", steps=2)], 4)
    assert {f.name: len(f.seconds) for f in figures} == {"gradient only": 4, "SGD": 4, "slow": 2}


def test_command_line(tiny, tmp_path):
    result = command("mlp", "--only", "SGD", "--rounds", "2", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "gradient only" in result.output
    assert {file.name for file in tmp_path.iterdir()} == {"results.json", "table.md", "mlp.png"}


def test_bad_input_is_named_with_its_remedy(tmp_path):
    result = command("mlp", "--only", "Adma*")
    assert result.exit_code == 2
    assert all(word in result.output for word in ("--only", "Adma*", "--list"))
    result = command("resnet")
    assert result.exit_code == 2
    assert all(word in result.output for word in ("MODEL", "resnet", "transformer"))
    (tmp_path / "file").touch()
    result = command("mlp", "--output", str(tmp_path / "file"))
    assert result.exit_code == 1
    assert "choose another folder" in result.output


def test_the_list_names_what_takes_part(monkeypatch):
    assert [model.value for model in BenchModel] == list(MODELS)
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None if name == "singd" else object())
    listing = bench.listing(list(MODELS), [])
    assert "singd dense T=10 (singd is not installed)" in listing
    for name in MODELS:
        assert f"{name}: {MODELS[name].title}" in listing
    of_cnn = [c.name for c in optimizers.contestants(MODELS["cnn"])]
    assert {"INGD dense expand T=1", "INGD dense reduce T=10", "INGD toeplitz T=10", "KFAC T=1"} <= set(of_cnn)
    assert len(set(of_cnn)) == len(of_cnn)


def test_the_models_are_those_that_are_documented():
    sizes = {name: sum(p.numel() for p in model.build().parameters()) for name, model in MODELS.items()}
    assert sizes == {"mlp": 669_706, "cnn": 373_386, "convmixer": 309_514, "transformer": 1_727_744}


def test_multiplications_by_hand():
    # p = 3, d = 2, n = 5. Statistics: min(2*5*9 + 27, 5*9 + 2*27) = 99 and min(2*5*4 + 8, 5*4 + 2*8) = 36;
    # the move 27 + 8 = 35, products as many; a step 2*3*5 = 30 with them, 60 without.
    layer = Sizes(p=3, d=2, rows=5)
    assert multiplications(layer, order=1, interval=10) == pytest.approx((99 + 36 + 35 + 35) / 10 + 30)
    assert multiplications(layer, order=1, interval=1) == pytest.approx(99 + 36 + 35 + min(35 + 30, 60))
    # To second order by squares: min(2*5*9 + 2*25*3 + 27, 5*9 + 4*27) = 153, min(2*5*4 + 2*25*2 + 8, 5*4 + 4*8) = 52.
    assert multiplications(layer, order=2, interval=10) == pytest.approx((153 + 52) / 10 + 30)
    # With one row: statistics min(18 + 27, 9 + 54) = 45 and min(8 + 8, 4 + 16) = 16, a step by the row 9 + 4 + 6 = 19
    # with products, 2*9 + 2*4 + 6 = 32 without.
    single = Sizes(p=3, d=2, rows=1, samples=1)
    assert multiplications(single, order=1, interval=10) == pytest.approx((45 + 16 + 35) / 10 + min(3.5 + 19, 32))
    assert multiplications(single, order=1, interval=1) == pytest.approx(45 + 16 + 35 + min(35 + 19, 32))
    assert multiplications(single, order=2, interval=1) == pytest.approx((18 + 6 + 27) + (8 + 4 + 8) + 19)
    # Indices have a diagonal factor; blocks count each.
    embedding = Sizes(p=3, d=2, rows=5, blocks=4, one_hot=True)
    assert multiplications(embedding, order=2, interval=1) == 4 * (52 + 2 * 3 * 2)


def test_rows_of_layers():
    convolution = Model(
        "conv", "", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)), (6, 2, 4, 4), 2
    )
    linear = Sizes(p=13, d=2, rows=6, samples=6)
    for approx, rows in (("auto", 6), ("reduce", 6), ("expand", 24)):
        assert bench_limit.layer_sizes(convolution, approx, subsample=False) == [linear, Sizes(p=19, d=3, rows=rows)]


def test_the_memory_tracker_against_known_allocations():
    old = torch.zeros(1000)
    with bench_measure.MemoryTracker() as tracker:
        a = torch.ones(100)
        view = a.view(10, 10)
        assert (tracker.now, tracker.peak) == (400, 400)
        b = a + 1
        del a, view
        assert (tracker.now, tracker.peak) == (400, 800)
        begin = tracker.restart()
        old = old * 2  # the old one is freed when the new one is there
        assert (tracker.now - begin, tracker.peak - begin) == (0, 4000)
        b.add_(1)
        assert tracker.now == begin
    del b, old
    assert tracker.now == begin  # nothing is followed any more


def test_the_state_of_optimizers_is_found_where_it_is():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert bench_measure.state_bytes(optimizer) == 0
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert bench_measure.state_bytes(optimizer) == 4 * 8

    class Matrix:
        def __init__(self, values):
            self.values = values

    values = torch.ones(5)
    optimizer.state_dict = lambda: {"nested": [Matrix(values), (values[:2],)]}  # one storage
    assert bench_measure.state_bytes(optimizer) == 20
    optimizer.memory_usage = lambda: 50
    assert bench_measure.state_bytes(optimizer) == 50
