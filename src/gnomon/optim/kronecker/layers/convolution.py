"""Convolutions as matrices: linear maps of patches, which positions share."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...torch_internals import convolution_padding
from .base import Approximation, Layer


class ConvolutionLayer(Layer):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: a linear map of patches, one for each group of channels.

    With ``average`` the groups are one map to all output channels, of the mean of the groups' patches, as in the
    paper's runs; the rows then do not give the gradient.
    """

    has_axes = True
    usual_approximation = "reduce"

    def __init__(self, module: Any, bias: nn.Parameter | None, average: bool = False) -> None:
        super().__init__(module.weight, bias, module)
        self.average = average
        self.blocks = 1 if average else module.groups
        self.d = module.out_channels // self.blocks
        self.p = math.prod(module.weight.shape[1:]) + (self.bias is not None)

    @property
    def width(self) -> int:
        """The larger one of the channels and the positions of a patch: neighbouring positions are much alike."""
        channels, *kernel = self.weight.shape[1:]
        return max(channels, math.prod(kernel))

    def inputs(self, x: Tensor, every: int = 1, start: int = 0) -> Tensor:
        m = self.module
        return _patches(self._prepared(x), m.kernel_size, m.stride, m.dilation, self.blocks, every, start)

    def mean_inputs(self, x: Tensor) -> Tensor:
        m, x = self.module, self._merged(x)
        amounts = convolution_padding(m)
        if m.padding_mode != "zeros":
            x, amounts = self._padded(x), [0] * len(amounts)
        padding = [*zip(amounts[::2], amounts[1::2], strict=True)][::-1]
        return _mean_patches(x, m.kernel_size, m.stride, m.dilation, padding, self.blocks)

    def _prepared(self, x: Tensor) -> Tensor:
        """Return the input as patches are cut from it."""
        return self._padded(self._merged(x))

    def _merged(self, x: Tensor) -> Tensor:
        """Return the mean over groups where it is that of patches, and otherwise the input.

        Before patches are cut the mean is cheaper.
        """
        m, x = self.module, self.batched(x)
        return x.unflatten(1, (m.groups, -1)).mean(1) if self.average and m.groups > 1 else x

    def outputs(self, g: Tensor, every: int = 1, start: int = 0) -> Tensor:
        return _channels_last(self.batched(g), self.blocks, every, start)

    def _padded(self, x: Tensor) -> Tensor:
        m = self.module
        amounts = convolution_padding(m)
        mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
        return pad(x, amounts, mode=mode) if any(amounts) else x


class TransposedConvolutionLayer(Layer):
    """``nn.ConvTranspose1d`` to ``3d``: each input position adds ``W x`` to a patch of the output.

    The bias is not a part of ``W x``, since it is added once to each output position.
    """

    has_axes = True
    usual_approximation = "reduce"

    def __init__(self, module: Any, bias: nn.Parameter | None, average: bool = False) -> None:
        super().__init__(module.weight, None, module)
        self.is_transposed = module.groups > 1
        self.blocks = module.groups
        self.d = math.prod(module.weight.shape[1:])
        self.p = module.in_channels // module.groups

    def count(self, x: Tensor, g: Tensor, approximation: Approximation) -> int:
        return self.samples(x) if approximation == "reduce" else x.numel() // (self.blocks * self.p)

    def inputs(self, x: Tensor, every: int = 1, start: int = 0) -> Tensor:
        return _channels_last(self.batched(x), self.module.groups, every, start)

    def outputs(self, g: Tensor, every: int = 1, start: int = 0) -> Tensor:
        """Return patches of the gradient, at the places to which the input positions wrote."""
        m = self.module
        # Output padding adds places at the end to which no input position wrote.
        sides = zip(reversed(m.padding), reversed(m.output_padding), strict=True)
        amounts = [amount for side, extra in sides for amount in (side, side - extra)]
        g = pad(self.batched(g), amounts)
        return _patches(g, m.kernel_size, m.stride, m.dilation, m.groups, every, start)

    def to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.blocks, self.p, self.d).mT

    def from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.mT.reshape(self.weight.shape)


def _channels_last(x: Tensor, groups: int, every: int = 1, start: int = 0) -> Tensor:
    """Return ``(groups, samples, positions, channels)`` from ``(samples, all channels, *positions)``."""
    if every > 1:
        x = x[(slice(None),) * 2 + (slice(start, None, every),) * (x.ndim - 2)]
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:])).permute(1, 0, 3, 2)


def _patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    every: int = 1,
    start: int = 0,
) -> Tensor:
    """Return what each position of a convolution sees, of shape ``(groups, samples, positions, channels * kernel)``."""
    if math.prod(kernel) == 1 and set(stride) == {1}:
        return _channels_last(x, groups, every, start)
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.narrow(axis, start * step, x.shape[axis] - start * step)
        x = x.unfold(axis, gap * (size - 1) + 1, every * step)[..., ::gap]
    dims = len(kernel)
    x = x.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, 2 + dims)  # views: the values are copied once, below
    if math.prod(kernel) <= x.shape[2 + dims]:
        # A few long copies take a third of the time of many short ones.
        x, view = x.new_empty(x.shape), x
        for offset in itertools.product(*map(range, kernel)):
            place: tuple[Any, ...] = (..., *offset)
            x[place] = view[place]
    return x.reshape(groups, x.shape[1], math.prod(x.shape[2 : 2 + dims]), -1)


def _mean_patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: list[tuple[int, int]],
    groups: int,
) -> Tensor:
    """Return the mean of :func:`_patches` over positions, for an input with zero padding, computed without patches.

    Along one axis after the other, the last first, it is a product with few rows.
    """
    samples, dims = x.shape[0], len(kernel)
    for size, step, gap, sides in reversed([*zip(kernel, stride, dilation, padding, strict=True)]):
        means = _window_means(x.shape[-1], size, step, gap, sides, x.dtype, x.device)
        x = (means @ x.reshape(-1, x.shape[-1]).mT).unflatten(1, x.shape[:-1])
    by_channel = x.flatten(0, dims - 1).unflatten(2, (groups, -1)).permute(2, 1, 3, 0)
    return by_channel.reshape(groups, samples, -1)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached, so it must be usable outside of inference mode
def _window_means(
    length: int, size: int, step: int, gap: int, sides: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return weights ``(size, length)`` of places along an axis.

    They say what each place counts in the mean of what an offset in the kernel sees.
    """
    before, after = sides
    means = torch.zeros(size, before + length + after, dtype=dtype)
    positions = (means.shape[1] - gap * (size - 1) - 1) // step + 1
    for offset, places in enumerate(means):
        places[offset * gap :: step][:positions] = 1 / positions
    return means.narrow(1, before, length).contiguous().to(device)
