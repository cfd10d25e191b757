"""Two processes train one network: INGD divides its factors between them, and takes the steps of one process.

torchrun --nproc-per-node 2 examples/torchrun_digits.py
"""

import gc

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from pictures import COLORS, options, save
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gnomon

BATCH = 128


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 10))


def train(model: nn.Module, optimizer, data: tuple[Tensor, Tensor], steps: int, rank: int, ranks: int) -> list[float]:
    """Each rank takes its part of every batch. Return the loss of that part at each step."""
    order = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (BATCH,), generator=order)[rank::ranks]
        optimizer.zero_grad()
        loss = cross_entropy(model(data[0][rows]), data[1][rows])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def together(data: tuple[Tensor, Tensor], steps: int, rank: int, ranks: int) -> tuple[Tensor, Tensor, list[int]]:
    """Train with all ranks. Return the weights, the losses of the whole batches and the bytes of state of each rank."""
    model = DistributedDataParallel(network())
    optimizer = gnomon.optim.INGD(model, shard="full")
    losses = torch.tensor(train(model, optimizer, data, steps, rank, ranks))
    dist.all_reduce(losses)
    held = [torch.zeros((), dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(held, torch.tensor(optimizer.memory_usage()))
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return weights, losses / ranks, [int(one) for one in held]


def alone(data: tuple[Tensor, Tensor], steps: int) -> tuple[Tensor, Tensor, int]:
    """The same in one process with the whole batches."""
    model = network()
    optimizer = gnomon.optim.INGD(model)
    losses = torch.tensor(train(model, optimizer, data, steps, rank=0, ranks=1))
    return nn.utils.parameters_to_vector(model.parameters()).detach(), losses, optimizer.memory_usage()


def draw(losses: Tensor, held: list[int], losses_alone: Tensor, held_alone: int):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    left.plot(losses, color=COLORS[0], label=f"{len(held)} ranks")
    shown = range(0, len(losses_alone), 4)
    left.plot(shown, losses_alone[::4], ".", color=COLORS[1], label="one process")
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend(frameon=False)
    names = [*(f"rank {number}" for number in range(len(held))), "one process"]
    right.bar(names, [one / 1e3 for one in (*held, held_alone)], color=[COLORS[0]] * len(held) + [COLORS[1]])
    right.set(ylabel="state of the optimizer, kB")
    return figure


def main() -> None:
    arguments = options(__doc__, "torchrun_digits")
    if not dist.is_torchelastic_launched():
        raise SystemExit("start it with torchrun --nproc-per-node 2 examples/torchrun_digits.py")
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    data = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    steps = 20 if arguments.quick else 80
    weights, losses, held = together(data, steps, rank, ranks)
    gc.collect()  # the wrapper goes before the process group that it holds
    dist.destroy_process_group()
    if rank == 0:
        weights_alone, losses_alone, held_alone = alone(data, steps)
        apart = (weights - weights_alone).abs().max() / weights_alone.abs().max()
        print(f"loss {losses[0]:.2f} at first, {losses[-1]:.4f} after {steps} steps on {ranks} ranks")
        print(f"one process ends at {losses_alone[-1]:.4f}, and its weights differ by {apart:.6f} of the largest")
        print(f"a rank holds at most {max(held)} bytes of state, one process {held_alone}")
        save(draw(losses, held, losses_alone, held_alone), arguments.picture)


if __name__ == "__main__":
    main()
