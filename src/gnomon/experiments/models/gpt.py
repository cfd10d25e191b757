"""A small decoder-only transformer after GPT-2 (Radford et al. 2019, "Language models are unsupervised multitask
learners"). Its head has a bias and shares no weight with the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    """Self-attention and a two-layer perceptron. Each comes after a layer norm and is added to its input."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_1(x)).reshape(split).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, heads: int, layers: int, context: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def gpt(classes: int, channels: int) -> nn.Module:
    """Return 2 layers of width 128 for at most 64 tokens. Text has no channels."""
    return GPT(width=128, heads=4, layers=2, context=64, vocabulary=classes)


def gpt_1_3b(classes: int, channels: int) -> nn.Module:
    """Return 24 layers of width 2048 for at most 2048 tokens, as in GPT-3 XL (Brown et al. 2020, arXiv:2005.14165)."""
    return GPT(width=2048, heads=16, layers=24, context=2048, vocabulary=classes)
