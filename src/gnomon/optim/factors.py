"""The Kronecker factors of a layer's preconditioner and their update (Fig. matDL_opt)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..groups import Diagonal, Element, Group
from ..groups.base import align
from ..groups.products import symmetric_product
from . import forms
from .rounding import power_of_two
from .square import Square


@dataclass(frozen=True)
class Sight:
    """A symmetric S as a factor A sees it: weight times ``seen``, or what ``half`` becomes; one of them is None."""

    seen: Element | None
    half: Element | None
    trace: Tensor
    """``tr(A^T S A)`` without the weight, of the batch shape."""
    weight: Tensor

    def times(self, factor: Tensor) -> Sight:
        return replace(self, weight=self.weight * factor)


class Moment(ABC):
    """A sum of squares ``x x^T`` over rows, in the form that is cheapest to keep.

    Rows are stored in a unit of their own, a power of two near their largest entry, so that no square and no product
    of squares overflows or vanishes, however large or small the rows are.
    """

    unit: Tensor
    """The unit of the rows in each block: the moment is ``unit^2`` times what is stored."""

    @abstractmethod
    def sight(self, group: Group, a: Element) -> Sight:
        """As the factor A sees it, with weight 1."""

    @property
    @abstractmethod
    def energy(self) -> Tensor:
        """``x^T x``, summed, for each block."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What it is made of, each with the blocks along the first dimension."""

    @abstractmethod
    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> Moment:
        """Another of the same form."""

    def in_unit(self, unit: Tensor) -> Moment:
        """The same moment in another unit."""
        factor = (self.unit / unit).square()
        return self.of([t * align(factor, t) for t in self.tensors], unit)


@dataclass(frozen=True)
class Rows(Moment):
    """Few rows, as they are: ``(blocks, n, k)``."""

    x: Tensor
    unit: Tensor

    def sight(self, group: Group, a: Element) -> Sight:
        seen = group.seen(a, self.x)
        return Sight(seen, None, group.trace(seen), self.x.new_ones(()))

    @property
    def energy(self) -> Tensor:
        return _squared_length(self.x)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> Rows:
        return Rows(*tensors, unit)

    def in_unit(self, unit: Tensor) -> Rows:
        return Rows(self.x * align(self.unit / unit, self.x), unit)


@dataclass(frozen=True)
class Covariance(Moment):
    """Many rows, as ``x^T x``: ``(blocks, k, k)``."""

    s: Tensor
    unit: Tensor

    def sight(self, group: Group, a: Element) -> Sight:
        half = group.half_seen(a, self.s)
        return Sight(None, half, (group.flatten(a) * group.flatten(half)).sum(-1), self.s.new_ones(()))

    @property
    def energy(self) -> Tensor:
        return self.s.diagonal(dim1=-2, dim2=-1).sum(-1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.s,)

    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> Covariance:
        return Covariance(*tensors, unit)


@dataclass(frozen=True)
class Seen(Moment):
    """``<E, A^T x^T x A>`` as the factor saw it when the rows came; it has not moved since."""

    element: Element
    total: Tensor
    unit: Tensor

    def sight(self, group: Group, a: Element) -> Sight:
        return Sight(self.element, None, group.trace(self.element), self.total.new_ones(()))

    @property
    def energy(self) -> Tensor:
        return self.total

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.element, self.total)

    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> Seen:
        return Seen(tuple(tensors[:-1]), tensors[-1], unit)


