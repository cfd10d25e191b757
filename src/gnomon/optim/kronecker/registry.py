"""The layers of a model that have factors, as parameter groups name them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...groups import Diagonal
from ...manifolds import point_of
from .config import CurvatureConfig
from .factor_rule import FactorRule
from .layers import Layer, Matrix, find_matrices
from .layers.base import FactoredLayer, Settings, parameter_names
from .structures import (
    INNER,
    LARGE,
    SHORT,
    Structure,
    between_layers,
    check_structure,
    groups_for,
    largest_dense,
    unmatched,
)

WRAPPERS = ("_orig_mod.", "module.")
"""What ``torch.compile`` and ``DistributedDataParallel`` put before the names of a model."""

FOR_POINTS = "give points to gnomon.optim.moving_frame(torch.optim.SGD(point.parameters(), lr=...))"


@dataclass
class Found:
    """Parameters of a group, by what they belong to."""

    members: list[nn.Parameter]
    """The parameters of layers with factors."""
    others: list[nn.Parameter]
    layers: list[FactoredLayer]
    """The layers of the parameters that were not known before."""


class LayerRegistry:
    """Finds the layers of a model and gives each the forms of its factors."""

    def __init__(
        self,
        model: nn.Module,
        curvature: CurvatureConfig,
        rule: FactorRule,
        structure: Structure,
        max_dim: int | None,
    ) -> None:
        check_structure(structure)
        if max_dim is not None and (isinstance(max_dim, bool) or not isinstance(max_dim, int) or max_dim < 1):
            raise ValueError(f"max_dim must be a positive integer, or None for no limit, got {max_dim!r}")
        self._model, self._rule, self._structure, self._max_dim = model, rule, structure, max_dim
        self._by_gradient, self._average = curvature.curvature == "gradient", curvature.grouped == "average"
        # Without hooks curvature has other units, which only relative curvature lets stand beside the usual ones.
        self._bare = self._by_gradient or rule.relative
        self.layers: dict[nn.Parameter, FactoredLayer] = {}
        """The layers that groups have, by their weights."""
        self._indices = itertools.count()  # an index is never given again, also if its layer is gone
        for p, name in self.names().items():
            check_parameter(name, p)
        self._find_matrices(apart=())

    def _find_matrices(self, apart: Collection[nn.Parameter]) -> None:
        found = find_matrices(self._model, self._bare, self._average, apart)
        self._matrices = {matrix.layer.weight: matrix for matrix in found}
        linear = [m.layer for m in found if _is_linear(m.layer)]
        shapes = ((layer.blocks, layer.d, layer.p) for layer in linear)
        self._largest_dense = largest_dense(shapes, trained=sum(m.layer.size for m in found))
        hidden = between_layers([(_inputs(layer), layer.d) for layer in linear])
        self._hidden = {layer.weight: sides for layer, sides in zip(linear, hidden, strict=True)}

    def names(self) -> dict[nn.Parameter, str]:
        """Return the names of the model's parameters."""
        return parameter_names(self._model)

    def all_groups(self, asked: list[Settings]) -> list[Settings]:
        """Return the groups that were asked for, and one for all other parameters that can be trained.

        Coordinates of points on manifolds are left out: a step must move their frame too.
        """
        named = {id(p) for group in asked for p in group["params"]}
        trained = [p for p in self._model.parameters() if p.requires_grad and id(p) not in named]
        rest = [p for p in trained if point_of(p) is None]
        if trained and not rest and not asked:
            raise ValueError(f"model has nothing but points on manifolds to train; {FOR_POINTS}")
        if not rest and not asked:
            raise ValueError("model has no trainable parameters; is requires_grad off for all of them?")
        return [{"params": rest}, *asked] if rest else asked

    def check_new(self, params: Sequence[nn.Parameter], groups: list[Settings]) -> None:
        """Raise for parameters that cannot be a new group."""
        names, known = self.names(), {id(p) for group in groups for p in group["params"]}
        for p in params:
            if p not in names:
                raise ValueError(f"params holds a parameter of shape {tuple(p.shape)} that is not in the model")
            if id(p) in known:
                raise ValueError(f"params holds {names[p]}, which is in another group already")
            if (point := point_of(p)) is not None:
                raise ValueError(
                    f"params holds {names[p]}, coordinates of a point of {type(point).__name__}; {FOR_POINTS}"
                )
            check_parameter(names[p], p)

    def without_factors(self, groups: list[Settings]) -> tuple[dict[nn.Parameter, str], list[nn.Parameter], int]:
        """Return all names, the parameters of groups without factors, and how many numbers all groups have."""
        others = [p for group in groups if group["role"] == "fallback" for p in group["params"]]
        return self.names(), others, sum(p.numel() for group in groups for p in group["params"])

    def find(self, params: list[nn.Parameter], settings: Settings, fallbacks: list[list[nn.Parameter]]) -> Found:
        """Split parameters into those of layers and others; ``fallbacks`` are the others of the groups so far."""
        if any(p not in self._matrices and p not in self.layers for p in params):
            # A layer that was frozen until now: its bias may be among the other parameters already.
            self._find_matrices(apart=[p for group in fallbacks for p in group])
        unknown = [p for p in params if p in self._matrices and p not in self.layers]
        new = [self._new_layer(self._matrices[p], settings) for p in unknown]
        known = [matrix.layer for weight, matrix in self._matrices.items() if weight not in self.layers]
        known += [layer.layer for layer in self.layers.values()]
        ids = {id(p) for layer in known for p in layer.parameters}
        return Found([p for p in params if id(p) in ids], [p for p in params if id(p) not in ids], new)

    def _new_layer(self, matrix: Matrix, settings: Settings) -> FactoredLayer:
        layer, name = matrix.layer, self._plain_name(matrix.name)
        largest = self._largest_dense_side(layer)
        left, right = groups_for(self._structure, name, layer.p, layer.d, self._max_dim, largest)
        if layer.takes_indices and not isinstance(left, Diagonal):
            left = Diagonal(layer.p)
        pair = self._rule.pair((left, right), layer.weight.dtype, settings)
        return FactoredLayer(-1, name, layer, [] if self._by_gradient else matrix.views, pair)

    def _largest_dense_side(self, layer: Layer) -> int:
        """Return the size up to which the long side of a layer is dense."""
        if not _is_linear(layer):
            return LARGE
        is_hidden = self._hidden[layer.weight][layer.d > layer.p]
        return min(self._largest_dense, INNER) if is_hidden and min(layer.p, layer.d) >= SHORT else self._largest_dense

    def add(self, layers: list[FactoredLayer]) -> None:
        """Take new layers; equal pairs of forms become one object."""
        for layer in layers:
            layer.index = next(self._indices)
            layer.pair = next((other.pair for other in self.layers.values() if other.pair == layer.pair), layer.pair)
            self.layers[layer.weight] = layer

    def drop(self, lost: Collection[Tensor]) -> list[FactoredLayer]:
        """Forget and give the layers whose weights are lost."""
        gone = [layer for w, layer in self.layers.items() if w in lost]
        for layer in gone:
            del self.layers[layer.weight]
        return gone

    def _plain_name(self, name: str) -> str:
        """Return the name of a layer without those of wrappers around the model."""
        for wrapper in WRAPPERS:
            inner = getattr(self._model, wrapper[:-1], None)
            if isinstance(inner, nn.Module) and len(list(self._model.children())) == 1:
                name = name.removeprefix(wrapper)
        return name

    def check_patterns(self) -> None:
        """Raise for a pattern that matches no layer."""
        names = [layer.name for layer in self.layers.values()]
        for pattern in unmatched(self._structure, names):
            raise ValueError(f"structure has the pattern {pattern!r}, which matches no layer; there are {names}")


def _is_linear(layer: Layer) -> bool:
    """Return whether a layer is no convolution, whose kernels make its inputs long, and no embedding."""
    return not layer.has_axes and not layer.takes_indices


def _inputs(layer: Layer) -> int:
    """Return the number of inputs of a layer, without the one that multiplies its bias."""
    return layer.p - (layer.bias is not None)


def check_parameter(name: str, p: Tensor) -> None:
    if nn.parameter.is_lazy(p):
        raise ValueError(f"{name} has no shape yet; run a batch through the model before building the optimizer")
    if p.requires_grad and not p.is_floating_point():
        raise TypeError(f"{name} is of type {p.dtype}; keep its real and imaginary parts as two real parameters")
