"""Training on several ranks: DistributedDataParallel, sharded factors, fully sharded models."""

import contextlib
import functools
import itertools
import os
import time

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gnomon.optim import INGD, KFAC, exchange, stepping
from gnomon.optim.assignment import Assignment
from support.ranks import on_ranks

STEPS = 8


class Mixed(nn.Module):
    """Linear, convolution, embedding, attention and norm layers, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 12, 3, padding=1)
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.twice = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        h = self.conv(self.embedding(x).mT).mT
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h = self.twice(torch.tanh(self.twice(h)))
        return self.head(h.mean(1))


def batches(steps=STEPS, size=16):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randint(0, 11, (size, 6), generator=generator)
        yield x, x.sum(1) % 5


def model_and(optimizer, **options):
    torch.manual_seed(0)
    model = Mixed()
    return model, lambda wrapped: optimizer(wrapped, update_every=3, growing_intervals=False, **options)


def part(tensor, rank, count):
    return tensor.chunk(count)[rank]


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def train(model, optimizer, rank=0, count=1, accumulate=1, steps=STEPS, sync=False):
    """On this rank's part of each batch, in so many micro-batches."""
    wait = model.no_sync if isinstance(model, DistributedDataParallel) and not sync else contextlib.nullcontext
    for x, y in batches(steps):
        optimizer.zero_grad()
        pieces = list(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True))
        for number, (a, b) in enumerate(pieces):
            with wait() if number < len(pieces) - 1 else contextlib.nullcontext():
                (loss_of(model, part(a, rank, count), part(b, rank, count)) / accumulate).backward()
        optimizer.step()


def outcome(model, optimizer):
    """Weights by name, and the dense factors of each layer that this rank has."""
    weights = {k.removeprefix("module."): v.detach().clone() for k, v in model.state_dict().items()}
    return weights, optimizer.state_dict()["state"]


CASES = {
    **{shard: (INGD, {"shard": shard}, 1) for shard in ("none", "update", "full")},
    **{f"{shard}, accumulated": (INGD, {"shard": shard}, 2) for shard in ("none", "update", "full")},
    **{f"{s}, paper": (INGD, {"shard": s, "preset": "paper", "lr": 1e-3}, 1) for s in ("none", "update", "full")},
    "full, arrow": (INGD, {"shard": "full", "structure": "arrow"}, 1),
    "update, triangular": (INGD, {"shard": "update", "structure": ("triangular", "toeplitz")}, 1),
    "full, kl_clip": (INGD, {"shard": "full", "preset": "paper", "kl_clip": 1e-6, "lr": 1e-2}, 1),
    "full, gradient": (INGD, {"shard": "full", "curvature": "gradient"}, 1),
    "update, low memory": (INGD, {"shard": "update", "memory": "low"}, 1),
    "kfac": (KFAC, {}, 1),
}


def assert_same(found, weights, state, name):
    """Weights, and what is there of the state; KFAC's inverses have more rounding than what they are of."""
    theirs, kept = found
    pairs = [(key, theirs[key], value) for key, value in weights.items()]
    pairs += [(key, value, state[number][key]) for number, entries in kept.items() for key, value in entries.items()]
    for key, value, other in pairs:
        if key.endswith("_inverse"):
            continue
        scale = max(1.0, float(other.abs().max()))  # the speeds of natural steps are large
        torch.testing.assert_close(
            value, other, rtol=1e-6, atol=1e-6 * scale, msg=lambda m, key=key: f"{name}, {key}: {m}"
        )


def _train_cases(rank, count, names):
    found = {}
    for name in names:
        kind, options, accumulate = CASES[name]
        model, build = model_and(kind, **options)
        wrapped = DistributedDataParallel(model)
        optimizer = build(wrapped)
        train(wrapped, optimizer, rank, count, accumulate)
        found[name] = outcome(model, optimizer)
    return found


@functools.cache
def alone(name):
    kind, options, accumulate = CASES[name]
    model, build = model_and(kind, **options)
    optimizer = build(model)
    train(model, optimizer, accumulate=accumulate)
    return outcome(model, optimizer)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_equal_one_process_with_the_whole_batch(count):
    found = on_ranks(count, _train_cases, list(CASES))
    for name in CASES:
        weights, state = alone(name)
        for theirs in (ranks[name] for ranks in found):
            assert_same(theirs, weights, state, name)
            for key, value in theirs[0].items():
                assert torch.equal(value, found[0][name][0][key]), f"{name}: ranks differ in {key}"
        # All that one process keeps is kept somewhere.
        for number, entries in state.items():
            there = set(itertools.chain(*(ranks[name][1].get(number, {}) for ranks in found)))
            assert there == set(entries), name


