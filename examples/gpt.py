"""A small GPT learns the bytes of a Python module, with INGD and with AdamW: loss on the end of it by step.

Each has the best of the learning rates 1e-3, 3e-3, 1e-2 and 3e-2, by that loss itself.

python examples/gpt.py
"""

import argparse
import inspect
import math

import matplotlib.pyplot as plt
import torch
from pictures import color_of, options, save
from torch import Tensor
from torch.nn.functional import cross_entropy

import gnomon
from gnomon.experiments.models.gpt import GPT

CONTEXT, BATCH = 64, 16
OPTIMIZERS = {
    "INGD": lambda model: gnomon.optim.INGD(model, lr=1e-2),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
}


def pieces(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and the byte that follows each of their bytes."""
    tokens = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def bits(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """The bits that the model needs for a byte."""
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / math.log(2)


def train(make_optimizer, text: Tensor, steps: int, every: int) -> tuple[GPT, list[float]]:
    """The model, and the bits on the last tenth of the text, which is not trained on, each so many steps."""
    torch.manual_seed(0)
    model = GPT(width=64, heads=4, layers=2, context=CONTEXT)
    cut = len(text) * 9 // 10
    held_out = pieces(text, torch.arange(cut, len(text) - CONTEXT - 1, CONTEXT))
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    found = []
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                found.append(bits(model, *held_out).item())
        optimizer.zero_grad()
        bits(model, *pieces(text, torch.randint(cut - CONTEXT - 1, (BATCH,)))).backward()
        optimizer.step()
        schedule.step()
    return model, found


@torch.no_grad()
def continued(model: GPT, start: str, length: int) -> str:
    """Text that the model writes, each byte the most likely one."""
    tokens = list(start.encode())
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens[-CONTEXT:]]))[0, -1].argmax()))
    return bytes(tokens).decode(errors="replace")


def main() -> None:
    arguments = options(__doc__, "gpt")
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    steps, every = (40, 20) if arguments.quick else (300, 20)
    figure, axes = plt.subplots(figsize=(5, 3.4), constrained_layout=True)
    for name, make_optimizer in OPTIMIZERS.items():
        model, found = train(make_optimizer, text, steps, every)
        print(f"{found[0]:.2f} bits a byte at first, {found[-1]:.2f} after {steps} steps with {name}")
        if not arguments.quick:
            print(continued(model, "    def __init__(self", 120))
        axes.plot(range(0, steps + 1, every), found, "o-", markersize=3, color=color_of(name), label=name)
    axes.set(xlabel="step", ylabel="bits a byte, on text not seen", ylim=(0, None))
    axes.legend(frameon=False)
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
