"""Training on several ranks: DistributedDataParallel, sharded factors, fully sharded models."""

import itertools

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gnomon.optim import INGD, KFAC
from gnomon.optim.assignment import Assignment

STEPS = 12


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
    return model, lambda wrapped: optimizer(wrapped, **options)


def part(tensor, rank, count):
    return tensor.chunk(count)[rank]


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def train(model, optimizer, rank=0, count=1, accumulate=1, steps=STEPS, no_sync=True):
    """On this rank's part of each batch, in so many micro-batches."""
    for x, y in batches(steps):
        optimizer.zero_grad()
        pieces = list(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True))
        for number, (a, b) in enumerate(pieces):
            last = number == len(pieces) - 1 or not no_sync or not isinstance(model, DistributedDataParallel)
            with torch.autograd.graph.save_on_cpu() if last else model.no_sync():
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
    "full, kl_clip": (INGD, {"shard": "full", "kl_clip": 1e-6, "lr": 1e-6}, 1),
    "full, gradient": (INGD, {"shard": "full", "curvature": "gradient"}, 1),
    "update, low memory": (INGD, {"shard": "update", "memory": "low"}, 1),
    "kfac": (KFAC, {}, 1),
}


def _train_cases(rank, count, names):
    found = {}
    for name in names:
        kind, options, accumulate = CASES[name]
        model, build = model_and(kind, update_every=3, **options)
        wrapped = DistributedDataParallel(model)
        optimizer = build(wrapped)
        train(wrapped, optimizer, rank, count, accumulate)
        found[name] = outcome(model, optimizer)
    return found


def alone(name):
    kind, options, accumulate = CASES[name]
    model, build = model_and(kind, update_every=3, **options)
    optimizer = build(model)
    train(model, optimizer, accumulate=accumulate)
    return outcome(model, optimizer)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_equal_one_process_with_the_whole_batch(count):
    found = on_ranks(count, _train_cases, list(CASES))
    for name in CASES:
        weights, state = alone(name)
        for rank in range(count):
            theirs, kept = found[rank][name]
            for key, value in weights.items():
                torch.testing.assert_close(
                    theirs[key], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}"
                )
                assert torch.equal(theirs[key], found[0][name][0][key]), f"{name}: ranks differ in {key}"
            for number, entries in kept.items():
                for key, value in entries.items():
                    torch.testing.assert_close(
                        value, state[number][key], rtol=1e-6, atol=1e-6, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}"
                    )
        # All that one process keeps is kept somewhere.
        for number, entries in state.items():
            there = set(itertools.chain(*(found[rank][name][1].get(number, {}) for rank in range(count))))
            assert there == set(entries), name


# ---------------------------------------------------------------------- who does what
def test_assignment():
    assert Assignment.balanced([3, 1, 2], 2).owners == (0, 1, 1)


# ---------------------------------------------------------------------- fully sharded models
def _train_sharded(rank, count, names):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = {}
    for name in names:
        for shape in ((count,), (2, count // 2)):
            kind, options, accumulate = CASES[name]
            model, build = model_and(kind, update_every=3, **options)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for layer in (model.attention, model.twice):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = build(model)
            train(model, optimizer, rank, count, accumulate)
            found[name, len(shape)] = {key: value.full_tensor() for key, value in model.state_dict().items()}
    return found


FSDP_CASES = [
    "none",
    "update",
    "full",
    "none, accumulated",
    "full, accumulated",
    "none, paper",
    "full, paper",
    "full, arrow",
    "full, kl_clip",
    "kfac",
]


def test_sharded_models_equal_one_process():
    found = on_ranks(4, _train_sharded, FSDP_CASES)
    for name in FSDP_CASES:
        weights, _ = alone(name)
        for rank in range(4):
            for dimensions in (1, 2):
                for key, value in weights.items():
                    torch.testing.assert_close(
                        found[rank][name, dimensions][key],
                        value,
                        rtol=1e-6,
                        atol=1e-6,
                        msg=lambda m, n=name, k=key: f"{n}, {k}: {m}",
                    )
