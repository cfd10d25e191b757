"""Vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .gpt import Block


class VisionTransformer(nn.Module):
    """Blocks over patches and a class token, each with a position. The output of the class token is classified."""

    def __init__(
        self, width: int, heads: int, layers: int, patch: int, size: int, classes: int, channels: int = 3
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


def vit_b(classes: int, channels: int) -> nn.Module:
    """Return ViT-B/16: 12 layers of width 768, for images of 224 x 224 pixels in patches of 16 x 16."""
    return VisionTransformer(768, 12, 12, 16, 224, classes, channels)
