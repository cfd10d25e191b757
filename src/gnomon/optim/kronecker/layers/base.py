"""What a layer is: a weight with its bias as a batch of matrices, and the rows that a batch of data gives for it.

A layer is a batch of linear maps ``y = W x`` with ``W`` of shape ``(blocks, d, p)``: the weight, with the bias as a
last column where there is one. The input of its module and the gradient of its output give rows ``x`` and ``g`` with

    dl/dW = sum_n g_n x_n^T

exactly, whatever the stride, padding, dilation or grouping. Nothing here knows of an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ....linalg import promoted
from ..factor_forms import FactorForm, FactorPair

Approximation = Literal["expand", "reduce"]
"""How positions that share a weight count: ``expand`` has a row for each position, ``reduce`` one for each sample."""

State = dict[str, Any]
"""The state of a parameter, by name."""
States = dict[nn.Parameter, State]
Settings = dict[str, Any]
"""The settings of a parameter group, by name."""
Item = TypeVar("Item")
Side = Literal["K", "C"]
"""The input factor K or the output factor C."""
Turn = Callable[[Tensor, int], None]
"""Makes directions of averages of ``C C^T G K K^T`` in place, for layers as one batch ``(blocks, d, p)`` at a step.

Only their directions matter: a step has a given root mean square."""

WHOLE = "gnomon_whole"
"""The attribute of a plain parameter that holds a rank's part of another tensor: that tensor, as a ``DTensor``."""
SMALL = 2**16
"""Layers with at most so many entries are handled together where they are alike: their products take less time than the
calls that start them. The results agree to rounding."""
LATTICE_ROWS = 0.4
"""The least number of rows that a lattice of positions may leave, over the size of the larger factor. A factor
remembers about ten updates, so that it sees four times as many rows as it is large."""


@dataclass(frozen=True)
class Thinning:
    """Which rows of a batch are used: every n-th sample, and every n-th position along each axis."""

    samples: int = 1
    positions: int = 1
    """Samples take turns in the position where they begin, so that all borders are used."""


