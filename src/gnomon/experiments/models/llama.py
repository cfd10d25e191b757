"""A small decoder-only transformer after LLaMA (Touvron et al. 2023, arXiv:2302.13971), without biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


class GatedPerceptron(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = scaled_dot_product_attention(rotated(q, turns), rotated(k, turns), v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated perceptron. Each comes after a norm and is added to its input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), GatedPerceptron(width, hidden)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), turns)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """A decoder-only transformer over bytes. Its positions are turns of queries and keys alone."""

    turns: Tensor

    def __init__(self, width: int, heads: int, layers: int, hidden: int, context: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("turns", rotary_turns(context, width // heads), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        turns = self.turns[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


def rotary_turns(context: int, width: int) -> Tensor:
    """Return cosines and sines of ``position / 10000^(2 i / width)`` (Su et al. 2021, arXiv:2104.09864)."""
    speeds = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(context)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs ``(x_i, x_(i + width / 2))`` of the last dimension by the angles of their positions."""
    cosines, sines = turns
    left, right = x.chunk(2, -1)
    return torch.cat([left * cosines - right * sines, left * sines + right * cosines], -1)
