"""DistributedDataParallel around a model, on one rank and on two."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from support.perceptron import batches, close, perceptron, train


def test_data_parallel_wrapper(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        data = batches(8)
        model, twin = perceptron(), perceptron()
        train(model, INGD(model), data)
        wrapped = nn.parallel.DistributedDataParallel(twin)
        train(wrapped, INGD(wrapped), data)
        close(model, twin)
    finally:
        torch.distributed.destroy_process_group()


def _replica(rank, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = perceptron(torch.float64)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = INGD(wrapped, update_every=3, subsample=False)
    train(wrapped, optimizer, [x.chunk(2)[rank] for x in batches(8, torch.float64)])
    torch.save(model.state_dict(), f"{store}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.spawns
def test_two_ranks_equal_one_with_the_whole_batch(tmp_path):
    torch.multiprocessing.spawn(_replica, (str(tmp_path / "store"),), nprocs=2)
    model = perceptron(torch.float64)
    train(model, INGD(model, update_every=3, subsample=False), batches(8, torch.float64))
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"store.{rank}").items():
            torch.testing.assert_close(value, model.state_dict()[name])
