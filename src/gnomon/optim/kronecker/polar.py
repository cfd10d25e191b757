"""Which layers step along the polar factor of their average direction, and how many matrices a layer holds.

Where ``D = U S V^T`` is an average of preconditioned gradients, ``U V^T`` is the orthogonal matrix nearest to it.
A step along it changes each of the layer's singular directions by the same amount, so that no single one bounds the
learning rate. It comes from multiplications alone (:func:`gnomon.linalg.polar_factor`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Literal

from .layers.base import FactoredLayer, Turn
from .structured_factor import StructuredFactor
from .update_rules import along_polar_factor

MOST_SIDES = 1
"""The largest ratio of a matrix's smaller side to the rows of a batch. Beyond it the iterations would take more than
twice as long as the layer's forward and backward pass, which has three products of that side with as many rows."""
WHOLE_SIDES = 1 / 16
"""The largest ratio of a matrix's smaller side to the rows of a batch at which the matrix has one polar factor. Above
it, and where rows are never known, each half of the smaller side has its own, because the iterations would take a
large part of a step."""
LEAST_HALF = 48
"""The least number of rows in a half of a matrix. Polar factors of smaller halves would take about as long as one."""
FUSED_NAMES = ("qkv", "query_key_value", "c_attn", "in_proj")
"""Ends of the names of linear layers whose output is queries, keys and values side by side."""


class PolarDirections:
    """The rule for directions that replaces the average of a layer's directions by its polar factor.

    It acts on layers with a dense factor that are no embeddings, where a batch has so many rows that the iterations are
    not the largest part of the work. Where they would be a large part, each half of a matrix has a polar factor of its
    own. ``asked`` says for patterns of layer names how many matrices lie side by side in the outputs of a layer. Each
    of them has its own polar factor, and 0 leaves the directions as they are. Fused queries, keys and values are found
    by name or shape.
    """

    def __init__(self, asked: Literal[True] | Mapping[str, int] = True) -> None:
        if asked is not True and not isinstance(asked, Mapping):
            raise TypeError(f"polar must be True, False or a mapping from patterns of layer names, got {asked!r}")
        self._asked: Mapping[str, int] = {} if asked is True else dict(asked)
        for pattern, count in self._asked.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"polar[{pattern!r}] must be the number of matrices in a layer or 0, got {count!r}")

    def check(self, layers: Sequence[FactoredLayer]) -> None:
        """Raise for a pattern that matches no layer, and for a number that does not divide a layer's outputs."""
        names = [layer.name for layer in layers]
        for pattern in self._asked:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"polar has the pattern {pattern!r}, which matches no layer; there are {names}")
        for layer in layers:
            if (count := self.count(layer)) and layer.layer.d % count:
                raise ValueError(f"polar asks for {count} matrices in {layer.name}, which has {layer.layer.d} outputs")

    def turn(self, layer: FactoredLayer) -> Turn | None:
        """Return what replaces averages by directions, or None where a batch has too few rows to pay for it."""
        count, inner = self.count(layer), layer.layer
        smaller = min(inner.d // max(count, 1), inner.p - (inner.bias is not None))
        if count == 0 or 0 < MOST_SIDES * layer.rows < smaller:
            return None
        # Without views no hook will see rows. With them, rows are counted at the first step.
        has_few_rows = smaller > WHOLE_SIDES * layer.rows if layer.rows else not layer.views
        in_halves = has_few_rows and smaller >= 2 * LEAST_HALF and smaller % 2 == 0
        return _turn(count, inner.bias is not None, in_halves)

    def count(self, layer: FactoredLayer) -> int:
        """Return how many matrices lie side by side in a layer's outputs, or 0 to leave its directions as they are."""
        asked = next((n for pattern, n in self._asked.items() if fnmatchcase(layer.name, pattern)), None)
        if asked is not None:
            return asked
        inner = layer.layer
        if inner.takes_indices or all(isinstance(form, StructuredFactor) for form in layer.pair):
            return 0
        inputs = inner.p - (inner.bias is not None)
        is_fused = inner.d == 3 * inputs or (inner.d % 3 == 0 and layer.name.endswith(FUSED_NAMES))
        return 3 if is_fused and inner.blocks == 1 else 1


@cache
def _turn(count: int, has_bias: bool, in_halves: bool) -> Turn:
    """Return the same object for the same numbers, because layers with one function are handled as a batch."""
    return partial(along_polar_factor, count=count, has_bias=has_bias, in_halves=in_halves)
