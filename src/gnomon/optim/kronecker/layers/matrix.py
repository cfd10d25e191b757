"""Matrices whose rows no hook can see: projections of attention, gates of recurrent layers, bare parameters.

Their factors come from the gradient matrix. A parameter that holds several matrices has factors for each of them: the
queries, keys and values of an attention module, the gates of a recurrent layer, the experts of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from .base import Layer, as_whole
from .embedding import EmbeddingLayer


class MatrixLayer(Layer):
    """A parameter of two or more dimensions, the first against the others, that no module shows the rows of.

    Several blocks lie one after the other along the first dimension.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None, blocks: int = 1) -> None:
        super().__init__(weight, bias)
        self.blocks, self.d = blocks, self.shape[0] // blocks
        self.p = math.prod(self.shape[1:]) + (self.bias is not None)


class StackLayer(Layer):
    """A parameter of shape ``(blocks, d, p)``: a stack of matrices, as those of experts or of heads."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight)
        self.blocks, self.d, self.p = self.shape


# ---------------------------------------------------------------------- matrices inside of modules
class HiddenMatrix(NamedTuple):
    """A weight that a module applies by itself, with its bias and the number of matrices that it holds."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    blocks: int


GATES: dict[type[nn.Module], int] = {
    nn.LSTM: 4,
    nn.LSTMCell: 4,
    nn.GRU: 3,
    nn.GRUCell: 3,
    nn.RNN: 1,
    nn.RNNCell: 1,
}
"""The number of matrices, one below the other, in the weights of recurrent modules."""


def hidden_matrices(module: nn.Module, recurrent: bool) -> Iterator[tuple[str, HiddenMatrix]]:
    """Yield the matrices of an attention module, or of a recurrent one, by name."""
    if isinstance(module, nn.MultiheadAttention):
        yield from attention_matrices(module)
    elif recurrent and isinstance(module, tuple(GATES)):
        yield from recurrent_matrices(module, next(gates for kind, gates in GATES.items() if isinstance(module, kind)))


def attention_matrices(module: nn.MultiheadAttention) -> Iterator[tuple[str, HiddenMatrix]]:
    """Yield the projections of an attention module, which calls no module that a hook could watch."""
    parts: dict[str, Any] = dict(module.named_parameters())
    pairs = {
        "in_proj_weight": ("in_proj_weight", "in_proj_bias", 3),
        "q_proj_weight": ("q_proj_weight", "", 1),
        "k_proj_weight": ("k_proj_weight", "", 1),
        "v_proj_weight": ("v_proj_weight", "", 1),
        "out_proj": ("out_proj.weight", "out_proj.bias", 1),
    }
    for name, (weight, bias, blocks) in pairs.items():
        if weight in parts:  # a weight that is computed from others is not
            yield name, HiddenMatrix(parts[weight], parts.get(bias), blocks)


def recurrent_matrices(module: nn.Module, gates: int) -> Iterator[tuple[str, HiddenMatrix]]:
    """Yield the weights of a recurrent module, for each layer and direction.

    These are the weights from the input (``ih``) and from the hidden state (``hh``), and the projection of the hidden
    state (``hr``).

    All time steps run in one call of torch, which shows neither hidden states nor gradients of gates. A bias is a
    column of the weight with which it is added.
    """
    parts: dict[str, Any] = dict(module.named_parameters(recurse=False))
    for name, weight in parts.items():
        if name.startswith("weight_") and weight.ndim == 2:
            bias = parts.get(name.replace("weight_", "bias_", 1))
            yield name, HiddenMatrix(weight, bias, 1 if name.startswith("weight_hr") else gates)


# ---------------------------------------------------------------------- bare parameters
PARAMETRIZATIONS = "parametrizations."
"""Where torch keeps the parameters from which a weight is computed, as with weight norm."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def bare_layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Yield the parameters of a model that are matrices, or stacks of them, whatever module has them.

    One with three dimensions is a stack of matrices, except in convolutions, where the last one has the positions of
    a kernel. With more dimensions it is one matrix, the first dimension against the others.
    """
    for prefix, module in model.named_modules():
        owner = model.get_submodule(prefix.partition(PARAMETRIZATIONS)[0].rstrip("."))
        for name, p in module.named_parameters(prefix, recurse=False):
            if not is_matrix(p):
                continue
            if isinstance(module, nn.EmbeddingBag):
                yield name, EmbeddingLayer(module, None)
            else:
                is_stack = p.ndim == 3 and not isinstance(owner, CONVOLUTIONS)
                yield name, StackLayer(p) if is_stack else MatrixLayer(p)


def is_matrix(p: nn.Parameter) -> bool:
    """Return whether a parameter maps vectors to vectors, as far as its shape tells.

    One with a single dimension above 1 is a vector, and one whose first dimension is 1 is added to all samples, as
    position embeddings of shape ``(1, positions, width)`` are.
    """
    shape = as_whole(p).shape
    return len(shape) >= 2 and shape[0] > 1 and sum(size > 1 for size in shape) > 1
