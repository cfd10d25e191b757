"""Multi-layer perceptrons."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn


def perceptron(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers between these sizes, with the activation between the layers."""
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes):
        layers += [nn.Linear(i, o), activation()]
    return nn.Sequential(*layers[:-1])


def mlp(classes: int, channels: int) -> nn.Module:
    """Return a perceptron for images of 8 x 8 pixels. Larger images are reduced to that size by averages."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), *perceptron((64 * channels, 256, 128, classes)))
