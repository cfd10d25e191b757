"""A model with layers of many kinds, and its training on some of several ranks."""

import contextlib
import functools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gnomon.optim import INGD, KFAC

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
    model = Mixed().double()  # polar factors enlarge the rounding of sums that ranks make in another order
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


def in_no_unit(entries):
    """KFAC's averages without their units, which ranks choose in another way than one process does."""
    entries = dict(entries)
    for name in ("A", "S"):
        if f"{name}_unit" in entries:
            unit = entries.pop(f"{name}_unit").square()
            entries[name] = entries[name] * unit.view(-1, *(1,) * (entries[name].ndim - 1))
    return entries


def assert_same(found, weights, state, name):
    """Weights, and what is there of the state; KFAC's inverses have more rounding than what they are of."""
    theirs, kept = found
    pairs = [(key, theirs[key], value) for key, value in weights.items()]
    for number, entries in kept.items():
        ours, others = in_no_unit(entries), in_no_unit(state[number])
        pairs += [(key, value, others[key]) for key, value in ours.items()]
    for key, value, other in pairs:
        if key.endswith("_inverse"):
            continue
        scale = max(1.0, float(other.abs().max()))  # the speeds of natural steps are large
        torch.testing.assert_close(
            value, other, rtol=1e-6, atol=1e-6 * scale, msg=lambda m, key=key: f"{name}, {key}: {m}"
        )


@functools.cache
def alone(name):
    kind, options, accumulate = CASES[name]
    model, build = model_and(kind, **options)
    optimizer = build(model)
    train(model, optimizer, accumulate=accumulate)
    return outcome(model, optimizer)


def fully_sharded(model, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model.attention, model.twice, model):
        fully_shard(layer, mesh=mesh)


def whole_weights(model):
    state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value.clone() for key, value in state.items()}
