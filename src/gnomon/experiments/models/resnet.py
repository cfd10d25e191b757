"""ResNet (He et al. 2016, arXiv:1512.03385): with bottlenecks, and with basic blocks for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

EXPANSION = 4
"""The number of output channels of a bottleneck, divided by its width."""


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to the input. If the shape changes, the input is projected.

    The stride is in the 3 x 3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.inner = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )
        self.shortcut = _shortcut(inputs, outputs, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.inner(x) + self.shortcut(x))


class Basic(nn.Module):
    """Two 3 x 3 convolutions, added to the input. If the shape changes, the input is projected."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *_convolution(inputs, outputs, 3, stride), nn.ReLU(inplace=True), *_convolution(outputs, outputs, 3)
        )
        self.shortcut = _shortcut(inputs, outputs, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.inner(x) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(*_convolution(inputs, outputs, 1, stride))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer, nn.BatchNorm2d(outputs)


def resnet(blocks: Sequence[int], classes: int, channels: int) -> nn.Module:
    """Return stages of so many bottlenecks. The first has width 64, and each next stage is twice as wide."""
    stem = [*_convolution(channels, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    layers: list[nn.Module] = []
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for number in range(count):
            layers.append(Bottleneck(inputs, width, stride=2 if stage and not number else 1))
            inputs = EXPANSION * width
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def basic_resnet(widths: Sequence[int], classes: int, channels: int) -> nn.Module:
    """Return basic blocks of these widths, one each, for small images. Each halves the image, except the first."""
    layers: list[nn.Module] = [*_convolution(channels, widths[0], 3), nn.ReLU(inplace=True)]
    inputs = widths[0]
    for place, width in enumerate(widths):
        layers.append(Basic(inputs, width, stride=2 if place else 1))
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
