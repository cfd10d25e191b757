"""Submanifolds that are no groups: the base class of those whose coordinates are a group's with latent variables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Element, Group


def undefined(self: Group, *args: object, **options: object) -> Any:
    raise TypeError(
        f"{self} is no group: products, inverses and transposes of its matrices are of another kind. Points of SPD and "
        "Gaussian can have this structure; what multiplies elements needs one of the groups, such as Arrow"
    )


class Marginal(Group):
    """A submanifold that is no group itself, but the marginal of one: some coordinates of the vectors are latent.

    It has the coordinates of the joint group, and of a group's operations those that read a matrix: products with
    vectors, inverses, the determinant. A function of the matrix depends on the latent part of the coordinates too,
    since they move the rest. Vectors are kept as they are in the coordinates of the next frame: the transport is
    isometric in the joint metric.
    """

    trivial_transport = True
    is_algebra = False

    # What only groups have.
    mul: Any = undefined
    ldiv: Any = undefined
    from_dense: Any = undefined
    restrict: Any = undefined
    dual: Any = undefined
    gram: Any = undefined
    bracket: Any = undefined
    trace: Any = undefined
    metric_dual: Any = undefined
    congruence: Any = undefined
    norm_bound: Any = undefined
    norm_estimate: Any = undefined
    exp: Any = undefined
    move: Any = undefined
    transpose: Any = undefined

    def start(self, diagonal: Tensor) -> Element:
        """Return an element near ``Diag(diagonal)`` from which every coordinate can move."""
        raise NotImplementedError

    def gradient(self, a: Element, grad: Element, sign: int) -> Tensor:
        """Return ``+-D.pullback(a, grad)``, the gradient in the coordinates at 0, packed."""
        raise NotImplementedError

    def advance(self, a: Element, eta: Element, order: int | None, sign: int) -> None:
        """Write :meth:`retract` into the memory of eta."""
        for place, block in zip(eta, self.retract(a, eta, order, sign=sign), strict=True):
            place.copy_(block)

    def length(self, eta: Element) -> Tensor:
        blocks = [block.flatten(-len(shape)) for block, shape in zip(eta, self.shapes, strict=True)]
        lengths = [torch.linalg.vector_norm(block, dim=-1, dtype=torch.float64) for block in blocks]
        return torch.linalg.vector_norm(torch.stack(lengths), dim=0)
