"""ConvMixer (Trockman and Kolter 2022, "Patches are all you need?", arXiv:2201.09792)."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """Adds the output of a module to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def convmixer(width: int, depth: int, kernel: int, patch: int, classes: int, channels: int) -> nn.Module:
    """Return patches, then depthwise convolutions (over positions) alternating with 1 x 1 ones (over channels)."""

    def normed(convolution: nn.Conv2d) -> nn.Sequential:
        return nn.Sequential(convolution, nn.GELU(), nn.BatchNorm2d(width))

    blocks: list[nn.Module] = []
    for _ in range(depth):
        depthwise = nn.Conv2d(width, width, kernel, groups=width, padding=kernel // 2)
        blocks += [Residual(normed(depthwise)), normed(nn.Conv2d(width, width, 1))]
    stem = normed(nn.Conv2d(channels, width, patch, stride=patch))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
