"""An SPD layer in a network: signals are classified by the distance of their covariances to learned prototypes.

python examples/spd_layer.py
"""

import matplotlib.pyplot as plt
import torch
from pictures import COLORS, ellipse, options, save
from torch import Tensor, nn

import gnomon


class Prototypes(nn.Module):
    """Scores of classes: minus the squared geodesic distance of a covariance to a learned SPD matrix of each class."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.centers = gnomon.SPD(size, batch_shape=(classes,))

    def forward(self, covariances: Tensor) -> Tensor:
        return -gnomon.riemannian.distance(covariances[:, None], self.centers.matrix()).square()


class Classifier(nn.Module):
    """Channels are mixed by a linear layer; the covariance of the mixture goes to the prototypes."""

    def __init__(self, channels: int, mixed: int, classes: int) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, mixed, bias=False)
        self.prototypes = Prototypes(mixed, classes)

    def covariances(self, signals: Tensor) -> Tensor:
        mixed = self.mix(signals)
        return mixed.mT @ mixed / signals.shape[1] + 1e-3 * torch.eye(mixed.shape[-1])

    def forward(self, signals: Tensor) -> Tensor:
        return self.prototypes(self.covariances(signals))


def make_signals(count: int, length: int = 40, channels: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Signals (count, length, channels) whose classes differ in how two hidden sources are correlated."""
    labels = torch.randint(classes, (count,))
    angles = labels * torch.pi / classes
    directions = torch.stack([angles.cos(), angles.sin()], -1)
    sources = torch.randn(count, length, 1) * 2 * directions[:, None] + 0.7 * torch.randn(count, length, 2)
    mixing = torch.randn(2, channels, generator=torch.Generator().manual_seed(1))
    return sources @ mixing + 0.5 * torch.randn(count, length, channels), labels


def main() -> None:
    arguments = options(__doc__, "spd-layer")
    torch.manual_seed(0)
    signals, labels = make_signals(300)
    unseen, answers = make_signals(300)
    model = Classifier(channels=6, mixed=2, classes=3)
    optimizer = gnomon.moving_frame(torch.optim.AdamW(model.parameters(), lr=0.05))  # the points and the linear layer
    losses = []
    for _ in range(30 if arguments.quick else 100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(signals), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        error = 100 * (model(unseen).argmax(-1) != answers).float().mean().item()
        covariances, centers = model.covariances(unseen), model.prototypes.centers.matrix()
    print(f"test error {error:.1f}% after {len(losses)} steps")

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), constrained_layout=True)
    left.plot(losses)
    left.set(xlabel="step", ylabel="training loss")
    for number in range(3):
        for covariance in covariances[answers == number][:8]:
            ellipse(right, covariance, color=COLORS[number], linewidth=0.4, radius=1)
        ellipse(right, centers[number], color=COLORS[number], linewidth=3, radius=1, label=f"class {number + 1}")
    right.set(title="covariances of signals and prototypes", aspect="equal", xticks=[], yticks=[])
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
