"""INGD with Accelerate: a loop of your own on any number of processes.

accelerate launch --num_processes 2 --cpu examples/accelerate_loop.py --steps 50
"""

import argparse
import gc

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import gnomon


def train(accelerator: Accelerator, steps: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    data = DataLoader(TensorDataset(x, x[:, :3].sin() * x[:, 3:6]), batch_size=32, shuffle=True)
    network = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 3))
    # The model first: INGD must see what prepare() puts around it, to take its statistics over all processes.
    network, data = accelerator.prepare(network, data)
    optimizer = gnomon.optim.INGD(network)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * accelerator.num_processes)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    losses: list[float] = []
    while len(losses) < steps:
        for inputs, targets in data:
            with accelerator.accumulate(network):
                loss = mse_loss(network(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(network.parameters(), 1.0)
                    losses.append(accelerator.reduce(loss.detach(), "mean").item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if len(losses) == steps:
                break
    weights = torch.cat([p.detach().flatten() for p in network.parameters()])
    apart = (accelerator.gather(weights[None]) - weights).abs().max().item()
    accelerator.print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    accelerator.print(f"weights of {accelerator.num_processes} processes differ by {apart}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", default="no", help="or bf16")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=arguments.precision)
    train(accelerator, arguments.steps)
    # The wrapped model goes before the process group: a wrapper that is the last to hold a Gloo group waits for the
    # group's thread while the thread waits for the interpreter, and the process hangs or aborts at its end.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
