"""Low-rank adapters: a frozen network learns a shifted task through adapters alone, with INGD and with AdamW.

Each has the best of the learning rates 1e-3, 3e-3, 1e-2 and 3e-2.

python examples/lora.py
"""

import matplotlib.pyplot as plt
import torch
from pictures import color_of, options, save
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gnomon

OPTIMIZERS = {
    "INGD": lambda model: gnomon.optim.INGD(model, lr=1e-2, weight_decay=0.0),
    "AdamW": lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2),
}


class Adapted(nn.Module):
    """A frozen layer with a trainable map of low rank beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def shifted() -> nn.Sequential:
    """The network with low-rank changes of its weights: what the adapters have to find."""
    target = network()
    for layer in target[::2]:
        change = torch.randn(layer.out_features, 2) @ torch.randn(2, layer.in_features)
        layer.weight.data += 0.5 * change / layer.in_features**0.5
    return target


def losses(make_optimizer, steps: int) -> list[float]:
    target = shifted()
    model = nn.Sequential(*(Adapted(each) if isinstance(each, nn.Linear) else each for each in network()))
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    found = []
    for _ in range(steps):
        x = torch.randn(128, 32)
        optimizer.zero_grad()
        loss = mse_loss(model(x), target(x).detach())
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


def main() -> None:
    arguments = options(__doc__, "lora")
    steps = 60 if arguments.quick else 400
    figure, axes = plt.subplots(figsize=(5, 3.4), constrained_layout=True)
    for name, make_optimizer in OPTIMIZERS.items():
        found = losses(make_optimizer, steps)
        print(f"loss {found[0]:.4f} at first, {sum(found[-10:]) / 10:.4f} after {steps} steps with {name}")
        axes.plot(found, color=color_of(name), label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend(frameon=False)
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