# ---------------------------------------------------------------------- who does what
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tasks", range(7))
def test_assignment_is_near_the_best_there_is(ranks, tasks):
    for costs in itertools.combinations_with_replacement((0, 1, 2, 3, 5, 8), tasks):
        found = Assignment.balanced(costs, ranks)
        assert len(found.owners) == tasks
        loads = [sum(c for c, owner in zip(costs, found.owners, strict=True) if owner == r) for r in range(ranks)]
        assert list(found.loads) == loads
        assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best_largest_load(costs, ranks) + 1e-9
        assert Assignment.balanced(costs, ranks) == found


def best_largest_load(costs, ranks):
    """By trying all assignments, up to the names of the ranks."""
    reached = {(0,) * ranks}
    for cost in costs:
        reached = {
            tuple(sorted((*loads[:r], loads[r] + cost, *loads[r + 1 :]))) for loads in reached for r in range(ranks)
        }
    return min(max(loads) for loads in reached)


def test_assignment_goes_on_from_loads_and_prefers_low_ranks():
    assert Assignment.balanced([1, 1, 1, 1], 4).owners == (0, 1, 2, 3)
    assert Assignment.balanced([5, 1, 1], 2, loads=[4, 0]) == Assignment((1, 0, 0), (6, 5))
    assert Assignment.balanced([], 3) == Assignment((), (0, 0, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([1], 0), "ranks must be at least 1, got 0"), (([-1], 2), "costs must be at least 0"), (([1], 2, [1]), "loads")],
)
def test_assignment_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Assignment.balanced(*arguments)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="shard must be 'none' or 'update' or 'full', got 'half'"):
        INGD(nn.Linear(2, 2), shard="half")


# ---------------------------------------------------------------------- fully sharded models
def fully_sharded(model, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model.attention, model.twice, model):
        fully_shard(layer, mesh=mesh)


def whole_weights(model):
    state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value.clone() for key, value in state.items()}


SHARDED = ["none", "update", "full", "full, accumulated", "none, paper", "full, arrow", "full, gradient", "kfac"]


