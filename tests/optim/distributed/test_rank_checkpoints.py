"""Checkpoints on several ranks, and the loss of a rank."""

import contextlib
import itertools
import os
import time

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from gnomon.optim import INGD
from support.mixed import batches, fully_sharded, loss_of, model_and, part, train, whole_weights
from support.ranks import on_ranks


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


@pytest.mark.spawns
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


@pytest.mark.spawns
def test_the_loss_of_a_rank_is_told(tmp_path):
    with contextlib.suppress(Exception):
        on_ranks(2, _lose_a_rank, tmp_path, timeout=20)
    seconds, message = (tmp_path / "message").read_text().split(" ", 1)
    assert float(seconds) < 30
    assert "another rank has ended or does not answer" in message
    assert "start again from the last checkpoint" in message
