"""Layers as matrices: what a second-order method needs to know of a model.

Each kind of module is a batch of linear maps ``y = W x`` with ``W`` of shape ``(blocks, d, p)``: its weight, with the
bias as a last column where it has one. From a module's input and the gradient of its output come rows ``x`` and ``g``
with

    dl/dW = sum_n g_n x_n^T

exactly, whatever the stride, padding, dilation or grouping. Parameters that no hook can see the inputs of, such as
those of ``nn.MultiheadAttention``, are matrices without rows. Nothing here knows of an algorithm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Approximation = Literal["expand", "reduce"]
"""Over positions that share a weight: ``expand`` has a row for each, ``reduce`` one for each sample."""


@dataclass(frozen=True)
class Thinning:
    """Which rows of a batch are enough."""

    samples: int = 1
    """Every which sample."""
    positions: int = 1
    """Every which position, along each axis; samples take turns in where they begin, so that all borders are seen."""


class Layer(ABC):
    """A weight and its bias as matrices ``(blocks, d, p)``."""

    blocks: int
    d: int
    p: int
    one_hot: bool = False
    """Whether the inputs are indices, each for a unit vector of length p."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        self.weight = weight
        self.bias = bias if bias is not None and bias.requires_grad else None

    @property
    def size(self) -> int:
        """Entries of the matrices."""
        return self.blocks * self.d * self.p

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the matrix holds."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def matrix(self, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Tensors of the shapes of weight and bias as one matrix: a view, or with a bias in memory ``out``."""
        matrix = self._to_matrix(weight)
        return matrix if bias is None else torch.cat([matrix, bias.reshape(self.blocks, self.d, 1)], -1, out=out)

    def tensors(self, matrix: Tensor) -> list[Tensor]:
        """The reverse of :meth:`matrix`, in the order of :attr:`parameters`."""
        if self.bias is None:
            return [self._from_matrix(matrix)]
        return [self._from_matrix(matrix[..., :-1]), matrix[..., -1].reshape(self.bias.shape)]

    def _to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.blocks, self.d, -1)

    def _from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.weight.shape)


class MatrixLayer(Layer):
    """A parameter of two or more dimensions, the first against the others, without rows."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None, blocks: int = 1) -> None:
        super().__init__(weight, bias)
        self.blocks, self.d = blocks, weight.shape[0] // blocks
        self.p = math.prod(weight.shape[1:]) + (self.bias is not None)


class ModuleLayer(Layer):
    """A module's weight and bias, with rows from its inputs and output gradients."""

    folds_bias: bool = True
    """Whether the bias is a column of the matrix; otherwise it is left to others."""

    def __init__(self, module: Any, fold: bool = True, average: bool = False) -> None:
        super().__init__(module.weight, getattr(module, "bias", None) if self.folds_bias and fold else None)
        self.module, self.average = module, average

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor:
        """The module's input as rows ``(blocks, samples, positions, p)``, without the bias's column of ones."""

    @abstractmethod
    def outputs(self, g: Tensor) -> Tensor:
        """The gradient of its output as rows ``(blocks, samples, positions, d)``."""

    def rows(
        self, x: Tensor, g: Tensor, approximation: Approximation = "expand", every: int = 1
    ) -> tuple[Tensor, Tensor]:
        """``x`` of shape ``(blocks, n, p)`` and ``g`` of shape ``(blocks, n, d)``, at ``every`` such position."""
        if approximation == "reduce":
            x, g = self.mean_inputs(x), self.outputs(g).sum(2)
        else:
            x, g = self._expanded(x, g, every)
        return (torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if self.bias is not None else x), g

    def _expanded(self, x: Tensor, g: Tensor, every: int) -> tuple[Tensor, Tensor]:
        """A row for each position; where they have no axes of their own, for all of them."""
        return self.inputs(x).flatten(1, 2), self.outputs(g).flatten(1, 2)

    def mean_inputs(self, x: Tensor) -> Tensor:
        """The means of :meth:`inputs` over positions, ``(blocks, samples, p)``."""
        return self.inputs(x).mean(2)

    rows_are_exact: bool = False
    """Whether the last dimension of an input holds a row each, of which the gradient is the sum of products."""
    usual_approximation: Approximation = "expand"
    """For a loss with a term for each position, as in language models; ``reduce`` is for positions that are pooled."""

    def samples(self, x: Tensor) -> int:
        """How many samples an input holds, along its first dimension where they are several."""
        return x.shape[0] if x.ndim > 1 else 1

    def count(self, x: Tensor, g: Tensor, approximation: Approximation) -> int:
        """How many rows an input and an output gradient give."""
        return self.samples(x) if approximation == "reduce" else g.numel() // (self.blocks * self.d)

    def thinning(self, x: Tensor, g: Tensor, approximation: Approximation, ranks: int = 1) -> Thinning:
        """Of the samples one in four or two, if that leaves twice as many rows as either factor is large.

        Where only every second position is taken, which are less alike, once as many are enough. As many rows as here
        are assumed at each of the ranks; by powers of two they take the same samples together as one process with the
        whole batch.
        """
        samples, every = self.samples(x), self._lattice(x, g, ranks) if approximation == "expand" else 1
        rows = ranks * self.count(x, g, approximation) // every ** (g.ndim - 2)
        enough = (2 if every == 1 else 1) * max(self.p, self.d)
        stride = next(stride for stride in (4, 2, 1) if stride == 1 or rows >= stride * enough)
        return Thinning(1 if samples == 1 else stride, every)

    def _lattice(self, x: Tensor, g: Tensor, ranks: int) -> int:
        """Every which position along each axis is enough."""
        return 1


