"""VGG (Simonyan and Zisserman 2015, arXiv:1409.1556) with batch norm (Ioffe and Szegedy 2015, arXiv:1502.03167)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def vgg(stages: Sequence[Sequence[int]], classes: int, channels: int) -> nn.Module:
    """Return 3 x 3 convolutions with a max-pool after each stage, then a mean over positions and a linear layer."""
    layers: list[nn.Module] = []
    width = channels
    for stage in stages:
        for outputs in stage:
            layers += [_convolution(width, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            width = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), _linear(width, classes))


def _convolution(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _linear(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer
