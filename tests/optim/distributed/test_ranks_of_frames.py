"""Points that are trained on several ranks."""

import os

import pytest
import torch
from torch import optim

import gnomon
from gnomon import groups as g
from support.framed import Model, generator


def _distributed_worker(rank, world_size, path, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)

    class Wrapped(Model):
        forward = Model.loss

    model = torch.nn.parallel.DistributedDataParallel(Wrapped())
    optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    for step in range(3):
        x = torch.randn(8, 4, generator=generator(step))[rank::world_size]
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    results[rank] = {k: v.clone() for k, v in model.module.state_dict().items()}
    torch.distributed.destroy_process_group()


@pytest.mark.spawns
def test_data_parallel_ranks_stay_together(tmp_path):
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_distributed_worker, (2, str(tmp_path / "store"), results), nprocs=2)
        first, second = results[0], results[1]
    torch.manual_seed(0)
    alone = Model()
    optimizer = gnomon.moving_frame(optim.SGD(alone.parameters(), lr=0.02, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        alone.loss(torch.randn(8, 4, generator=generator(step))).backward()
        optimizer.step()
    for key, value in alone.state_dict().items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-5)


class _Likelihood(torch.nn.Module):
    """A point beside an ordinary layer; the frames are compared as they are computed, not as they are sent."""

    def __init__(self, point):
        super().__init__()
        self.point, self.features = point, torch.nn.Linear(5, 5)

    def forward(self, x):
        z = x + 0.1 * self.features(x)
        if isinstance(self.point, gnomon.Gaussian):
            return -self.point.log_prob(z).mean()
        return self.point.inv_quad(z).mean() + self.point.logdet()


POINTS_OF_RANKS = {
    "dense": lambda: gnomon.SPD(5),
    "triangular": lambda: gnomon.SPD(g.Triangular(5)),
    "arrow": lambda: gnomon.SPD(g.Arrow(5, rank=2)),
    "Gaussian": lambda: gnomon.Gaussian(5),
    "Gaussian, triangular precision": lambda: gnomon.Gaussian(g.Triangular(5), form="precision"),
}
OPTIMIZERS_OF_RANKS = {
    "SGD": lambda p: gnomon.moving_frame(optim.SGD(p, lr=0.05, momentum=0.9)),
    "SGD, max_step": lambda p: gnomon.moving_frame(optim.SGD(p, lr=0.5, momentum=0.9), max_step=0.1),
    "Adam": lambda p: gnomon.moving_frame(optim.Adam(p, lr=0.05)),
    "torch's LBFGS": lambda p: gnomon.moving_frame(
        optim.LBFGS(p, max_iter=1, max_eval=5, line_search_fn="strong_wolfe")
    ),
    "LBFGS": lambda p: gnomon.optim.LBFGS(p, max_eval=5),
}
LINE_SEARCHES = {"torch's LBFGS": ("dense", "arrow"), "LBFGS": ("triangular", "Gaussian")}
"""Which evaluate the loss several times a step, and the points that are enough to see it."""


def _numbers(value):
    """All tensors of a state, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)


def _ranks_worker(rank, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    torch.set_num_threads(1)
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    for ranks in (pairs[rank // 2], torch.distributed.group.WORLD):
        for optimizer in OPTIMIZERS_OF_RANKS:
            for point in LINE_SEARCHES.get(optimizer, POINTS_OF_RANKS):
                _check_that_ranks_agree(rank, ranks, point, optimizer)
    torch.distributed.destroy_process_group()


def _check_that_ranks_agree(rank, ranks, name, rule):
    torch.manual_seed(rank)  # the first rank's weights are everybody's
    model = torch.nn.parallel.DistributedDataParallel(
        _Likelihood(POINTS_OF_RANKS[name]()), process_group=ranks, broadcast_buffers=False
    )
    optimizer = OPTIMIZERS_OF_RANKS[rule](model.parameters())
    for step in range(25):
        x = (1 + rank) * torch.randn(6, 5, generator=generator(100 * rank + step % 5))

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            mean = loss.detach() / ranks.size()  # line searches decide by it, so it must be the same everywhere
            torch.distributed.all_reduce(mean, group=ranks)
            return mean

        optimizer.step(closure)
    own = torch.cat(
        [t.detach().double().flatten() for t in _numbers([model.module.state_dict(), optimizer.state_dict()["state"]])]
    )
    gathered = [torch.empty_like(own) for _ in range(ranks.size())]
    torch.distributed.all_gather(gathered, own, group=ranks)
    assert own.isfinite().all(), (name, rule)
    assert all(torch.equal(own, other) for other in gathered), (name, rule, ranks.size())
    point = model.module.point
    matrix = point.covariance() if isinstance(point, gnomon.Gaussian) else point.matrix()
    assert (matrix - torch.eye(5)).abs().max() > 0.1, (name, rule)


@pytest.mark.spawns
def test_ranks_hold_the_same_frames_bit_for_bit(tmp_path):
    """On 2 and on 4 ranks, each with data of its own; an assertion in any of them fails the test."""
    method = "fork" if hasattr(os, "fork") else "spawn"
    torch.multiprocessing.start_processes(_ranks_worker, (str(tmp_path / "store"),), nprocs=4, start_method=method)
