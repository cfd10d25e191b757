"""Polar factors of directions: steps that turn all singular directions of a matrix equally far.

Where ``D = U S V^T`` is an average of preconditioned gradients, ``U V^T`` is the orthogonal matrix nearest to it.
It comes from multiplications alone. A step along it changes each of the layer's singular directions by the same
amount, so that no single one bounds the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ...linalg import product, symmetric_product
from .layers.base import FactoredLayer
from .structured_factor import StructuredFactor

COEFFICIENTS = (
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
)
"""Coefficients of ``a x + b x^3 + c x^5``, a row for each iteration. Singular values from 0.01 to 1 come near 1."""
ROWS = 2
"""The largest ratio of a matrix's smaller side to the rows of a batch. Beyond it the iterations would take more than
five times as long as the layer's forward and backward pass."""
WIDE = 2
"""The ratio of the sides from which on the iteration is made with the smaller side's square matrices."""
FUSED_NAMES = ("qkv", "query_key_value", "c_attn", "in_proj")
"""Ends of the names of linear layers whose output is queries, keys and values side by side."""


def polar_factor(matrices: Tensor) -> Tensor:
    """``U V^T`` of ``U S V^T`` for a batch of matrices ``(blocks, d, p)``, with singular values between 0.7 and 1.2.

    The iteration is that of Newton and Schulz with optimized coefficients, on the smaller side::

        X <- P X,    P = a I + b A + c A^2,    A = X X^T,    from X = D / ||D D^T||_F^(1/2)

    Singular values below a hundredth of the norm stay smaller.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return polar_factor(matrices.mT).mT
    tiny = torch.finfo(matrices.dtype).tiny
    x = matrices / matrices.abs().amax((-2, -1), keepdim=True).clamp(min=tiny)  # squares must not vanish
    square = symmetric_product(x, x.mT)
    size = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True).clamp(min=tiny)
    x, square = x * size.rsqrt(), square / size
    if x.shape[-1] >= WIDE * x.shape[-2]:
        return product(_product_of_polynomials(square), x)
    for number, coefficients in enumerate(COEFFICIENTS):
        square = symmetric_product(x, x.mT) if number else square
        x = product(_polynomial(square, *coefficients), x)
    return x


def _polynomial(square: Tensor, a: float, b: float, c: float) -> Tensor:
    """``a I + b A + c A^2`` of a symmetric A."""
    result = symmetric_product(square, square).mul_(c).add_(square, alpha=b)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _product_of_polynomials(square: Tensor) -> Tensor:
    """The product of all P, by ``A <- P A P`` on the smaller side alone; all of them commute.

    For wide matrices it takes half of the multiplications of the iteration on X.
    """
    total = polynomial = _polynomial(square, *COEFFICIENTS[0])
    for coefficients in COEFFICIENTS[1:]:
        square = symmetric_product(symmetric_product(polynomial, square), polynomial)
        polynomial = _polynomial(square, *coefficients)
        total = symmetric_product(polynomial, total)
    return total


class PolarDirections:
    """The rule for directions that replaces the average of a layer's directions by its polar factor.

    It acts on layers with a dense factor that are no embeddings, where a batch has so many rows that the iterations are
    not the largest part of the work. ``asked`` says for patterns of layer names how many matrices lie side by side in
    the outputs of a layer. Each of them has its own polar factor, and 0 leaves the directions as they are. Fused
    queries, keys and values are found by name or shape.
    """

    def __init__(self, asked: bool | Mapping[str, int]) -> None:
        if not isinstance(asked, (bool, Mapping)):
            raise TypeError(f"polar must be True, False or a mapping from patterns of layer names, got {asked!r}")
        self._asked: Mapping[str, int] = {"*": 0} if asked is False else {} if asked is True else dict(asked)
        for pattern, count in self._asked.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"polar[{pattern!r}] must be the number of matrices in a layer or 0, got {count!r}")

    def check(self, layers: Sequence[FactoredLayer]) -> None:
        """Raise for a pattern that matches no layer, and for a number that does not divide a layer's outputs."""
        names = [layer.name for layer in layers]
        for pattern in self._asked:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"polar has the pattern {pattern!r}, which matches no layer; there are {names}")
        for layer in layers:
            if (count := self.count(layer)) and layer.layer.d % count:
                raise ValueError(f"polar asks for {count} matrices in {layer.name}, which has {layer.layer.d} outputs")

    def count(self, layer: FactoredLayer) -> int:
        """The number of matrices side by side in the outputs of a layer; 0 where its directions stay as they are."""
        asked = next((n for pattern, n in self._asked.items() if fnmatchcase(layer.name, pattern)), None)
        if asked is not None:
            return asked
        inner = layer.layer
        if inner.takes_indices or all(isinstance(form, StructuredFactor) for form in layer.pair):
            return 0
        inputs = inner.p - (inner.bias is not None)
        is_fused = inner.d == 3 * inputs or (inner.d % 3 == 0 and layer.name.endswith(FUSED_NAMES))
        return 3 if is_fused and inner.blocks == 1 else 1

    def kind(self, layer: FactoredLayer) -> int | None:
        """The number of matrices, or None where the rows of a batch do not pay for the iterations."""
        count = self.count(layer)
        smaller = min(layer.layer.d // max(count, 1), layer.layer.p)
        return count if count and (layer.rows == 0 or smaller <= ROWS * layer.rows) else None

    def __call__(self, layers: Sequence[FactoredLayer], averages: Tensor) -> Tensor:
        """The bias, a last column, is scaled as the weight is on average: it is no direction of the inputs."""
        has_bias = layers[0].layer.bias is not None
        weights = averages[..., :-1] if has_bias else averages
        blocks, d, p = weights.shape
        count = self.count(layers[0])
        turned = polar_factor(weights.reshape(blocks * count, d // count, p)).reshape(blocks, d, p)
        if not has_bias:
            return turned
        lengths = [torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (turned, weights)]
        ratio = lengths[0] / lengths[1].clamp(min=torch.finfo(averages.dtype).tiny)
        return torch.cat([turned, averages[..., -1:] * ratio], -1)