def _train_sharded(rank, count):
    stepping.PORTION = 200  # some layers of this small model at a time
    found = {}
    copied = [(name, (2, count // 2)) for name in ("none", "full", "full, kl_clip")]
    for name, shape in [*((name, (count,)) for name in SHARDED), *copied]:
        kind, options, accumulate = CASES[name]
        model, build = model_and(kind, **options)
        fully_sharded(model, shape)
        optimizer = build(model)
        train(model, optimizer, rank, count, accumulate)
        found[name, shape] = whole_weights(model)
    return found


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_sharded_models_equal_one_process():
    for found in on_ranks(4, _train_sharded):
        for (name, shape), weights in found.items():
            assert_same((weights, {}), alone(name)[0], {}, f"{name} {shape}")


# ---------------------------------------------------------------------- ways to train
class Branches(nn.Module):
    """The first rank uses one branch, the others another."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x, rank):
        return self.last(torch.tanh((self.second if rank else self.first)(x)))


def _wrapped_later(rank, count):
    model, build = model_and(INGD, shard="update")
    optimizer = build(model)
    train(DistributedDataParallel(model), optimizer, rank, count)
    return outcome(model, optimizer)


def _synchronized_every_time(rank, count):
    model, build = model_and(INGD)
    wrapped = DistributedDataParallel(model)
    optimizer = build(wrapped)
    train(wrapped, optimizer, rank, count, accumulate=2, sync=True)
    return outcome(model, optimizer)


def _branches_by_rank(rank, count):
    torch.manual_seed(0)
    model = Branches()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = INGD(wrapped, update_every=2, shard="update")
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(part(x, rank, count).float(), rank), part(y, rank, count)).backward()
        optimizer.step()
    return outcome(model, optimizer)


def _dropped_by_the_model(rank, count):
    """Gradients and statistics of a batch that no step used."""
    model, build = model_and(INGD)
    wrapped = DistributedDataParallel(model) if count > 1 else model
    optimizer = build(wrapped)
    for x, y in batches():
        (loss_of(wrapped, part(x, rank, count), part(y, rank, count)) * 100).backward()
        model.zero_grad()
        loss_of(wrapped, part(x, rank, count), part(y, rank, count)).backward()
        optimizer.step()
        model.zero_grad()
    return outcome(model, optimizer)


def _before_another_optimizer(rank, count):
    model, _ = model_and(INGD)
    wrapped = DistributedDataParallel(model) if count > 1 else model
    optimizer, mover = INGD(wrapped, precondition_only=True, shard="full"), torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches():
        mover.zero_grad()
        loss_of(wrapped, part(x, rank, count), part(y, rank, count)).backward()
        optimizer.step()
        mover.step()
    return outcome(model, optimizer)


def _sampled_targets_in_bfloat16(rank, count):
    model, _ = model_and(INGD)
    wrapped = DistributedDataParallel(model)
    optimizer = INGD(wrapped, fisher="mc", precond_dtype=torch.bfloat16, shard="update")
    for x, y in batches():
        optimizer.zero_grad()
        output = wrapped(part(x, rank, count))
        optimizer.observe(output)
        nn.functional.cross_entropy(output, part(y, rank, count)).backward()
        optimizer.step()
    return outcome(model, optimizer)


def _not_finite_at_one(rank, count):
    model, build = model_and(INGD, shard="update")
    wrapped = DistributedDataParallel(model)
    optimizer = build(wrapped)
    train(wrapped, optimizer, rank, count, steps=2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x, y = next(batches(1))
    optimizer.zero_grad()
    (loss_of(wrapped, part(x, rank, count), part(y, rank, count)) * (float("nan") if rank else 1)).backward()
    optimizer.step()
    same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return same, optimizer.skipped_steps, optimizer.skipped_updates


def _sent_early(rank, count):
    """Messages of statistics that have left when the backward pass is at the second layer, with small buckets."""
    exchange.BUCKET, usual = 1, exchange.BUCKET
    model, build = model_and(INGD)
    wrapped = DistributedDataParallel(model)
    optimizer = build(wrapped)
    exchange.BUCKET = usual
    left = []
    model.conv.weight.register_hook(lambda g: left.append(optimizer._sharing.ranks.sent["statistics"]))
    train(wrapped, optimizer, rank, count, steps=1)
    return left[0], optimizer._sharing.ranks.sent["statistics"]


class Heads(nn.Module):
    """Two tasks of one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x, task):
        return (self.second if task else self.first)(torch.tanh(self.trunk(x)))


def _a_pass_for_each_task(rank, count):
    torch.manual_seed(0)
    model = Heads()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if count > 1 else model
    optimizer = INGD(wrapped)
    for x, y in batches():
        optimizer.zero_grad()
        for task in (0, 1):
            output = wrapped(part(x, rank, count).float(), task)
            nn.functional.cross_entropy(output, part(y, rank, count)).backward()
        optimizer.step()
    return outcome(model, optimizer)


def _inside_another(rank, count):
    model, build = model_and(INGD)
    holder = nn.Sequential(DistributedDataParallel(model) if count > 1 else model)
    optimizer = build(holder)
    train(holder, optimizer, rank, count)
    return outcome(model, optimizer)


def _compiled_around(rank, count):
    model, build = model_and(INGD)
    wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    optimizer = build(wrapped)
    train(wrapped, optimizer, rank, count)
    return outcome(model, optimizer)


def _looked_at_by_one(rank, count):
    """A pass of one rank alone, past the wrapper, is none of the others' business."""
    model, build = model_and(INGD)
    wrapped = DistributedDataParallel(model)
    optimizer = build(wrapped)
    for _ in range(2):
        train(wrapped, optimizer, rank, count, steps=STEPS)
        if rank == 0:
            (gradient,) = torch.autograd.grad(model(next(batches(1))[0]).sum(), model.embedding.weight)
            assert gradient.isfinite().all()
    return outcome(model, optimizer)


def _closed(rank, count):
    model, build = model_and(INGD)
    wrapped = DistributedDataParallel(model)
    optimizer = build(wrapped)
    train(wrapped, optimizer, rank, count, steps=4)
    optimizer.close()
    before = [factor.clone() for name in ("twice", "head") for factor in optimizer.factors(name)]
    train(wrapped, optimizer, rank, count, steps=4)
    after = [factor for name in ("twice", "head") for factor in optimizer.factors(name)]
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _a_whole_state_for_shares(rank, count):
    """Of one process, given to a model that is sharded."""
    model, build = model_and(INGD)
    first = build(model)
    train(model, first, steps=4)
    other, build = model_and(INGD)
    other.load_state_dict(model.state_dict())
    fully_sharded(other, (count,))
    second = build(other)
    second.load_state_dict(first.state_dict())
    train(model, first, steps=2)
    train(other, second, rank, count, steps=2)
    return model.state_dict(), whole_weights(other)


def _sharded_in_part(rank, count):
    model, build = model_and(INGD)
    fully_shard(model.twice, mesh=init_device_mesh("cpu", (count,)))
    with pytest.raises(ValueError, match=r"embedding.weight is not sharded while others are"):
        build(model)


def _ways(rank, count):
    ways = (_a_pass_for_each_task, _inside_another, _looked_at_by_one, _closed, _a_whole_state_for_shares)
    ways += (_sharded_in_part, _compiled_around)
    ways += (_wrapped_later, _synchronized_every_time, _branches_by_rank, _dropped_by_the_model)
    ways += (_before_another_optimizer, _sampled_targets_in_bfloat16, _not_finite_at_one, _sent_early)
    return {way.__name__: way(rank, count) for way in ways}


def test_ways_to_train():
    first, second = on_ranks(2, _ways)
    expected = {
        "_wrapped_later": alone("update"),
        "_synchronized_every_time": alone("none, accumulated"),
        "_dropped_by_the_model": _dropped_by_the_model(0, 1),
        "_before_another_optimizer": _before_another_optimizer(0, 1),
        "_a_pass_for_each_task": _a_pass_for_each_task(0, 1),
        "_inside_another": _inside_another(0, 1),
        "_compiled_around": alone("none"),
    }
    for name, (weights, state) in expected.items():
        assert_same(first[name], weights, state, name)
    assert first["_closed"]
    whole, shares = first["_a_whole_state_for_shares"]
    assert_same((shares, {}), whole, {}, "_a_whole_state_for_shares")
    for name in (*expected, "_branches_by_rank", "_sampled_targets_in_bfloat16", "_looked_at_by_one"):
        for key, value in first[name][0].items():
            assert torch.equal(value, second[name][0][key]), f"{name}: ranks differ in {key}"
    assert first["_not_finite_at_one"] == second["_not_finite_at_one"] == (True, 1, 0)
    early, total = first["_sent_early"]
    assert 0 < early < total


# ---------------------------------------------------------------------- checkpoints, and the loss of a rank
def built(rank, count, kind, shard):
    model, build = model_and(INGD, shard=shard)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_sharded(model, (count,))
    return model, build(model)


def _save(rank, count, folder, shards):
    """After five steps; gives the weights after four more."""
    found = {}
    for kind, shard in shards:
        model, optimizer = built(rank, count, kind, shard)
        train(model, optimizer, rank, count, steps=5)
        parts = get_state_dict(model, optimizer)
        checkpoint.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=f"{folder}/{kind}-{shard}")
        train(model, optimizer, rank, count, steps=4)
        found[kind, shard] = whole_weights(model)
    return found


def _load(rank, count, folder, saved, shards):
    found = {}
    for origin, (kind, shard) in itertools.product(saved, shards):
        model, optimizer = built(rank, count, kind, shard)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=f"{folder}/{'-'.join(origin)}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(model, optimizer, rank, count, steps=4)
        found[origin, kind, shard] = whole_weights(model)
    return found


def test_checkpoints_go_on_with_other_numbers_of_ranks_and_modes(tmp_path):
    saved = [("ddp", "none"), ("ddp", "full"), ("fsdp", "update")]
    expected = on_ranks(4, _save, tmp_path, saved)[0]
    for count in (1, 2):
        found = on_ranks(count, _load, tmp_path, saved, [("ddp", "full"), ("ddp", "update"), ("fsdp", "none")])
        for (origin, *there), weights in found[0].items():
            for key, value in weights.items():
                torch.testing.assert_close(
                    value, expected[origin][key], rtol=1e-5, atol=2e-6, msg=f"{origin}, {there}, {key}"
                )


def _lose_a_rank(rank, count, folder):
    model, build = model_and(INGD, shard="update")
    wrapped = DistributedDataParallel(model)
    optimizer = build(wrapped)
    x, y = next(batches(1))
    loss_of(wrapped, part(x, rank, count), part(y, rank, count)).backward()
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
    else:
        message = "no error"
    (folder / "message").write_text(f"{time.monotonic() - start} {message}")
    os._exit(0)


def test_the_loss_of_a_rank_is_told(tmp_path):
    with contextlib.suppress(Exception):
        on_ranks(2, _lose_a_rank, tmp_path, timeout=20)
    seconds, message = (tmp_path / "message").read_text().split(" ", 1)
    assert float(seconds) < 30
    assert "another rank has ended or does not answer" in message
    assert "start again from the last checkpoint" in message