class LinearLayer(ModuleLayer):
    """``nn.Linear``, with any number of dimensions between the first and the last as positions."""

    rows_are_exact = True

    def __init__(self, module: nn.Linear, **options: bool) -> None:
        super().__init__(module, **options)
        self.blocks, (self.d, self.p) = 1, module.weight.shape
        self.p += self.bias is not None

    def inputs(self, x: Tensor) -> Tensor:
        return _sequences(x).unsqueeze(0)

    def outputs(self, g: Tensor) -> Tensor:
        return _sequences(g).unsqueeze(0)


class InputMajorLinearLayer(LinearLayer):
    """Hugging Face's ``Conv1D``, of GPT-2 and its kin: ``y = x V + b``, a linear layer whose weight V is W^T."""

    rows_are_exact = False  # whether a gradient is their product is tested on weights that lie as W does

    def __init__(self, module: Any, **options: bool) -> None:
        super().__init__(module, **options)
        self.p, self.d = module.weight.shape
        self.p += self.bias is not None

    def _to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.unsqueeze(0)

    def _from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0).mT


def _sequences(x: Tensor) -> Tensor:
    """``(samples, positions, features)`` from a vector or from any number of leading dimensions."""
    x = x.reshape(1, -1) if x.ndim == 1 else x
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.numel() else x.new_zeros(0, 1, x.shape[-1])


class EmbeddingLayer(ModuleLayer):
    """``nn.Embedding``: its rows are the columns of W, and an index picks one of them."""

    one_hot = True

    def __init__(self, module: nn.Embedding, **options: bool) -> None:
        super().__init__(module, **options)
        self.blocks, (self.p, self.d) = 1, module.weight.shape

    def inputs(self, x: Tensor) -> Tensor:
        """Indices ``(1, samples, positions)``; one of padding becomes p, which stands for the zero vector."""
        indices = _positions(x)
        padding = self.module.padding_idx
        return indices if padding is None else indices.masked_fill(indices == padding, self.p)

    def outputs(self, g: Tensor) -> Tensor:
        return _sequences(g).unsqueeze(0)

    def rows(
        self, x: Tensor, g: Tensor, approximation: Approximation = "expand", every: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Indices of shape ``(1, n)`` and their gradients; there is no mean of indices, so none is reduced."""
        indices, g = self.inputs(x).flatten(1, 2), self.outputs(g).flatten(1, 2)
        return indices, g * (indices < self.p).unsqueeze(-1)

    def samples(self, x: Tensor) -> int:
        return x.shape[0] if x.ndim else 1

    def _to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.unsqueeze(0)

    def _from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0).mT


def _positions(x: Tensor) -> Tensor:
    """Indices as ``(1, samples, positions)``."""
    return x.reshape(1, x.shape[0] if x.ndim else 1, -1) if x.numel() else x.new_zeros(1, 0, 1)