class Layer:
    """A weight and its bias as matrices ``(blocks, d, p)``, with rows from a module's inputs and output gradients.

    The methods describe a module that maps the last dimension of its input, as ``nn.Linear`` does; all dimensions
    between the first and the last are positions. Other kinds override :meth:`inputs` and :meth:`outputs`, and where the
    weight is stored in another order, :meth:`to_matrix` and :meth:`from_matrix`.
    """

    blocks: int = 1
    d: int
    p: int
    takes_indices: bool = False
    """Whether the inputs are indices; each stands for a unit vector of length p."""
    rows_give_gradient: bool = False
    """Whether the last dimension of an input is a row, and the gradient is exactly ``g^T x`` in the weight's layout."""
    is_transposed: bool = False
    """Whether the weight stores ``W^T`` for each of several blocks, so that only ``W^T`` can be a view of it."""
    has_axes: bool = False
    """Whether channels come first and positions lie along axes behind them, as in convolutions."""
    usual_approximation: Approximation = "expand"
    """``expand`` suits a loss with a term for each position, ``reduce`` positions that are pooled before the loss."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None, module: Any = None) -> None:
        self.weight, self.module, self.shape = weight, module, as_whole(weight).shape
        self.bias = bias if bias is not None and bias.requires_grad else None

    # ------------------------------------------------------------------ the matrix
    @property
    def size(self) -> int:
        """The number of entries of the matrices."""
        return self.blocks * self.d * self.p

    @property
    def width(self) -> int:
        """The number of inputs that the length of a step depends on."""
        return self.p

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight, and the bias where it is a column of the matrix."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def matrix(self, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return tensors shaped as weight and bias as one batch of matrices; a view without a bias, else in ``out``."""
        matrix = self.to_matrix(weight)
        return matrix if bias is None else torch.cat([matrix, bias.reshape(self.blocks, self.d, 1)], -1, out=out)

    def tensors(self, matrix: Tensor) -> list[Tensor]:
        """Return the tensors of a matrix, in the order of :attr:`parameters`: the inverse of :meth:`matrix`."""
        if self.bias is None:
            return [self.from_matrix(matrix)]
        return [self.from_matrix(matrix[..., :-1]), matrix[..., -1].reshape(self.bias.shape)]

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Return a tensor shaped as the weight as matrices ``(blocks, d, p)`` without the bias."""
        return weight.reshape(self.blocks, self.d, -1)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Return the tensor of a matrix: the inverse of :meth:`to_matrix`."""
        return matrix.reshape(self.shape)

    # ------------------------------------------------------------------ rows
    def inputs(self, x: Tensor, every: int = 1, start: int = 0) -> Tensor:
        """Return the module's input as rows ``(blocks, samples, positions, p)``, without the bias's column of ones.

        Where positions have axes, every n-th position along each axis is taken, from ``start`` on.
        """
        return _by_position(x).unsqueeze(0)

    def outputs(self, g: Tensor, every: int = 1, start: int = 0) -> Tensor:
        """Return the gradient of the module's output as rows ``(blocks, samples, positions, d)``."""
        return _by_position(g).unsqueeze(0)

    def mean_inputs(self, x: Tensor) -> Tensor:
        """Return the means of :meth:`inputs` over positions, ``(blocks, samples, p)``."""
        return self.inputs(x).mean(2)

    def rows(
        self, x: Tensor, g: Tensor, approximation: Approximation = "expand", every: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return rows ``x`` of shape ``(blocks, n, p)`` and ``g`` of shape ``(blocks, n, d)``."""
        if approximation == "reduce":
            x, g = self.mean_inputs(x), self.outputs(g).sum(2)
        elif self.has_axes:
            x, g = self._rows_of_lattice(x, g, every)
        else:
            x, g = self.inputs(x).flatten(1, 2), self.outputs(g).flatten(1, 2)
        return (torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if self.bias is not None else x), g

    def _rows_of_lattice(self, x: Tensor, g: Tensor, every: int) -> tuple[Tensor, Tensor]:
        """Return one row for each n-th position along each axis; samples take turns in where they begin."""
        x, g = self.batched(x), self.batched(g)
        starts = range(every)
        return (
            torch.cat([self.inputs(x[start::every], every, start).flatten(1, 2) for start in starts], 1),
            torch.cat([self.outputs(g[start::every], every, start).flatten(1, 2) for start in starts], 1),
        )

    def batched(self, x: Tensor) -> Tensor:
        """Return an input or output of a module with axes, with a dimension of samples."""
        return x if x.ndim == self.weight.ndim else x.unsqueeze(0)

    # ------------------------------------------------------------------ how many rows
    def samples(self, x: Tensor) -> int:
        """Return the number of samples in an input, which are along its first dimension if there are several."""
        if self.has_axes:
            return self.batched(x).shape[0]
        return x.shape[0] if x.ndim > 1 else 1

    def count(self, x: Tensor, g: Tensor, approximation: Approximation) -> int:
        """Return the number of rows that an input and an output gradient give."""
        return self.samples(x) if approximation == "reduce" else g.numel() // (self.blocks * self.d)

    def thinning(self, x: Tensor, g: Tensor, approximation: Approximation, ranks: int = 1) -> Thinning:
        """Return a thinning to one sample in four or two, if enough rows are left.

        Twice as many rows as either factor is large are enough. Where only every second position is taken, once as many
        rows are enough, because they are less alike. Each rank is assumed to have as many rows as this one. The steps
        are powers of two, so that ranks together take the same samples as one process with the whole batch.
        """
        samples, every = self.samples(x), self._lattice(x, g, ranks) if approximation == "expand" else 1
        rows = ranks * self.count(x, g, approximation) // every ** (g.ndim - 2)
        enough = (2 if every == 1 else 1) * max(self.p, self.d)
        stride = next(stride for stride in (4, 2, 1) if stride == 1 or rows >= stride * enough)
        return Thinning(1 if samples == 1 else stride, every)

    def _lattice(self, x: Tensor, g: Tensor, ranks: int) -> int:
        """Return 2 if every second position along each axis leaves rows enough, and otherwise 1.

        Neighbours are much alike.
        """
        dims = self.weight.ndim - 2
        if not self.has_axes or self.samples(x) < 2 or min(*x.shape[-dims:], *g.shape[-dims:]) < 2:
            return 1
        left = ranks * self.count(x, g, "expand") / 2**dims
        return 2 if left >= LATTICE_ROWS * max(self.p, self.d) else 1


def _by_position(x: Tensor) -> Tensor:
    """Return ``(samples, positions, features)`` from a vector or from any number of leading dimensions."""
    x = x.reshape(1, -1) if x.ndim == 1 else x
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.numel() else x.new_zeros(0, 1, x.shape[-1])


# ---------------------------------------------------------------------- layers with factors
@dataclass(eq=False)
class FactoredLayer:
    """A matrix of the model with the forms of its two factors. It holds no state."""

    index: int
    name: str
    layer: Layer
    views: list[Layer]
    """The layers of the modules whose rows describe the matrix; none where no hook can see them."""
    pair: FactorPair
    rows: int = 0
    """The number of rows in the first batch, over all ranks; 0 where no hook has seen any."""
    turn: Turn | None = None
    """What the average of the layer's directions goes through. Layers with the same function are handled together."""

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.weight

    def form(self, side: str) -> FactorForm:
        """Return the form of the factor K or C."""
        return self.pair.left if side == "K" else self.pair.right

    @property
    def computing_dtype(self) -> torch.dtype:
        """The type in which statistics and factors are computed: that of the weight, and float32 at least."""
        return promoted(self.layer.weight.dtype, torch.float32)

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Layers of one kind are handled as one batch of blocks; a large layer is its own kind."""
        layer = self.layer
        alone = self.index if layer.size > SMALL else None
        # Equal pairs are one object, which is quicker to compare than the pairs themselves.
        return alone, id(self.pair), layer.blocks, layer.bias is None, layer.weight.dtype, layer.weight.device


@dataclass
class Move:
    """A layer that has a gradient, with the settings of its parameters."""

    layer: FactoredLayer
    group: Settings
    """The settings of the weight."""
    groups: dict[nn.Parameter, Settings]
    """The settings of each parameter with a gradient."""


@dataclass
class Part:
    """A parameter of a layer with its part of the layer's direction."""

    p: nn.Parameter
    group: Settings
    direction: Tensor
    layer: int
    """The place of the layer among those that move together."""


def as_whole(p: Tensor) -> Tensor:
    """Return the tensor of which a parameter is a part; the parameter itself, where it is whole or a ``DTensor``."""
    whole: Tensor = getattr(p, WHOLE, p)
    return whole


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters of a model with their names."""
    return {p: name for name, p in model.named_parameters()}


def alike(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Return the items in lists of equal keys, in the order of the first of each."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension; a single one stays as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def parted(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Divide a tensor into equal parts, which is the inverse of :func:`cat`."""
    return [tensor] if count == 1 else tensor.chunk(count)


class Stack:
    """Layers of one kind with their states, as one batch of blocks."""

    def __init__(self, layers: Sequence[FactoredLayer], states: States) -> None:
        self.layers, self._states = layers, [states[layer.layer.weight] for layer in layers]
        self.pair, self.dtype = layers[0].pair, layers[0].computing_dtype

    def __len__(self) -> int:
        return len(self.layers)

    def form(self, side: str) -> FactorForm:
        """Return the form of the factor K or C."""
        return self.pair.left if side == "K" else self.pair.right

    def get(self, key: str) -> Tensor:
        """Return a tensor of the state of each layer, block after block."""
        return cat([state[key] for state in self._states])

    def set(self, key: str, values: Tensor) -> None:
        for state, value in zip(self._states, parted(values, len(self)), strict=True):
            state[key] = value

    def each(self, key: str, function: Callable[[FactoredLayer, Tensor], Tensor]) -> None:
        """Replace a tensor of each layer's state by a function of it."""
        for layer, state in zip(self.layers, self._states, strict=True):
            state[key] = function(layer, state[key])


def move_state(state: State, p: Tensor, dtypes: dict[str, torch.dtype] | None = None) -> None:
    """Move the state of a parameter to its device, its momentum also to its type, other tensors to given types."""
    wanted = {"momentum_buffer": p.dtype, **(dtypes or {})}
    for key, value in state.items():
        if isinstance(value, Tensor):
            dtype = wanted.get(key, value.dtype)
            if (value.dtype, value.device) != (dtype, p.device):
                state[key] = value.to(p.device, dtype)
