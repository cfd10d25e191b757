"""The command that prints plans, the rates it measures and the tables of the documentation."""

import pytest
from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments.plan import rates as plan_rates
from gnomon.experiments.plan.forecast import forecasts
from gnomon.experiments.plan.rates import Rates
from support.repository import ROOT

MODES = ("none", "update", "full")
RATES = ("--flops", 100, "--bandwidth", 25)


def command(*arguments, columns=200):
    settings = {"COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner().invoke(main, ["plan", *map(str, arguments)], env=settings)


def test_a_table_of_all_modes():
    result = command("--model", "gpt", "--ranks", 8, *RATES)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["8"]] == list(MODES)
    assert "100 TFLOP/s (given), 25 GB/s (given)" in " ".join(result.output.split())
    assert "8 sequences a rank" in result.output


@pytest.mark.slow
def test_options_reach_the_plan():
    small = command("--model", "cnn", "--ranks", 2, "--ranks", 4, "--shard", "full", "--batch", 3, *RATES)
    assert [line.split()[:2] for line in small.output.splitlines() if " full " in line] == [
        ["2", "full"],
        ["4", "full"],
    ]
    assert "3 images a rank" in small.output
    options = [
        (),
        ("--structure", "diagonal"),
        ("--max-dim", 64),
        ("--memory", "low"),
        ("--precond-dtype", "bfloat16"),
        ("--update-every", 1),
    ]
    one = ("--model", "cnn", "--ranks", 2, "--shard", "none", "--markdown", *RATES)
    found = {option: command(*one, *option).output for option in options}
    assert len(set(found.values())) == len(found)
    assert all(text.startswith("| ranks | shard |") for text in found.values())


def test_rates_are_measured_where_they_are_not_given(monkeypatch):
    monkeypatch.setattr(plan_rates, "multiplication_rate", lambda: 3e10)
    monkeypatch.setattr(plan_rates, "gloo_bandwidth", lambda: 4e9)
    text = " ".join(command("--model", "mlp", "--ranks", 2).output.split())
    assert "0.03 TFLOP/s (measured: products" in text
    assert "4 GB/s (measured: all_reduce by gloo" in text


@pytest.mark.spawns
def test_the_bandwidth_of_two_processes():
    assert plan_rates.gloo_bandwidth(size=2**16, repeat=1) > 1e4


def test_times_add_up():
    rates = Rates(flops=2e12, bandwidth=1e9, note="")
    (often,) = forecasts("gpt", [4], ["update"], rates, update_every=1)
    (seldom,) = forecasts("gpt", [4], ["update"], rates, update_every=10)
    assert often.times.update == pytest.approx(often.plan.largest_update / 1e12)
    assert often.times.directions == pytest.approx(sum(layer.step for layer in often.plan.layers) / 1e12)
    assert often.times.messages == pytest.approx(10 * seldom.times.messages)
    assert often.times.passes == seldom.times.passes > 0
    assert often.times.step > seldom.times.step


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "resnet50"), "Error: unknown model 'resnet50'; did you mean resnet-50"),
        (("--model", "mlp", "--structure", "round"), "structure must be one of auto, dense, "),
        (("--model", "mlp", "--flops", "0"), "Invalid value for '--flops': 0.0 is not a rate"),
        (("--model", "mlp", "--ranks", "0"), "Invalid value for '--ranks'"),
    ],
)
def test_bad_options(arguments, words):
    result = command("--ranks", 2, *RATES, *arguments)
    assert result.exit_code not in (0, None)
    assert words in result.output


def test_help_fits_a_terminal():
    text = command("--help", columns=80).output
    assert max(map(len, text.splitlines())) <= 80
    assert "Show this message and exit." in text


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_fits_a_terminal(columns):
    text = command("--model", "gpt-1.3b", "--ranks", 512, *RATES, columns=columns).output
    assert max(map(len, text.splitlines())) <= columns
    assert "..." not in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert ("mean" in text.split("state:")[0]) == (columns > 80)


@pytest.mark.slow
def test_the_tables_of_the_page_are_what_the_command_gives():
    page = (ROOT / "docs" / "distributed.md").read_text()
    for name in ("resnet-50", "vit-b", "gpt-1.3b"):
        ranks = [part for count in (8, 64, 512) for part in ("--ranks", count)]
        printed = command("--model", name, *ranks, *RATES, "--markdown").output
        table = printed.split("\n\n")[0]
        assert table in page, f"in docs/distributed.md the table of {name} should be:\n{table}"
