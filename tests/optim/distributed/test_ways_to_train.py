"""Ways to train on several ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gnomon.optim import INGD
from gnomon.optim.distributed import statistics_exchange
from support.mixed import (
    STEPS,
    alone,
    assert_same,
    batches,
    fully_sharded,
    loss_of,
    model_and,
    outcome,
    part,
    train,
    whole_weights,
)
from support.ranks import on_ranks


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
    """Bytes of statistics that have left when a backward pass is at the second layer, with small buckets.

    The first ones wait until ranks agree on units; the fourth step is the next with an update.
    """
    statistics_exchange.BUCKET, usual = 1, statistics_exchange.BUCKET
    model, build = model_and(INGD)
    wrapped = DistributedDataParallel(model)
    optimizer = build(wrapped)
    statistics_exchange.BUCKET = usual
    left, sent = [], optimizer._strategy.ranks.sent
    model.conv.weight.register_hook(lambda g: left.append(sent["statistics"]))
    train(wrapped, optimizer, rank, count, steps=4)
    return left, sent["statistics"]


class Heads(nn.Module):
    """Two tasks of one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x, task):
        return (self.second if task else self.first)(torch.tanh(self.trunk(x)))


def _a_pass_for_each_task(rank, count):
    torch.manual_seed(0)
    model = Heads().double()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if count > 1 else model
    optimizer = INGD(wrapped)
    for x, y in batches():
        optimizer.zero_grad()
        for task in (0, 1):
            output = wrapped(part(x, rank, count).double(), task)
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


@pytest.mark.spawns
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
    left, total = first["_sent_early"]
    assert left[:3] == [0, total // 2, total // 2]
    assert total // 2 < left[3] < total
