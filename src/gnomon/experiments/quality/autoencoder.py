"""A deep autoencoder of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ..data import DataMissingError, digits, idx
from ..models.perceptron import perceptron
from .task import Task


class Autoencoder(Task):
    """784-256-128-32-128-256-784 with tanh on Fashion-MNIST, or on scikit-learn's digits scaled to 28 x 28.

    Digits are taken where a machine has no Fashion-MNIST, or with ``fashion=False``.
    """

    name, steps, measure = "autoencoder", 600, "squared error of a training image"
    batch_size = 128

    def __init__(self, steps: int = steps, fashion: bool = True) -> None:
        self.steps = steps
        try:
            self.images = fashion_images() if fashion else enlarged_digits()
        except DataMissingError:
            self.images = enlarged_digits()

    def model(self) -> nn.Module:
        return perceptron((784, 256, 128, 32, 128, 256, 784), nn.Tanh)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.images), (self.batch_size,), generator=generator)
        return self.images[chosen], self.images[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum(-1).mean()

    def evaluate(self, model: nn.Module) -> float:
        images = self.images[:4096]
        with torch.no_grad():
            return self.loss(model(images), images).item()


def fashion_images() -> Tensor:
    """Return the training images of Fashion-MNIST, as rows in [0, 1]."""
    return idx.read(idx.FASHION_MNIST, "train").images.flatten(1).float() / 255


def enlarged_digits() -> Tensor:
    """Return scikit-learn's digits at 28 x 28 pixels, as rows in [0, 1]."""
    return interpolate(digits.read().images.float() / digits.RECIPE.white, (28, 28), mode="bilinear").flatten(1)
