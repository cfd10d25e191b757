"""Layers as matrices: what a second-order method needs to know of a model.

Each kind of module is a batch of linear maps ``y = W x`` with ``W`` of shape ``(blocks, d, p)``: its weight, with the
bias as a last column where it has one. From a module's input and the gradient of its output come rows ``x`` and ``g``
with

    dl/dW = sum_n g_n x_n^T

exactly, whatever the stride, padding, dilation or grouping. Parameters that no hook can see the inputs of, such as
those of ``nn.MultiheadAttention``, are matrices without rows. Nothing here knows of an algorithm.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

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


LATTICE_ROWS = 0.4
"""Rows that positions must leave, over the size of the larger factor: with the ten updates or so that a factor
remembers they are four times as many as it is large."""


class SpatialLayer(ModuleLayer):
    """Channels first, positions behind them; the samples may be missing."""

    usual_approximation = "reduce"

    @abstractmethod
    def inputs(self, x: Tensor, every: int = 1, start: int = 0) -> Tensor:
        """As for any module, at ``every`` such position along each axis from a start."""

    @abstractmethod
    def outputs(self, g: Tensor, every: int = 1, start: int = 0) -> Tensor:
        """The same."""

    def _expanded(self, x: Tensor, g: Tensor, every: int) -> tuple[Tensor, Tensor]:
        x, g = self._batched(x), self._batched(g)
        starts = range(every)
        return (
            torch.cat([self.inputs(x[start::every], every, start).flatten(1, 2) for start in starts], 1),
            torch.cat([self.outputs(g[start::every], every, start).flatten(1, 2) for start in starts], 1),
        )

    def _lattice(self, x: Tensor, g: Tensor, ranks: int) -> int:
        """Every second one, where that leaves rows enough: neighbours see much the same."""
        dims = self.weight.ndim - 2
        if self.samples(x) < 2 or min(*x.shape[-dims:], *g.shape[-dims:]) < 2:
            return 1
        left = ranks * self.count(x, g, "expand") / 2**dims
        return 2 if left >= LATTICE_ROWS * max(self.p, self.d) else 1

    def samples(self, x: Tensor) -> int:
        return self._batched(x).shape[0]

    def _batched(self, x: Tensor) -> Tensor:
        return x if x.ndim == self.weight.ndim else x.unsqueeze(0)


class ConvolutionLayer(SpatialLayer):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: a linear map of patches, one for each group of channels.

    With ``average`` the groups are one map to all output channels, of the mean of the groups' patches, as in the
    paper's runs; the rows then do not give the gradient.
    """

    def __init__(self, module: Any, **options: bool) -> None:
        super().__init__(module, **options)
        self.blocks = 1 if self.average else module.groups
        self.d = module.out_channels // self.blocks
        self.p = math.prod(module.weight.shape[1:]) + (self.bias is not None)

    def inputs(self, x: Tensor, every: int = 1, start: int = 0) -> Tensor:
        m = self.module
        return _patches(self._prepared(x), m.kernel_size, m.stride, m.dilation, self.blocks, every, start)

    def mean_inputs(self, x: Tensor) -> Tensor:
        m = self.module
        return _mean_patches(self._prepared(x), m.kernel_size, m.stride, m.dilation, self.blocks)

    def _prepared(self, x: Tensor) -> Tensor:
        """The input as patches are cut from it."""
        m, x = self.module, self._batched(x)
        if self.average and m.groups > 1:
            x = x.unflatten(1, (m.groups, -1)).mean(1)  # before the patches are cut: the same, and cheaper
        return self._padded(x)

    def outputs(self, g: Tensor, every: int = 1, start: int = 0) -> Tensor:
        return _channels_last(self._batched(g), self.blocks, every, start)

    def _padded(self, x: Tensor) -> Tensor:
        m = self.module
        amounts = m._reversed_padding_repeated_twice  # what torch itself pads with, "same" included
        mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
        return pad(x, amounts, mode=mode) if any(amounts) else x


class TransposedConvolutionLayer(SpatialLayer):
    """``nn.ConvTranspose1d`` to ``3d``: each input position adds ``W x`` to a patch of the output.

    The bias is not a part of ``W x``, since it is added once to each output position.
    """

    folds_bias = False

    def __init__(self, module: Any, **options: bool) -> None:
        super().__init__(module, **options)
        self.blocks = module.groups
        self.d = math.prod(module.weight.shape[1:])
        self.p = module.in_channels // module.groups

    def count(self, x: Tensor, g: Tensor, approximation: Approximation) -> int:
        return self.samples(x) if approximation == "reduce" else x.numel() // (self.blocks * self.p)

    def inputs(self, x: Tensor, every: int = 1, start: int = 0) -> Tensor:
        return _channels_last(self._batched(x), self.module.groups, every, start)

    def outputs(self, g: Tensor, every: int = 1, start: int = 0) -> Tensor:
        """Patches of the gradient, at the places to which the input positions wrote."""
        m = self.module
        # Output padding adds places at the end to which no input position wrote.
        sides = zip(reversed(m.padding), reversed(m.output_padding), strict=True)
        amounts = [amount for side, extra in sides for amount in (side, side - extra)]
        g = pad(self._batched(g), amounts)
        return _patches(g, m.kernel_size, m.stride, m.dilation, m.groups, every, start)

    def _to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.blocks, self.p, self.d).mT

    def _from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.mT.reshape(self.weight.shape)


