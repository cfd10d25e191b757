"""The layers of a model: which matrices it has, and the modules whose rows describe them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from .base import Approximation, Layer, Thinning
from .convolution import ConvolutionLayer, TransposedConvolutionLayer
from .embedding import EmbeddingLayer
from .linear import InputMajorLinearLayer, LinearLayer
from .matrix import MatrixLayer, bare_layers, hidden_matrices

__all__ = ["Approximation", "Layer", "Matrix", "Thinning", "find_matrices", "is_known", "layer_of"]

Kind = Callable[[Any, nn.Parameter | None, bool], Layer]

KINDS: dict[type[nn.Module], Kind] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.Conv3d: ConvolutionLayer,
    nn.ConvTranspose1d: TransposedConvolutionLayer,
    nn.ConvTranspose2d: TransposedConvolutionLayer,
    nn.ConvTranspose3d: TransposedConvolutionLayer,
    nn.Embedding: EmbeddingLayer,
}
"""The layer of each kind of module; a subclass of a module counts as its base."""

KINDS_BY_NAME: dict[str, Kind] = {"transformers.pytorch_utils.Conv1D": InputMajorLinearLayer}
"""The same for classes of libraries that need not be installed."""


def _kind(module: nn.Module) -> Kind | None:
    known = (kind for base, kind in KINDS.items() if isinstance(module, base))
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)
    named = (KINDS_BY_NAME[name] for name in names if name in KINDS_BY_NAME)
    return next(known, None) or next(named, None)


def is_known(module: nn.Module) -> bool:
    """Return whether a module is of a known kind and its weight is a parameter with dense gradients.

    A weight that is computed from other parameters (weight norm, a parametrization) is no parameter.
    """
    known = _kind(module) is not None and not getattr(module, "sparse", False)
    return known and "weight" in dict(module.named_parameters(recurse=False))


def layer_of(module: nn.Module, fold_bias: bool = True, average: bool = False) -> Layer:
    """Return the layer of a module of a known kind; with ``fold_bias`` its bias is a column of the matrix."""
    kind = _kind(module)
    assert kind is not None, f"{type(module).__name__} is of no known kind"
    return kind(module, getattr(module, "bias", None) if fold_bias else None, average)


@dataclass
class Matrix:
    """A trainable matrix of a model: its name, its layer, and the layers of the modules whose rows describe it."""

    name: str
    layer: Layer
    views: list[Layer]


def find_matrices(
    model: nn.Module, bare: bool = False, average: bool = False, apart: Collection[nn.Parameter] = ()
) -> list[Matrix]:
    """Return the trainable matrices of a model; each parameter is in one of them at most.

    A weight that several modules share is one matrix, described by all modules that apply it alike; where an embedding
    shares the weight of a linear layer, the linear layer describes it. With ``bare``, the weights of recurrent modules
    and parameters of two or more dimensions that belong to no known module are matrices too. ``average`` is that of
    :class:`ConvolutionLayer`. Biases in ``apart``, and biases that another matrix has, are not folded into a matrix.
    """
    found: dict[nn.Parameter, Matrix] = {}
    sharers: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    taken = {id(p) for p in apart}
    for name, module in model.named_modules():
        for part, hidden in hidden_matrices(module, recurrent=bare):
            if hidden.weight not in found:
                bias = None if id(hidden.bias) in taken else hidden.bias
                layer = MatrixLayer(hidden.weight, bias, hidden.blocks)
                found[layer.weight] = Matrix(f"{name}.{part}".lstrip("."), layer, [])
                taken |= {id(p) for p in layer.parameters[1:]}
        if is_known(module):
            sharers.setdefault(module.weight, []).append((name, module))
    for weight, modules in sharers.items():
        if weight not in found:
            found[weight] = _shared_matrix(modules, average, taken)
            taken |= {id(p) for p in found[weight].layer.parameters[1:]}
    if bare:
        for name, bare_layer in bare_layers(model):
            found.setdefault(bare_layer.weight, Matrix(name, bare_layer, []))
    return [matrix for weight, matrix in found.items() if weight.requires_grad and weight.numel()]


def _shared_matrix(modules: list[tuple[str, nn.Module]], average: bool, taken: set[int]) -> Matrix:
    readers = [(name, m) for name, m in modules if not isinstance(m, nn.Embedding)] or modules
    biases = {id(getattr(m, "bias", None)) for _, m in readers}
    # If one weight has several biases, each bias is a parameter of its own.
    fold_bias = len(biases) == 1 and taken.isdisjoint(biases)
    views = [layer_of(m, fold_bias, average) for _, m in readers]
    shapes = [(type(view), view.blocks, view.d, view.p) for view in views]
    alike = [view for view, shape in zip(views, shapes, strict=True) if shape == shapes[0]]
    return Matrix(readers[0][0], views[0], alike)
