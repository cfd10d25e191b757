"""Record what training gives, number by number, and compare it with what another version of the code gives.

    python tests/optim/kronecker/recordings.py write before.pt       # with the old code
    python tests/optim/kronecker/recordings.py compare before.pt     # with the new code

Final weights and the whole state of the optimizer are kept for each of many configurations. A change that only moves
code must leave all of them equal bit for bit, on one machine. Numbers differ between machines, so none are committed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gnomon import groups
from gnomon.optim import INGD, KFAC

STEPS = 10


# ---------------------------------------------------------------------- models
class Mixed(nn.Module):
    """Embedding, convolution, attention, norm and linear layers, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
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


class Images(nn.Module):
    """Convolutions with strides, groups and dilation, a transposed one, a batch norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding="same", groups=4, dilation=2, bias=False)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        h = self.grouped(torch.relu(self.norm(self.first(x))))
        return self.head(torch.relu(self.up(h)).mean((2, 3)))


class Tied(nn.Module):
    """An embedding and an output layer that share their weight, and a layer without a trained bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 12)
        self.inner = nn.Linear(12, 12)
        self.inner.bias.requires_grad_(False)
        self.head = nn.Linear(12, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embedding(x))).mean(1))


def perceptron(width=40):
    """Wider than its batches are long."""
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))


def stacked():
    """Equal layers, which are updated together."""
    inner = [part for _ in range(4) for part in (nn.Linear(9, 9), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 9), *inner, nn.Linear(9, 5))


def tokens(size, generator):
    return torch.randint(0, 11, (size, 6), generator=generator)


def few_tokens(size, generator):
    return torch.randint(0, 5, (size, 6), generator=generator)


def images(size, generator):
    return torch.randn(size, 3, 8, 8, generator=generator)


def vectors(size, generator):
    return torch.randn(size, 6, generator=generator)


MODELS = {
    "mixed": (Mixed, tokens),
    "images": (Images, images),
    "tied": (Tied, few_tokens),
    "perceptron": (perceptron, vectors),
    "stacked": (stacked, vectors),
}


# ---------------------------------------------------------------------- configurations
def halved(step):
    return 0.01 * 0.5 ** (step // 4)


def configurations():
    """By name: a model, an optimizer, its options, and how it is trained."""
    found = {}

    def add(name, model, optimizer=INGD, loop=None, **options):
        found[name] = (model, optimizer, options, loop or {})

    for model in MODELS:
        add(f"{model}", model)
        add(f"{model}-paper", model, preset="paper", lr=1e-3)
        add(f"{model}-kfac", model, KFAC)
        add(f"{model}-float64", model, loop={"dtype": torch.float64})
        add(f"{model}-low-memory", model, memory="low")
    for structure in ("triangular", "diagonal", "block", "arrow", "heisenberg", "toeplitz", "identity"):
        add(f"perceptron-{structure}", "perceptron", structure=structure)
        add(f"mixed-{structure}-momentum", "mixed", structure=structure, precond_momentum=0.5)
    add("mixed-pairs", "mixed", structure={"conv": ("dense", "diagonal"), "head": groups.Triangular, "*": "dense"})
    add("mixed-gradient", "mixed", curvature="gradient")
    add("mixed-gradient-paper", "mixed", curvature="gradient", preset="paper", lr=1e-3)
    add("mixed-gradient-arrow", "mixed", curvature="gradient", structure="arrow")
    add("mixed-gradient-momentum", "mixed", curvature="gradient", precond_momentum=0.5)
    add("mixed-kfac-gradient", "mixed", KFAC, curvature="gradient")
    add("mixed-kfac-paper", "mixed", KFAC, preset="paper", lr=1e-3)
    add("mixed-mc", "mixed", fisher="mc", loop={"observe": True})
    add("images-expand", "images", approx="expand")
    add("images-average", "images", grouped="average")
    add("images-every-row", "images", approx="expand", subsample=False)
    add("mixed-momentum", "mixed", precond_momentum=0.5)
    add("mixed-outside", "mixed", precond_momentum=0.5, convention="outside")
    add("mixed-order-1", "mixed", order=1)
    add("mixed-small-damping", "mixed", damping=1e-6)
    add("mixed-bfloat16-factors", "mixed", precond_dtype=torch.bfloat16)
    add("mixed-float16-momentum", "mixed", precond_dtype=torch.float16, precond_momentum=0.5)
    add("perceptron-bfloat16", "perceptron", loop={"dtype": torch.bfloat16})
    add("mixed-schedules", "mixed", lr=halved, damping=lambda step: 0.2 + 0.01 * step)
    add("mixed-growing", "mixed", growing_intervals=True, update_every=4)
    add("mixed-kl-clip", "mixed", kl_clip=1e-2, lr=1e-2)
    add("mixed-natural", "mixed", step_rms=None, lr=1e-3)
    add("mixed-sgd-fallback", "mixed", fallback="sgd", fallback_lr=1e-2)
    add("mixed-max-dim", "mixed", max_dim=10)
    add("mixed-groups", "mixed", loop={"groups": True})
    add("mixed-accumulation", "mixed", loop={"accumulate": 2})
    add("mixed-clip", "mixed", loop={"clip": 0.05})
    add("perceptron-clip", "perceptron", loop={"clip": 0.05})
    add("mixed-scaler", "mixed", kl_clip=1e-2, loop={"scaler": True})
    add("mixed-precondition-only", "mixed", precondition_only=True, loop={"outer": True})
    add("mixed-natural-precondition-only", "mixed", precondition_only=True, step_rms=None, loop={"outer": True})
    add("mixed-resumed", "mixed", loop={"resume": True})
    add("mixed-resumed-arrow", "mixed", structure="arrow", precond_momentum=0.5, loop={"resume": True})
    add("stacked-resumed-kfac", "stacked", KFAC, loop={"resume": True})
    add("perceptron-compiled", "perceptron", compile=True)
    add("stacked-compiled-diagonal", "stacked", compile=True, structure="diagonal")
    for ranks in (2, 4):
        for shard in ("none", "update", "full"):
            add(f"mixed-{ranks}-ranks-{shard}", "mixed", shard=shard, loop={"ranks": ranks})
    add("mixed-ranks-arrow", "mixed", shard="update", structure="arrow", loop={"ranks": 2})
    add("mixed-ranks-paper", "mixed", shard="full", preset="paper", lr=1e-3, loop={"ranks": 2})
    add("mixed-ranks-accumulation", "mixed", shard="update", loop={"ranks": 2, "accumulate": 2})
    add("mixed-ranks-kfac", "mixed", KFAC, loop={"ranks": 2})
    add("mixed-ranks-sharded", "mixed", shard="none", loop={"ranks": 2, "fully": True})
    add("mixed-ranks-sharded-full", "mixed", shard="full", loop={"ranks": 2, "fully": True})
    add("mixed-ranks-sharded-natural", "mixed", shard="full", step_rms=None, lr=1e-3, loop={"ranks": 2, "fully": True})
    return found


# ---------------------------------------------------------------------- training
def built(model, optimizer, options, loop):
    options = {"update_every": 3, "growing_intervals": False, **options}
    if loop.get("groups"):
        options["groups"] = [{"params": list(model.head.parameters()), "lr": 3e-3, "update_every": 2}]
    if loop.get("scaler"):
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0)
    return optimizer(model, **options)