def _channels_last(x: Tensor, groups: int, every: int = 1, start: int = 0) -> Tensor:
    """``(groups, samples, positions, channels)`` from ``(samples, all channels, *positions)``."""
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
    """``(groups, samples, positions, channels * kernel)``: what each position of a convolution sees."""
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
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Tensor:
    """The mean of :func:`_patches` over positions, from means along one axis after the other, without patches."""
    for axis in reversed(range(2, 2 + len(kernel))):
        size, step, gap = kernel[axis - 2], stride[axis - 2], dilation[axis - 2]
        last = x.shape[axis] - gap * (size - 1) - 1
        windows = [x.narrow(axis, gap * offset, last // step * step + 1) for offset in range(size)]
        strided = [window[(slice(None),) * axis + (slice(None, None, step),)] for window in windows]
        x = torch.stack([window.mean(axis) for window in strided], axis)
    return x.reshape(x.shape[0], groups, -1).movedim(1, 0)


KINDS: dict[type[nn.Module], Callable[..., ModuleLayer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.Conv3d: ConvolutionLayer,
    nn.ConvTranspose1d: TransposedConvolutionLayer,
    nn.ConvTranspose2d: TransposedConvolutionLayer,
    nn.ConvTranspose3d: TransposedConvolutionLayer,
    nn.Embedding: EmbeddingLayer,
}
"""How each kind of module is seen; subclasses count as their base."""

KINDS_BY_NAME: dict[str, Callable[..., ModuleLayer]] = {"transformers.pytorch_utils.Conv1D": InputMajorLinearLayer}
"""The same for classes of libraries that need not be installed."""


def _kind(module: nn.Module) -> Callable[..., ModuleLayer] | None:
    known = (kind for base, kind in KINDS.items() if isinstance(module, base))
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)
    named = (KINDS_BY_NAME[name] for name in names if name in KINDS_BY_NAME)
    return next(known, None) or next(named, None)


def is_known(module: nn.Module) -> bool:
    """Whether a module is of a known kind, with a weight of its own.

    A weight that is computed (weight norm, a parametrization) is no parameter: what it is computed from is bare. Sparse
    gradients have no matrix.
    """
    known = _kind(module) is not None and not getattr(module, "sparse", False)
    return known and module._parameters.get("weight") is not None


def layer_of(module: nn.Module, **options: bool) -> ModuleLayer:
    """A module of a known kind as a layer."""
    kind = _kind(module)
    assert kind is not None, f"{type(module).__name__} is of no known kind"
    return kind(module, **options)


def attention_layers(module: nn.MultiheadAttention) -> Iterator[tuple[str, MatrixLayer]]:
    """The projections of an attention module, which applies them without calling a module that a hook could watch."""
    parts: dict[str, Any] = dict(module.named_parameters())
    pairs = {
        "in_proj_weight": ("in_proj_weight", "in_proj_bias", 3),
        "q_proj_weight": ("q_proj_weight", "", 1),
        "k_proj_weight": ("k_proj_weight", "", 1),
        "v_proj_weight": ("v_proj_weight", "", 1),
        "out_proj": ("out_proj.weight", "out_proj.bias", 1),
    }
    for name, (weight, bias, blocks) in pairs.items():
        if weight in parts:  # one that is computed from others is not
            yield name, MatrixLayer(parts[weight], parts.get(bias), blocks)


@dataclass
class Matrix:
    """A trainable matrix of a model: its name, its layer, and the modules whose rows describe it."""

    name: str
    layer: Layer
    views: list[ModuleLayer]


def find_matrices(
    model: nn.Module, bare: bool = False, average: bool = False, apart: Collection[nn.Parameter] = ()
) -> list[Matrix]:
    """The trainable matrices of a model, each parameter in one of them at most.

    A weight that several modules share is one matrix, described by all that apply it alike; where an embedding shares
    the weight of a linear layer, the linear layer describes it. With ``bare``, parameters of two or more dimensions
    that belong to no known module are matrices too. ``average`` is that of :class:`ConvolutionLayer`. Biases in
    ``apart`` are no part of a matrix, nor is a bias that another matrix has.
    """
    found: dict[nn.Parameter, Matrix] = {}
    sharers: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for part, layer in attention_layers(module):
                found.setdefault(layer.weight, Matrix(f"{name}.{part}".lstrip("."), layer, []))
        elif is_known(module):
            sharers.setdefault(module.weight, []).append((name, module))
    taken = {id(p) for p in apart} | {id(m.layer.bias) for m in found.values() if m.layer.bias is not None}
    for weight, modules in sharers.items():
        if weight not in found:
            found[weight] = _shared_matrix(modules, average, taken)
            taken |= {id(p) for p in found[weight].layer.parameters[1:]}
    if bare:
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                found.setdefault(p, Matrix(name, MatrixLayer(p), []))
    return [matrix for weight, matrix in found.items() if weight.requires_grad and weight.numel()]


def _shared_matrix(modules: list[tuple[str, nn.Module]], average: bool, taken: set[int]) -> Matrix:
    readers = [(name, m) for name, m in modules if not isinstance(m, nn.Embedding)] or modules
    biases = {id(getattr(m, "bias", None)) for _, m in readers}
    # One weight with several biases: each bias is a parameter of its own.
    fold = len(biases) == 1 and taken.isdisjoint(biases)
    views = [layer_of(m, fold=fold, average=average) for _, m in readers]
    alike = [
        v
        for v in views
        if type(v) is type(views[0]) and (v.blocks, v.d, v.p) == (views[0].blocks, views[0].d, views[0].p)
    ]
    return Matrix(readers[0][0], views[0], alike)
