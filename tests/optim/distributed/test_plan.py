"""Plans for several ranks: what they say is what ranks store, compute and send."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments import plan_rates
from gnomon.experiments.models.gpt import GPT
from gnomon.experiments.plan import forecasts
from gnomon.experiments.plan_rates import Rates
from gnomon.optim import INGD, KFAC, plan
from gnomon.optim.plan import statistics_work
from support.ranks import on_ranks
from support.repository import ROOT

MODES = ("none", "update", "full")
EVERY = {"update_every": 3, "growing_intervals": False}


class Small(nn.Module):
    """Layers of every kind: with rows and without, with parameters that have no factors."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 12, 3, padding=1)
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.hidden = nn.Linear(12, 24, bias=False)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        h = self.norm(self.conv(self.embedding(x).mT).mT)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.tanh(self.hidden(h)).mean(1))


def transformer():
    """12 layers, of which the factors are nearly all of the state."""
    return GPT(width=64, heads=4, layers=12, context=8, vocabulary=32)


def trained_step(model, optimizer, rank):
    """One step on this rank's batch; gives the multiplications of the optimizer's part."""
    x = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops() // 2


# ---------------------------------------------------------------------- against real ranks
CASES = {
    f"{mode}, {name}": {"shard": mode, **settings}
    for mode in MODES
    for name, settings in {
        "dense": {},
        "arrow": {"structure": "arrow"},
        "paper": {"preset": "paper", "lr": 1e-3},
        "low memory": {"memory": "low"},
    }.items()
}


def _measured(rank, count):
    """By case, the bytes sent in a step with an update and in one without, the memory and the plan's figures."""
    found = {}
    for name, settings in CASES.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(Small())
        optimizer = INGD(model, **EVERY, **settings)
        sent = optimizer._sharing.ranks.sent
        trained_step(model, optimizer, rank)
        with_update = dict(sent)
        sent.clear()
        trained_step(model, optimizer, rank)
        found[name] = with_update, dict(sent), optimizer.memory_usage(), plan(optimizer, count)
    return found


@functools.cache
def measured():
    return on_ranks(4, _measured)


@pytest.mark.parametrize("name", CASES)
def test_ranks_send_and_store_what_the_plan_says(name):
    torch.manual_seed(0)
    planned = plan(INGD(Small(), **EVERY, **CASES[name]), 4)
    for rank, found in enumerate(measured()):
        at_update, at_step, memory, there = found[name]
        assert at_update.get("statistics", 0) == planned.statistics > 0
        assert at_update.get("factors", 0) == planned.factors
        assert at_update.get("directions", 0) == at_step.get("directions", 0) == planned.bytes_per_step
        assert set(at_step) <= {"directions", "numbers"}
        assert max(at_update.get("numbers", 0), at_step.get("numbers", 0)) < 32
        # AdamW has a count for each of its parameters.
        assert planned.memory[rank] == pytest.approx(memory, abs=64)
        assert there == planned, "the same plan from an optimizer on several ranks"


def test_what_modes_send():
    none, update, full = (plan(INGD(Small()), 4, mode) for mode in MODES)
    assert none.factors == none.bytes_per_step == update.bytes_per_step == 0
    assert none.sent_per_update == 1.5 * none.bytes_per_update
    assert update.statistics == full.statistics == none.statistics
    assert update.factors > full.factors == 4 * 11  # of the embedding's diagonal
    layered = sum(p.numel() for name, p in Small().named_parameters() if not name.startswith("norm"))
    assert full.bytes_per_step == full.sent_per_step == 4 * layered + 8 * len(full.layers)
    alone = plan(INGD(Small()), 1, "full")
    assert alone.bytes_per_update == alone.bytes_per_step == alone.sent_per_update == 0
    assert alone.memory == none.memory[:1]


def _owners_of_a_layer_that_comes_later(rank, count):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(8)))
    model[3].requires_grad_(False)
    optimizer = INGD(DistributedDataParallel(model), shard="full")
    model[3].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[3].parameters()]})
    return [optimizer._sharing.owner(tracked) for tracked in optimizer._tracked.values()]


