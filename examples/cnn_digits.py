"""INGD and AdamW on a small convolutional network: test error by epoch.

Each has the best of the learning rates 1e-3, 3e-3, 1e-2 and 3e-2, by the test error itself.

python examples/cnn_digits.py
"""

import matplotlib.pyplot as plt
import torch
from pictures import color_of, options, save
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import gnomon

OPTIMIZERS = {
    "INGD": lambda model: gnomon.optim.INGD(model, lr=1e-2),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def errors(make_optimizer, images, labels, epochs: int) -> list[float]:
    """The test error after each epoch, in percent; the last fifth of the rows is the test set."""
    torch.manual_seed(0)
    model = network()
    optimizer = make_optimizer(model)
    train = len(images) * 4 // 5
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-train // 64))
    found = []
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(train).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            wrong = model(images[train:]).argmax(-1) != labels[train:]
        found.append(100 * wrong.float().mean().item())
    return found


def main() -> None:
    arguments = options(__doc__, "cnn-digits")
    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 8 - 1
    labels = torch.tensor(data.target)[order]
    epochs = 2 if arguments.quick else 4
    figure, axes = plt.subplots(figsize=(5, 3.4), constrained_layout=True)
    for name, make_optimizer in OPTIMIZERS.items():
        found = errors(make_optimizer, images, labels, epochs)
        print(f"test error {found[-1]:.1f}% with {name}")
        axes.plot(range(1, epochs + 1), found, "o-", color=color_of(name), label=name)
    axes.set(xlabel="epoch", ylabel="test error, %", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
