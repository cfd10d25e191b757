"""The models that ``gnomon bench`` trains, each with a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..models.convmixer import convmixer
from ..models.gpt import GPT
from ..models.perceptron import perceptron


@dataclass(frozen=True)
class Model:
    """A network and the shape of its inputs."""

    name: str
    title: str
    network: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int = 10
    sequences: bool = False
    """Whether the inputs are tokens. The target at each position is then the next token."""
    convolutional: bool = False

    def build(self) -> nn.Module:
        """Return the network at its start. It is the same at each call."""
        torch.manual_seed(0)
        return self.network()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets. They are the same at each call."""
        generator = torch.Generator().manual_seed(0)
        if self.sequences:
            tokens = torch.randint(self.classes, (self.inputs[0], self.inputs[1] + 1), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]
        targets = torch.randint(self.classes, self.inputs[:1], generator=generator)
        return torch.randn(self.inputs, generator=generator), targets

    def loss(self, network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross entropy of a batch."""
        return cross_entropy(network(batch[0]).flatten(0, -2), batch[1].flatten())


def mlp() -> nn.Module:
    return perceptron((784, 512, 512, 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise((3, 64, 128, 256)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def conv_mixer() -> nn.Module:
    return convmixer(width=256, depth=4, kernel=5, patch=4, classes=10, channels=3)


def transformer() -> nn.Module:
    return GPT(width=256, heads=4, layers=2, context=64)


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("mlp", "MLP 784-512-512-10, batch 128", mlp, (128, 784)),
        Model("cnn", "CNN 64-128-256, 32 x 32, batch 32", cnn, (32, 3, 32, 32), convolutional=True),
        Model("convmixer", "ConvMixer-256/4, 32 x 32, batch 32", conv_mixer, (32, 3, 32, 32), convolutional=True),
        Model("transformer", "transformer, 2 layers of 256, 64 tokens, batch 16", transformer, (16, 64), 256, True),
    )
}
