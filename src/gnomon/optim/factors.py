"""The Kronecker factors of a layer's preconditioner and their update (Fig. matDL_opt)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..groups import Diagonal, Element, Group
from ..groups.base import accumulate, add, align, times


@dataclass
class Moment:
    """A sum of squares ``x x^T`` over rows, as seen from a factor A."""

    seen: Element
    """``<E, A^T x x^T A>``"""
    trace: Tensor
    """``tr(A^T x x^T A)``"""
    energy: Tensor
    """``x^T x``"""

    def times(self, factor: float) -> Moment:
        return Moment(times(factor, self.seen), factor * self.trace, factor * self.energy)

    def __add__(self, other: Moment) -> Moment:
        return Moment(add(self.seen, other.seen), self.trace + other.trace, self.energy + other.energy)


@dataclass
class Statistics:
    """Sums over the rows of one or several batches, as long as the factors stay what they are."""

    inputs: Moment
    outputs: Moment
    rows: int
    """Input rows so far: they are averaged."""
    terms: int
    """Terms of the loss so far: its gradients are those of a mean over them, and their squares count as many times."""

    def normalized(self) -> Statistics:
        """Means instead of sums: of one row and one term."""
        return Statistics(self.inputs.times(1 / max(self.rows, 1)), self.outputs.times(self.terms), 1, 1)

    def tensors(self) -> list[Tensor]:
        """The sums."""
        return [t for m in (self.inputs, self.outputs) for t in (*m.seen, m.trace, m.energy)]

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.inputs + other.inputs, self.outputs + other.outputs, self.rows + other.rows, self.terms + other.terms
        )


@dataclass
class Curvature:
    """What the two factors see of a layer's curvature, and its mean over all directions of the layer itself."""

    in_k: Element
    in_c: Element
    mean: Tensor

    def relative_to(self, level: Tensor) -> Curvature:
        """The curvature in units of ``level``, or of its own mean where that is zero."""
        unit = torch.where(level > 0, level, self.mean)
        unit = torch.where(unit > 0, unit, 1)

        def divided(element: Element) -> Element:
            return tuple(block / align(unit, block) for block in element)

        return Curvature(divided(self.in_k), divided(self.in_c), self.mean / unit)


@dataclass(frozen=True)
class KroneckerFactors:
    """``(K K^T) x (C C^T)`` for a batch of ``d x p`` matrices: K in a group of size p, C in one of size d."""

    left: Group
    """The group of K, on the inputs."""
    right: Group
    """The group of C, on the outputs."""

    def statistics(self, k: Element | None, c: Element | None, x: Tensor, g: Tensor, terms: int) -> Statistics:
        """From rows ``x`` of shape ``(blocks, n, p)``, or indices ``(blocks, n)``, and ``g``, ``(blocks, n, d)``."""
        return Statistics(moment(self.left, k, x), moment(self.right, c, g), x.shape[1], terms)

    def curvature(self, s: Statistics) -> Curvature:
        """``tr(H_C)/d H_K`` and ``tr(H_K)/p H_C``: what each factor sees of ``mu_AA x mu_GG``."""
        d, p, weight = self.right.k, self.left.k, s.terms / max(s.rows, 1)
        return Curvature(
            tuple(align(s.outputs.trace * (weight / d), block) * block for block in s.inputs.seen),
            tuple(align(s.inputs.trace * (weight / p), block) * block for block in s.outputs.seen),
            s.inputs.energy * s.outputs.energy * (weight / (d * p)),
        )

    def gradient_curvature(self, k: Element, c: Element, gradient: Tensor) -> Curvature:
        """``Y^T Y / d`` and ``Y Y^T / p`` with ``Y = C^T G K``: what each sees of ``vec(G) vec(G)^T``.

        At the fixed point ``S_a = E[G S_b^-1 G^T] / p`` and ``S_b = E[G^T S_a^-1 G] / d`` with ``C C^T = S_a^-1`` and
        ``K K^T = S_b^-1``: the Kronecker product nearest to the covariance of G in the sense of Kullback and Leibler.
        """
        d, p = self.right.k, self.left.k
        y = self.right.apply(c, self.left.apply(k, gradient, transpose=True).mT, transpose=True)
        return Curvature(
            times(1 / d, self.left.restrict(y.mT, y.mT)),
            times(1 / p, self.right.restrict(y, y)),
            gradient.square().mean((-2, -1)),
        )

    def pressure(
        self, k: Element, c: Element, curvature: Curvature, damping: float, limit: float = math.inf
    ) -> tuple[Element, Element]:
        """``1/2 P( tr(H_C)/d H_K + damping tr(C^T C)/d K^T K - I )`` and its twin: the update at ``b1 = 1``.

        P keeps diagonals and symmetric blocks and doubles couplings, as for any structure. Where it is longer than
        ``limit`` in the spectral norm it is scaled back to that, as a whole: to scale the curvature alone would leave
        the growth by the identity without a counterweight.
        """
        damping_k = damping * self.right.squared_norm(c) / self.right.k
        damping_c = damping * self.left.squared_norm(k) / self.left.k
        return (
            _half_projected(self.left, k, curvature.in_k, damping_k, limit),
            _half_projected(self.right, c, curvature.in_c, damping_c, limit),
        )


def squared(group: Group, a: Element, rows: Tensor) -> Tensor:
    """``A A^T x`` for each row x."""
    return group.apply(a, group.apply(a, rows, transpose=True))


def moment(group: Group, a: Element | None, rows: Tensor) -> Moment:
    """From rows of shape ``(blocks, n, size)``, or from indices; without a factor it is seen as it is."""
    if not rows.is_floating_point():
        return _index_moment(group, a, rows)
    seen = group.restrict(rows, rows) if a is None else group.gram(a, rows)
    return Moment(seen, _trace(group, seen), rows.square().sum((-2, -1)))


def _index_moment(group: Group, a: Element | None, indices: Tensor) -> Moment:
    """Of unit vectors; an index equal to the size stands for zero, and the group is diagonal."""
    assert isinstance(group, Diagonal)
    dtype = torch.get_default_dtype() if a is None else a[0].dtype
    counts = torch.zeros(indices.shape[0], group.k + 1, dtype=dtype, device=indices.device)
    counts = counts.scatter_add_(1, indices, torch.ones_like(indices, dtype=dtype))[:, :-1]
    seen = counts if a is None else a[0].square() * counts
    return Moment((seen,), seen.sum(-1), counts.sum(-1))


def _trace(group: Group, seen: Element) -> Tensor:
    """``tr(M)`` from ``<E, M>``."""
    return (group.flatten(group.identity_like(seen)) * group.flatten(seen)).sum(-1)


def _half_projected(group: Group, a: Element, seen: Element, damping: Tensor, limit: float) -> Element:
    """``1/2 P( seen + damping A^T A - I )``, no longer than ``limit``."""
    m = tuple(align(damping, block) * block for block in group.pullback(a, group.dual(a)))
    accumulate(m, seen)
    accumulate(m, group.dual(group.identity_like(a)), -1)
    m = times(2, group.scale(group.scale(m)))
    if not math.isfinite(limit):
        return m
    cut = (limit / group.norm_estimate(m)).clamp(max=1)
    return tuple(align(cut, block) * block for block in m)