def test_ranks_agree_on_the_owner_of_a_layer_that_comes_later():
    """Loads are what owners store, and not what a rank itself stores of another's layer."""
    first, *others = on_ranks(4, _owners_of_a_layer_that_comes_later)
    assert all(found == first for found in others)


def _large(rank, count, mode):
    torch.manual_seed(0)
    model = DistributedDataParallel(transformer())
    optimizer = INGD(model, shard=mode, update_every=2, growing_intervals=False)
    with_update = trained_step(model, optimizer, rank)
    return with_update - trained_step(model, optimizer, rank), optimizer.memory_usage()


def _large_cases(rank, count):
    return {mode: _large(rank, count, mode) for mode in MODES}


def test_shares_of_a_transformer():
    """Four ranks have a third at most of the work, and of the state."""
    found = on_ranks(4, _large_cases)
    work = {mode: max(rank[mode][0] for rank in found) for mode in MODES}
    memory = {mode: max(rank[mode][1] for rank in found) for mode in MODES}
    assert work["update"] <= 0.35 * work["none"]
    assert work["full"] <= 0.35 * work["none"]
    assert memory["full"] <= 0.35 * memory["none"]


# ---------------------------------------------------------------------- plans
def test_a_plan_for_people():
    text = str(plan(INGD(transformer()), 4, "full"))
    assert text.startswith('4 ranks, shard="full"')
    assert "blocks.11.mlp.2" in text
    assert "memory: largest rank" in text


def test_more_ranks_take_less_until_there_is_a_layer_for_each():
    optimizer = INGD(transformer())
    memory = [plan(optimizer, ranks, "full").largest_memory for ranks in (1, 2, 4, 8, 64, 512)]
    assert memory == sorted(memory, reverse=True)
    assert memory[-1] == memory[-2]
    assert plan(optimizer, 4).shard == "none"


def test_bad_requests():
    with pytest.raises(TypeError, match="optimizer must be an INGD, got KFAC"):
        plan(KFAC(Small()), 4)
    for ranks in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"ranks must be an integer of at least 1, got {ranks}"):
            plan(INGD(Small()), ranks)
    with pytest.raises(ValueError, match=r"shard must be .*, got 'some'"):
        plan(INGD(Small()), 4, "some")


def test_work_of_statistics():
    """A symmetric product for each side, of which a half is enough; indices cost nothing."""
    tracked = {t.name: t for t in INGD(nn.Sequential(nn.Embedding(7, 64), nn.Linear(64, 256)))._tracked.values()}
    n = 1000
    linear = n * (65**2 + 256**2)
    assert 0.5 * linear < statistics_work(tracked["1"], n) < 1.1 * linear
    assert 0.5 * n * 64**2 < statistics_work(tracked["0"], n) < 1.1 * n * 64**2


# ---------------------------------------------------------------------- the command
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
        (("--model", "mlp", "--structure", "round"), "structure must be one of dense, "),
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


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_fits_a_terminal(columns):
    text = command("--model", "gpt-1.3b", "--ranks", 512, *RATES, columns=columns).output
    assert max(map(len, text.splitlines())) <= columns
    assert "..." not in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert ("mean" in text.split("state:")[0]) == (columns > 80)


# ---------------------------------------------------------------------- the page
@pytest.mark.parametrize("rates", [RATES, ("--flops", 0.08, "--bandwidth", 0.5)])
def test_the_tables_of_the_page_are_what_the_command_gives(rates):
    page = (ROOT / "docs" / "distributed.md").read_text()
    for name in ("resnet-50", "vit-b", "gpt-1.3b"):
        ranks = [part for count in (8, 64, 512) for part in ("--ranks", count)]
        printed = command("--model", name, *ranks, *rates, "--markdown").output
        table = printed.split("\n\n")[0]
        assert table in page, f"in docs/distributed.md the table of {name} should be:\n{table}"