def trained(name, rank=0, count=1):
    """Final weights and state of a configuration, by name."""
    kind, optimizer_class, options, loop = configurations()[name]
    make, inputs = MODELS[kind]
    torch.manual_seed(0)
    model = make().to(loop.get("dtype", torch.float32))
    wrapped = model
    if count > 1:
        if loop.get("fully"):
            fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model)
    optimizer = built(wrapped, optimizer_class, options, loop)
    outer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) if loop.get("outer") else None
    scaler = options.get("scaler") or getattr(optimizer, "_scaler", None)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if loop.get("resume") and step == STEPS // 2:
            saved = optimizer.state_dict()
            optimizer = built(wrapped, optimizer_class, options, loop)
            optimizer.load_state_dict(saved)
        x = inputs(16, generator)
        y = torch.randint(0, 5, (16,), generator=generator)
        optimizer.zero_grad()
        pieces = zip(x.chunk(loop.get("accumulate", 1)), y.chunk(loop.get("accumulate", 1)), strict=True)
        for a, b in pieces:
            a, b = a.chunk(count)[rank], b.chunk(count)[rank]
            output = wrapped(a.to(loop.get("dtype", a.dtype)) if a.is_floating_point() else a)
            if loop.get("observe"):
                optimizer.observe(output)
            loss = nn.functional.cross_entropy(output, b) / loop.get("accumulate", 1)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if "clip" in loop:
            nn.utils.clip_grad_norm_(model.parameters(), loop["clip"])
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if outer is not None:
            outer.step()
    return recorded(model, optimizer)


def here(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def recorded(model, optimizer):
    """Weights and state as plain tensors, whatever layout the state has."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"weight {name}": here(p) for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"state {names[id(p)]} {key}"] = here(value)
    return found


def _on_rank(rank, name, count, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    torch.save(trained(name, rank, count), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def outcome(name):
    count = configurations()[name][3].get("ranks", 1)
    if count == 1:
        return trained(name)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (name, count, folder), nprocs=count)
        parts = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(count)]
    return {f"rank {rank}: {key}": value for rank, part in enumerate(parts) for key, value in part.items()}


# ---------------------------------------------------------------------- comparison
def difference(one, other):
    """The largest difference, over the largest entry; None where all bits are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other):
        return None
    wide = one.double(), other.double()
    return float((wide[0] - wide[1]).abs().max() / wide[1].abs().max())


def renamed(values):
    """Names of earlier layouts of the state as they are now."""
    names = {key: key.replace(" KK", " K").replace(" CC", " C") for key in values if not key.endswith(" forms")}
    return {name: values[key] for key, name in names.items()}


def compare(name, ours, theirs):
    """Print what is not equal; gives whether all is."""
    ours, theirs = renamed(ours), renamed(theirs)
    lines = [f"  {key}: only on one side" for key in sorted(ours.keys() ^ theirs.keys())]
    for key in sorted(ours.keys() & theirs.keys()):
        if (gap := difference(ours[key], theirs[key])) is not None:
            lines.append(f"  {key}: {gap:.1e}")
    print(f"{name}: {'equal' if not lines else 'different'} ({len(theirs)} tensors)", flush=True)
    print("\n".join(lines[:12]), end="\n" if lines else "")
    return not lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of configurations")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in configurations() if arguments.only in name]
    if arguments.action == "write":
        torch.save({name: outcome(name) for name in names}, arguments.file)
        print(f"{len(names)} configurations in {arguments.file}")
        return
    known = torch.load(arguments.file, weights_only=False)
    equal = [compare(name, outcome(name), known[name]) for name in names]
    print(f"{sum(equal)} of {len(equal)} configurations are equal bit for bit")
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