def in_units(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in a unit of their own for each block, and that unit: a power of two near the largest entry."""
    if rows[0].numel() == 0:
        return rows, rows.new_ones(len(rows))
    low, high = rows.flatten(1).aminmax(dim=1)
    unit = power_of_two(torch.maximum(-low, high))
    return rows / align(unit, rows), unit


def moment(group: Group, a: Element | None, rows: Tensor) -> Moment:
    """From rows of shape ``(blocks, n, k)``, or from indices of unit vectors, ``(blocks, n)``; no factor is I."""
    if not rows.is_floating_point():
        return _index_moment(group, a, rows)
    return _in_cheapest_form(group, a, *in_units(rows))


def _in_cheapest_form(group: Group, a: Element | None, rows: Tensor, unit: Tensor) -> Moment:
    if group.keeps_covariance and forms.keep_rows(rows.shape[-2], group.k):
        return Rows(rows, unit)
    return settled(group, a, rows, unit)


def settled(group: Group, a: Element | None, rows: Tensor, unit: Tensor) -> Moment:
    """In a form that adds up over batches and ranks."""
    if group.keeps_covariance:
        return Covariance(symmetric_product(rows.mT, rows), unit)
    return Seen(group.restrict(rows, rows) if a is None else group.gram(a, rows), _squared_length(rows), unit)


def _index_moment(group: Group, a: Element | None, indices: Tensor) -> Moment:
    """Of unit vectors; an index equal to the size stands for zero, and the group is diagonal."""
    assert isinstance(group, Diagonal)
    dtype = torch.get_default_dtype() if a is None else a[0].dtype
    counts = torch.zeros(indices.shape[0], group.k + 1, dtype=dtype, device=indices.device)
    counts = counts.scatter_add_(1, indices, torch.ones_like(indices, dtype=dtype))[:, :-1]
    return Seen((counts if a is None else a[0].square() * counts,), counts.sum(-1), counts.new_ones(len(counts)))


def _squared_length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=(-2, -1)).square()


@dataclass(frozen=True)
class Statistics:
    """Sums over the rows of one or several batches, as long as the factors stay what they are."""

    inputs: Moment
    outputs: Moment
    rows: int
    """Input rows so far: they are averaged."""
    terms: int
    """Terms of the loss so far: its gradients are those of a mean over them, and their squares count as many times."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Statistics of one kind can be joined."""
        shapes = tuple(t.shape for m in (self.inputs, self.outputs) for t in m.tensors)
        return type(self.inputs), type(self.outputs), shapes, self.rows, self.terms


def joined(parts: Sequence[Statistics]) -> Statistics:
    """Those of several layers of one kind, block after block."""
    if len(parts) == 1:
        return parts[0]
    inputs, outputs = (
        moments[0].of(
            [torch.cat(tensors) for tensors in zip(*(m.tensors for m in moments), strict=True)],
            torch.cat([m.unit for m in moments]),
        )
        for moments in ([s.inputs for s in parts], [s.outputs for s in parts])
    )
    return replace(parts[0], inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class Curvature:
    """What the two factors see of a layer's curvature, and its mean over all directions of the layer itself."""

    in_k: Sight
    in_c: Sight
    mean: Tensor
    unit: Tensor
    """All three are in this unit, in float64, where the square of no unit of rows overflows."""

    @property
    def absolute_mean(self) -> Tensor:
        """The mean without a unit, in float64."""
        return self.mean * self.unit

    def relative_to(self, level: Tensor | None = None) -> Curvature:
        """The curvature over ``level``, an absolute mean; over its own mean without one, or where that is zero."""
        factor = 1 / torch.where(self.mean > 0, self.mean, 1)
        if level is not None:
            factor = torch.where(level > 0, (self.unit / level).to(factor.dtype), factor)
        return self._times(factor)

    def absolute(self) -> Curvature:
        """The curvature without a unit."""
        return self._times(self.unit.to(self.mean.dtype))

    def _times(self, factor: Tensor) -> Curvature:
        return Curvature(
            self.in_k.times(factor), self.in_c.times(factor), self.mean * factor, torch.ones_like(self.unit)
        )


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

    def total(self, k: Element | None, c: Element | None, one: Statistics, other: Statistics) -> Statistics:
        """Of two batches."""
        return Statistics(
            _sum(self.left, k, one.inputs, other.inputs),
            _sum(self.right, c, one.outputs, other.outputs),
            one.rows + other.rows,
            one.terms + other.terms,
        )

    def normalized(self, k: Element | None, c: Element | None, s: Statistics) -> Statistics:
        """Means instead of sums, of one row and one term."""
        inputs, outputs = additive(self.left, k, s.inputs), additive(self.right, c, s.outputs)
        return Statistics(
            inputs.of([t / max(s.rows, 1) for t in inputs.tensors], inputs.unit),
            outputs.of([t * s.terms for t in outputs.tensors], outputs.unit),
            1,
            1,
        )

    def curvature(self, k: Element, c: Element, s: Statistics) -> Curvature:
        """``tr(H_C)/d H_K`` and ``tr(H_K)/p H_C``: what each factor sees of ``mu_AA x mu_GG``."""
        d, p, weight = self.right.k, self.left.k, s.terms / max(s.rows, 1)
        in_k, in_c = s.inputs.sight(self.left, k), s.outputs.sight(self.right, c)
        return Curvature(
            in_k.times(in_c.trace * (weight / d)),
            in_c.times(in_k.trace * (weight / p)),
            s.inputs.energy * s.outputs.energy * (weight / (d * p)),
            (s.inputs.unit.double() * s.outputs.unit.double()).square(),
        )

    def gradient_curvature(self, k: Element, c: Element, gradient: Tensor) -> Curvature:
        """``Y^T Y / d`` and ``Y Y^T / p`` with ``Y = C^T G K``: what each sees of ``vec(G) vec(G)^T``.

        At the fixed point ``S_a = E[G S_b^-1 G^T] / p`` and ``S_b = E[G^T S_a^-1 G] / d`` with ``C C^T = S_a^-1`` and
        ``K K^T = S_b^-1``: the Kronecker product nearest to the covariance of G in the sense of Kullback and Leibler.
        """
        gradient, unit = in_units(gradient)
        d, p, one = self.right.k, self.left.k, gradient.new_ones(())
        through_c = _times_factor(self.right, c, gradient.mT).mT
        through_both = _times_factor(self.left, k, through_c)
        through_k = through_both
        if isinstance(self.left, Square) or isinstance(self.right, Square):
            through_k = _times_factor(self.left, k, gradient)
        # S is X^T Z, with X = Z where a factor is there to be multiplied with, and Z = P X where its square is.
        of_k, of_c = (through_c, through_both), (through_k.mT, through_both.mT)
        start_k = (gradient, through_k) if isinstance(self.right, Square) else of_k
        start_c = (gradient.mT, through_c.mT) if isinstance(self.left, Square) else of_c
        return Curvature(
            _sight_of_product(self.left, start_k, of_k, one / d),
            _sight_of_product(self.right, start_c, of_c, one / p),
            gradient.square().mean((-2, -1)),
            unit.double().square(),
        )

    def sizes(self, k: Element, c: Element) -> tuple[Tensor, Tensor]:
        """``tr(K^T K) / p`` and ``tr(C^T C) / d``."""
        return self.left.squared_norm(k) / self.left.k, self.right.squared_norm(c) / self.right.k

    def imbalance(self, k: Element, c: Element) -> Tensor | None:
        """By what K may be divided and C multiplied, a power of two; None where a factor has no scale of its own.

        ``K K^T x C C^T`` does not change with it, to the last bit. The scales of K and C alone are held by nothing, and
        the higher orders of the update let them drift apart until products overflow. So they are balanced as soon as
        ``tr(K^T K) / p`` and ``tr(C^T C) / d`` differ by a factor of 16.
        """
        if not (self.left.has_scalars and self.right.has_scalars):
            return None
        size_k, size_c = self.sizes(k, c)
        exponent = (torch.log2(size_k / size_c) / 4).trunc()
        return torch.exp2(torch.where(exponent.isfinite(), exponent, 0))

    def pressure(
        self,
        k: Element,
        c: Element,
        curvature: Curvature,
        damping: float,
        limit: float = math.inf,
        rate: float = 1.0,
    ) -> tuple[Element, Element]:
        """``rate/2 P( tr(H_C)/d H_K + damping tr(C^T C)/d K^T K - I )`` and its twin.

        P keeps diagonals and symmetric blocks and doubles couplings, as for any structure. Where it is longer than
        ``limit`` in the spectral norm, the rate included, it is scaled back to that, as a whole: to scale the curvature
        alone would leave the growth by the identity without a counterweight.
        """
        size_k, size_c = self.sizes(k, c)
        damping_k, damping_c = damping * size_c, damping * size_k
        return (
            _half_projected(self.left, k, curvature.in_k, damping_k, limit, rate),
            _half_projected(self.right, c, curvature.in_c, damping_c, limit, rate),
        )


def additive(group: Group, a: Element | None, m: Moment) -> Moment:
    """In a form that adds up over batches and ranks."""
    return settled(group, a, m.x, m.unit) if isinstance(m, Rows) else m


def _sum(group: Group, a: Element | None, one: Moment, other: Moment) -> Moment:
    unit = torch.maximum(one.unit, other.unit)
    one, other = one.in_unit(unit), other.in_unit(unit)
    if isinstance(one, Rows) and isinstance(other, Rows):
        return _in_cheapest_form(group, a, torch.cat([one.x, other.x], -2), unit)
    one, other = additive(group, a, one), additive(group, a, other)
    return one.of([s + t for s, t in zip(one.tensors, other.tensors, strict=True)], unit)


def _times_factor(group: Group, a: Element, rows: Tensor) -> Tensor:
    """``A^T x`` for each row, or ``P x`` where the factor is there as its square."""
    return group.apply_squared(a, rows) if isinstance(group, Square) else group.apply(a, rows, transpose=True)


def _sight_of_product(group: Group, x: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor], weight: Tensor) -> Sight:
    """Of a symmetric ``X^T Z``, from rows as they are and as the factor sees them."""
    if not isinstance(group, Square):
        return Sight(group.restrict(x[1], z[1]), None, (x[1] * z[1]).sum((-2, -1)), weight)
    if forms.keep_rows(x[0].shape[-2], group.k):
        seen = group.seen_rows(x[0], x[1], z[1])
        return Sight(seen, None, group.trace(seen), weight)
    return Sight(None, (symmetric_product(x[0].mT, z[0]),), (x[0] * z[1]).sum((-2, -1)), weight)


def _half_projected(group: Group, a: Element, sight: Sight, damping: Tensor, limit: float, rate: float) -> Element:
    """``rate/2 P( A^T S A + damping A^T A - I )``, no longer than ``limit``; for a square, what it takes of that."""
    if isinstance(group, Square):
        return group.push(a, sight.seen, sight.half, sight.weight, damping, limit, rate)
    if sight.half is not None:
        m = group.damped_half(a, sight.half, sight.weight, damping)
    else:
        assert sight.seen is not None
        m = _weighted(group.damped(a, damping), sight.seen, sight.weight)
    m = group.steepest(group.subtract_identity(m))
    if limit < math.inf:
        scale = (limit / group.norm_estimate(m)).clamp(max=rate)
        return tuple(block.mul_(align(scale, block)) for block in m)
    return m if rate == 1 else tuple(block.mul_(rate) for block in m)


def _weighted(element: Element, other: Element, weight: Tensor) -> Element:
    """``element + weight other``, in the memory of the first."""
    return tuple(block.addcmul_(more, align(weight, more)) for block, more in zip(element, other, strict=True))
