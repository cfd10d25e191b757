"""The convolutional classifier of CIFAR-100 that ``benchmarks/training.py`` trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data import cifar
from .task import Task


class Cifar(Task):
    """Four 3 x 3 convolutions with batch norm on a part of CIFAR-100, trained for five epochs."""

    name, measure = "cnn", "test error in %"
    batch_size, epochs, train_size, test_size = 128, 5, 20_000, 4_000

    def __init__(self) -> None:
        self.steps = self.epochs * (self.train_size // self.batch_size)
        train = cifar.read(cifar.CIFAR100, "train").first(self.train_size, "train_size")
        test = cifar.read(cifar.CIFAR100, "test").first(self.test_size, "test_size")
        self.images, self.labels = cifar.RECIPE.normalized(train.images), train.labels
        self.test_images, self.test_labels = cifar.RECIPE.normalized(test.images), test.labels
        self._order = torch.empty(0, dtype=torch.long)

    def model(self) -> nn.Module:
        return small_cnn(classes=100)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if len(self._order) < self.batch_size:
            self._order = torch.randperm(self.train_size, generator=generator)
        chosen, self._order = self._order[: self.batch_size], self._order[self.batch_size :]
        images = self.images[chosen]
        flipped = torch.rand(len(chosen), generator=generator) < 0.5
        return torch.where(flipped[:, None, None, None], images.flip(-1), images), self.labels[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)

    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            wrong = [(model(x).argmax(-1) != y) for x, y in zip(*self._test_batches(), strict=True)]
        model.train()
        return 100 * torch.cat(wrong).float().mean().item()

    def _test_batches(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.test_images.split(500), self.test_labels.split(500)


def small_cnn(classes: int) -> nn.Sequential:
    """Return four 3 x 3 convolutions with batch norm, a mean over positions and a linear layer."""
    layers: list[nn.Module] = []
    for i, o, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 2)):
        layers += [nn.Conv2d(i, o, 3, stride, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))
