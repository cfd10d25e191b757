"""A small U-Net (Ronneberger et al. 2015, arXiv:1505.04597) that predicts the noise of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """Two levels of convolutions with group norm. The noise level is one more channel of the input."""

    def __init__(self, width: int, channels: int = 3) -> None:
        super().__init__()
        self.inner = _convolutions(channels + 1, width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.deep = nn.Sequential(*_convolutions(2 * width, 2 * width), *_convolutions(2 * width, 2 * width))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.outer = _convolutions(2 * width, width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.inner(x)
        deep = self.up(self.deep(self.down(shallow)))
        return self.last(self.outer(torch.cat([shallow, deep], 1)))


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())
