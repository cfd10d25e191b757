"""Linear layers: matrices that map the last dimension of their input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .base import Layer


class LinearLayer(Layer):
    """``nn.Linear``."""

    rows_give_gradient = True

    def __init__(self, module: Any, bias: nn.Parameter | None, average: bool = False) -> None:
        super().__init__(module.weight, bias, module)
        self.d, self.p = module.weight.shape
        self.p += self.bias is not None


class InputMajorLinearLayer(Layer):
    """``Conv1D`` of Hugging Face's GPT-2: ``y = x V + b``, a linear layer whose weight V is W^T."""

    def __init__(self, module: Any, bias: nn.Parameter | None, average: bool = False) -> None:
        super().__init__(module.weight, bias, module)
        self.p, self.d = module.weight.shape
        self.p += self.bias is not None

    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.unsqueeze(0)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0).mT
