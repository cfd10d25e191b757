"""gnomon reproduce by the paper's names of its figures and tables."""

import pytest
from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments.commands.reproduce import PAPER_NAMES

pytest.importorskip("optuna", reason="gnomon reproduce needs optuna (extra 'experiments')")
pytest.importorskip("matplotlib", reason="gnomon reproduce needs matplotlib (extra 'experiments')")

FIGURES = {
    "fig-a": ["metric-nearness"],
    "fig-b": ["log-det"],
    "fig-c": ["gmm"],
    "fig-d": ["rosenbrock"],
    "fig-3": ["metric-nearness", "log-det", "gmm", "rosenbrock"],
    "all": ["metric-nearness", "log-det", "gmm", "rosenbrock"],
}
TABLES = {
    "table-1": ["cifar100", "tiny-imagenet"],
    "table-2": ["imagenet-100"],
    "table-3": ["cifar100", "tiny-imagenet"],
    "table-4": ["imagenet-100"],
    "fig-4": ["imagenet-100"],
    "fig-5": ["cifar100", "tiny-imagenet"],
}


def ran(monkeypatch, where, *arguments):
    """The names that a command passes to the function at ``where``, which does nothing."""
    seen = []
    monkeypatch.setattr(where, lambda name, *_, **__: seen.append(name))
    result = CliRunner().invoke(main, ["reproduce", *arguments])
    assert result.exit_code == 0, result.output
    return seen


def test_no_name_is_missing_here():
    assert {*FIGURES, *TABLES} == {*PAPER_NAMES, "all"}


@pytest.mark.parametrize("name", FIGURES)
def test_figures(monkeypatch, name):
    assert ran(monkeypatch, "gnomon.experiments.figures.reproduce.reproduce", name) == FIGURES[name]


@pytest.mark.parametrize("name", TABLES)
def test_tables(monkeypatch, name):
    monkeypatch.setattr("gnomon.experiments.data.load", lambda *_, **__: None)
    assert ran(monkeypatch, "gnomon.experiments.tables.reproduce.reproduce_table", name) == TABLES[name]


def test_missing_data_of_the_second_table_stops_before_the_first(monkeypatch, tmp_path):
    from gnomon.experiments.data import DataError

    def load(name, *_, **__):
        if name == "tiny-imagenet":
            raise DataError("TinyImageNet is not there")

    started = []
    monkeypatch.setattr("gnomon.experiments.data.load", load)
    monkeypatch.setattr(
        "gnomon.experiments.tables.reproduce.reproduce_table", lambda name, *_, **__: started.append(name)
    )
    result = CliRunner().invoke(main, ["reproduce", "table-1", "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "TinyImageNet is not there" in result.output
    assert not started


def test_an_unknown_name_shows_the_known_ones():
    result = CliRunner().invoke(main, ["reproduce", "table-9"])
    assert result.exit_code == 2
    assert "table-9" in result.output
    assert all(name in result.output for name in ("metric-nearness", "gpt", "fig-a", "table-1"))
