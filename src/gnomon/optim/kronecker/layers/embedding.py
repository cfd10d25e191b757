"""Embeddings: linear maps of unit vectors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .base import Approximation, Layer


class EmbeddingLayer(Layer):
    """``nn.Embedding``: its rows are the columns of W, and an index picks one of them."""

    takes_indices = True

    def __init__(self, module: Any, bias: nn.Parameter | None, average: bool = False) -> None:
        super().__init__(module.weight, None, module)
        self.p, self.d = self.shape

    def inputs(self, x: Tensor, every: int = 1, start: int = 0) -> Tensor:
        """Return indices ``(1, samples, positions)``.

        An index of padding becomes p, which stands for the zero vector.
        """
        indices = x.reshape(1, x.shape[0] if x.ndim else 1, -1) if x.numel() else x.new_zeros(1, 0, 1)
        padding = self.module.padding_idx
        return indices if padding is None else indices.masked_fill(indices == padding, self.p)

    def rows(
        self, x: Tensor, g: Tensor, approximation: Approximation = "expand", every: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return indices of shape ``(1, n)`` and their gradients. Indices have no mean, so they are never reduced."""
        indices, g = self.inputs(x).flatten(1, 2), self.outputs(g).flatten(1, 2)
        return indices, g * (indices < self.p).unsqueeze(-1)

    def samples(self, x: Tensor) -> int:
        return x.shape[0] if x.ndim else 1

    def count(self, x: Tensor, g: Tensor, approximation: Approximation) -> int:
        """Return the number of indices, which are never reduced."""
        return g.numel() // self.d

    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.unsqueeze(0)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0).mT
