"""PyramidNet with bottlenecks for small images (Han, Kim and Kim 2017, arXiv:1610.02915)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

EXPANSION = 4
"""The number of output channels of a bottleneck, divided by its width."""


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to the input. The input is padded with channels of zeros."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.new_channels = EXPANSION * width - inputs
        self.shrink = nn.AvgPool2d(2, ceil_mode=True) if stride == 2 else nn.Identity()
        self.inner = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, width, 1, bias=False),
            *_norm_and_relu(width),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            *_norm_and_relu(width),
            nn.Conv2d(width, EXPANSION * width, 1, bias=False),
            nn.BatchNorm2d(EXPANSION * width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + pad(self.shrink(x), (0, 0, 0, 0, 0, self.new_channels))


def _norm_and_relu(width: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(width), nn.ReLU(inplace=True)


def pyramidnet(depth: int, alpha: int, classes: int, channels: int) -> nn.Module:
    """Return three stages of equally many bottlenecks. At each the width grows by the same part of alpha."""
    blocks = (depth - 2) // 3  # a block has three convolutions; the first convolution and the linear layer are extra
    widths = [round(16 + alpha * i / blocks) for i in range(1, blocks + 1)]
    stage_starts = (blocks // 3, 2 * blocks // 3)
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
    inputs = 16
    for i, width in enumerate(widths):
        layers.append(Bottleneck(inputs, width, stride=2 if i in stage_starts else 1))
        inputs = EXPANSION * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    network = nn.Sequential(*layers, *_norm_and_relu(inputs), *head)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network
