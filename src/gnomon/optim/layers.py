"""Layers as matrices: what a second-order method needs to know of a module.

Each kind of module is a batch of linear maps ``y = W x`` with ``W`` of shape ``(blocks, d, p)``: its weight, with the
bias as a last column where it has one. From a module's input and the gradient of its output come rows ``x`` and ``g``
with

    dl/dW = sum_n g_n x_n^T

exactly, whatever the stride, padding, dilation or grouping. Nothing here knows of an algorithm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Approximation = Literal["expand", "reduce"]
"""Over positions that share a weight: ``expand`` has a row for each, ``reduce`` one for each sample."""


class Layer(ABC):
    """A module's weight and bias as matrices ``(blocks, d, p)``, and its statistics as rows."""

    blocks: int
    d: int
    p: int

    def __init__(self, module: Any) -> None:
        self.module = module
        self.weight: nn.Parameter = module.weight
        bias = getattr(module, "bias", None)
        self.bias: nn.Parameter | None = bias if bias is not None and bias.requires_grad and self.folds_bias else None

    folds_bias: bool = True
    """Whether the bias is a column of the matrix; otherwise it is left to others."""

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor:
        """The module's input as rows ``(blocks, samples, positions, p)``, without the bias's column of ones."""

    @abstractmethod
    def outputs(self, g: Tensor) -> Tensor:
        """The gradient of its output as rows ``(blocks, samples, positions, d)``."""

    def rows(self, x: Tensor, g: Tensor, approximation: Approximation = "expand") -> tuple[Tensor, Tensor]:
        """``x`` of shape ``(blocks, n, p)`` and ``g`` of shape ``(blocks, n, d)``."""
        x, g = self.inputs(x), self.outputs(g)
        if approximation == "reduce":
            x, g = x.mean(2), g.sum(2)
        else:
            x, g = x.flatten(1, 2), g.flatten(1, 2)
        return (torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if self.bias is not None else x), g

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the matrix holds."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors of the shapes of weight and bias as one matrix."""
        matrix = self._to_matrix(weight)
        return matrix if bias is None else torch.cat([matrix, bias.reshape(self.blocks, self.d, 1)], -1)

    def tensors(self, matrix: Tensor) -> list[Tensor]:
        """The reverse of :meth:`matrix`, in the order of :attr:`parameters`."""
        if self.bias is None:
            return [self._from_matrix(matrix)]
        return [self._from_matrix(matrix[..., :-1]), matrix[..., -1].reshape(self.bias.shape)]

    def _to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.blocks, self.d, -1)

    def _from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.weight.shape)


class LinearLayer(Layer):
    """``nn.Linear``, with any number of dimensions between the first and the last as positions."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module)
        self.blocks, (self.d, self.p) = 1, module.weight.shape
        self.p += self.bias is not None

    def inputs(self, x: Tensor) -> Tensor:
        return _sequences(x).unsqueeze(0)

    def outputs(self, g: Tensor) -> Tensor:
        return _sequences(g).unsqueeze(0)


def _sequences(x: Tensor) -> Tensor:
    """``(samples, positions, features)`` from a vector or from any number of leading dimensions."""
    x = x.reshape(1, -1) if x.ndim == 1 else x
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.shape[0] else x.new_zeros(0, 1, x.shape[-1])


class ConvolutionLayer(Layer):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: a linear map of patches, one for each group of channels."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.blocks = module.groups
        self.d = module.out_channels // module.groups
        self.p = math.prod(module.weight.shape[1:]) + (self.bias is not None)

    def inputs(self, x: Tensor) -> Tensor:
        m = self.module
        return _patches(self._padded(self._batched(x)), m.kernel_size, m.stride, m.dilation, m.groups)

    def outputs(self, g: Tensor) -> Tensor:
        return _channels_last(self._batched(g), self.module.groups)

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.ndim == self.weight.ndim else x.unsqueeze(0)

    def _padded(self, x: Tensor) -> Tensor:
        m = self.module
        amounts = m._reversed_padding_repeated_twice  # what torch itself pads with, "same" included
        mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
        return pad(x, amounts, mode=mode) if any(amounts) else x


class TransposedConvolutionLayer(Layer):
    """``nn.ConvTranspose1d`` to ``3d``: each input position adds ``W x`` to a patch of the output.

    The bias is not a part of ``W x``, since it is added once to each output position.
    """

    folds_bias = False

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.blocks = module.groups
        self.d = math.prod(module.weight.shape[1:])
        self.p = module.in_channels // module.groups

    def inputs(self, x: Tensor) -> Tensor:
        return _channels_last(self._batched(x), self.module.groups)

    def outputs(self, g: Tensor) -> Tensor:
        """Patches of the gradient, at the places to which the input positions wrote."""
        m = self.module
        amounts = [amount for side in reversed(m.padding) for amount in (side, side)]
        return _patches(pad(self._batched(g), amounts), m.kernel_size, m.stride, m.dilation, m.groups)

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.ndim == self.weight.ndim else x.unsqueeze(0)

    def _to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.blocks, self.p, self.d).mT

    def _from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.mT.reshape(self.weight.shape)


def _channels_last(x: Tensor, groups: int) -> Tensor:
    """``(groups, samples, positions, channels)`` from ``(samples, all channels, *positions)``."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:])).permute(1, 0, 3, 2)


def _patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Tensor:
    """``(groups, samples, positions, channels * kernel)``: what each position of a convolution sees."""
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    samples, channels = x.shape[:2]
    dims = len(kernel)
    positions = math.prod(x.shape[2 : 2 + dims])
    x = x.reshape(samples, groups, channels // groups, positions, math.prod(kernel))
    return x.permute(1, 0, 3, 2, 4).flatten(-2)


KINDS: dict[type[nn.Module], Callable[[Any], Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.Conv3d: ConvolutionLayer,
    nn.ConvTranspose1d: TransposedConvolutionLayer,
    nn.ConvTranspose2d: TransposedConvolutionLayer,
    nn.ConvTranspose3d: TransposedConvolutionLayer,
}
"""How each kind of module is seen; subclasses count as their base."""


def layer_of(module: nn.Module) -> Layer | None:
    """A module as a layer, or None where it is of no known kind."""
    return next((kind(module) for base, kind in KINDS.items() if isinstance(module, base)), None)
