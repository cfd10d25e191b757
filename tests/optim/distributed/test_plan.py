"""Plans for several ranks: what they say is what ranks store, compute and send."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from gnomon.experiments.models.gpt import GPT
from gnomon.optim import INGD, KFAC, plan
from gnomon.optim.distributed.plan import statistics_work
from support.ranks import on_ranks

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
    """By case, the bytes sent in the first steps, of which two have an update, the memory and the plan's figures."""
    found = {}
    for name, settings in CASES.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(Small())
        optimizer = INGD(model, **EVERY, **settings)
        sent, steps = optimizer._strategy.ranks.sent, []
        for _ in range(EVERY["update_every"] + 1):
            sent.clear()
            trained_step(model, optimizer, rank)
            steps.append(dict(sent))
        found[name] = steps, optimizer.memory_usage(), plan(optimizer, count)
    return found


@functools.cache
def measured():
    return on_ranks(4, _measured)


@pytest.mark.spawns
@pytest.mark.parametrize("name", CASES)
def test_ranks_send_and_store_what_the_plan_says(name):
    torch.manual_seed(0)
    planned = plan(INGD(Small(), **EVERY, **CASES[name]), 4)
    # At the first update ranks agree on a unit for the inputs and one for the output gradients of each layer with rows,
    # and add up the number of rows.
    agreed = (2 * 4 + 8) * sum(layer.statistics > 0 for layer in planned.layers)
    for rank, found in enumerate(measured()):
        (first, *others, last), memory, there = found[name]
        for at_update in (first, last):
            assert at_update.get("statistics", 0) == planned.statistics > 0
            assert at_update.get("factors", 0) == planned.factors
        for step in (first, *others, last):
            assert step.get("directions", 0) == planned.bytes_per_step
        for step in others:
            assert set(step) <= {"directions", "numbers"}
        assert first["numbers"] - last["numbers"] == agreed
        assert max(step.get("numbers", 0) for step in (*others, last)) < 32
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
    return [optimizer._strategy.owner(layer) for layer in optimizer._layers.values()]


@pytest.mark.spawns
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


@pytest.mark.spawns
def test_shares_of_a_transformer():
    """Four ranks have a third at most of the work, and of the state."""
    found = on_ranks(4, _large_cases)
    work = {mode: max(rank[mode][0] for rank in found) for mode in MODES}
    memory = {mode: max(rank[mode][1] for rank in found) for mode in MODES}
    assert work["update"] <= 0.35 * work["none"]
    assert work["full"] <= 0.35 * work["none"]
    assert memory["full"] <= 0.35 * memory["none"]


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
    tracked = {t.name: t for t in INGD(nn.Sequential(nn.Embedding(7, 64), nn.Linear(64, 256)))._layers.values()}
    n = 1000
    linear = n * (65**2 + 256**2)
    assert 0.5 * linear < statistics_work(tracked["1"], n) < 1.1 * linear
    assert 0.5 * n * 64**2 < statistics_work(tracked["0"], n) < 1.1 * n * 64**2
