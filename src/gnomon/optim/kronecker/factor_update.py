"""The update of a layer's Kronecker factors from the curvature of a batch (Fig. matDL_opt).

With ``H_K = K^T mu_AA K`` and ``H_C = C^T mu_GG C`` for the second moments of a layer's p inputs and d output
gradients, :func:`update` computes::

    m_K <- a1 m_K + b1/(2d) ( tr(H_C) H_K + damping tr(C^T C) K^T K - d I )        K <- K Exp(-m_K)
    m_C <- a1 m_C + b1/(2p) ( tr(H_K) H_C + damping tr(K^T K) C^T C - p I )        C <- C Exp(-m_C)

These are the steps of Eq. matgauss_just in the coordinates of Eq. mat_gauss_norm_coord. K and C are kept apart, in
code of their own: :class:`gnomon.groups.Kronecker` has the same geometry and is not used. :func:`update` is pure.
:class:`~.inverse_free_factor.InverseFreeFactors` applies it to the factors in the optimizer's state. :mod:`.reference`
has the same for dense factors in fifty lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...groups import Element
from ...linalg import align
from .factor_forms import FactorForm, FactorPair, Projection
from .statistics import Statistics, in_units

LEVEL_MEMORY = 0.9
"""The weight of the past in the running mean of the curvature."""


@dataclass(frozen=True)
class UpdateSettings:
    """The numbers of an update, by their names in the paper where they have one."""

    a1: float
    b1: float
    damping: float
    bound: float
    """The bound on the spectral norm of what is added to a momentum."""
    order: int
    """The order of the exponential."""
    inside: bool
    """Whether b1 is a part of the momentum."""


# ---------------------------------------------------------------------- curvature
@dataclass(frozen=True)
class Curvature:
    """The curvature of a layer as its two factors project it."""

    in_k: Projection
    in_c: Projection
    weight_k: Tensor
    """``tr(H_C)/d``, by which :attr:`in_k` is to be multiplied."""
    weight_c: Tensor
    """``tr(H_K)/p``, by which :attr:`in_c` is to be multiplied."""
    mean: Tensor
    """The mean of the curvature over all directions of the layer, without the factors."""
    unit: Tensor
    """The unit of weights and mean, in float64, where the square of no unit of rows overflows."""

    @property
    def absolute_mean(self) -> Tensor:
        return self.mean * self.unit

    def relative_to(self, level: Tensor | None = None) -> Curvature:
        """Return the curvature over ``level``, an absolute mean.

        Without a level, or where it is zero, it is over its own mean.
        """
        factor = 1 / torch.where(self.mean > 0, self.mean, 1)
        if level is not None:
            factor = torch.where(level > 0, (self.unit / level).to(factor.dtype), factor)
        return self._times(factor)

    def absolute(self) -> Curvature:
        """Return the curvature in no unit."""
        return self._times(self.unit.to(self.mean.dtype))

    def _times(self, factor: Tensor) -> Curvature:
        weights = self.weight_k * factor, self.weight_c * factor
        return Curvature(self.in_k, self.in_c, *weights, self.mean * factor, torch.ones_like(self.unit))


def curvature(pair: FactorPair, k: Element, c: Element, s: Statistics) -> Curvature:
    """Return ``tr(H_C)/d H_K`` and ``tr(H_K)/p H_C``, the projections of ``mu_AA x mu_GG``."""
    p, d, weight = pair.left.size, pair.right.size, s.terms / max(s.rows, 1)
    in_k, in_c = pair.left.project(k, s.inputs), pair.right.project(c, s.outputs)
    return Curvature(
        in_k,
        in_c,
        in_c.trace * (weight / d),
        in_k.trace * (weight / p),
        s.inputs.energy * s.outputs.energy * (weight / (d * p)),
        (s.inputs.unit.double() * s.outputs.unit.double()).square(),
    )


def gradient_curvature(pair: FactorPair, k: Element, c: Element, gradient: Tensor) -> Curvature:
    """Return ``Y^T Y / d`` and ``Y Y^T / p`` with ``Y = C^T G K``, the projections of ``vec(G) vec(G)^T``.

    At the fixed point ``S_a = E[G S_b^-1 G^T] / p`` and ``S_b = E[G^T S_a^-1 G] / d`` with ``C C^T = S_a^-1`` and
    ``K K^T = S_b^-1``: the Kronecker product nearest to the covariance of G in the sense of Kullback and Leibler.
    """
    gradient, unit = in_units(gradient)
    left, right = pair
    one = gradient.new_ones(())
    through_c = right.through(c, gradient.mT).mT
    through_both = left.through(k, through_c)
    through_k = through_both
    if not (left.has_root and right.has_root):
        through_k = left.through(k, gradient)
    # S is X^T Z. X is Z where a factor is stored, and Z is P X where only its product P with itself is.
    of_k, of_c = (through_c, through_both), (through_k.mT, through_both.mT)
    return Curvature(
        left.project_product(of_k if right.has_root else (gradient, through_k), of_k),
        right.project_product(of_c if left.has_root else (gradient.mT, through_c.mT), of_c),
        one / right.size,
        one / left.size,
        gradient.square().mean((-2, -1)),
        unit.double().square(),
    )


# ---------------------------------------------------------------------- the update
class Update(NamedTuple):
    """New factors, packed, and momenta; as they were in layers whose curvature is not finite."""

    k: Tensor
    c: Tensor
    m_k: Tensor | None
    m_c: Tensor | None
    level: Tensor | None
    """The running mean of the curvature."""
    finite: Tensor
    """Whether each layer's curvature is finite."""


def update(
    pair: FactorPair,
    settings: UpdateSettings,
    k: Element,
    c: Element,
    momenta: tuple[Tensor | None, Tensor | None],
    level: Tensor | None,
    source: Statistics | Tensor,
    ok: Tensor,
    layers: int,
) -> Update:
    """Compute new factors from old factors and the statistics of a batch, or a gradient matrix; a pure function.

    The factors are those of ``layers`` layers, block after block. With a ``level``, the running mean of the curvature,
    curvature and damping are relative to the mean. Nothing changes where ``ok`` is False.
    """
    if isinstance(source, Statistics):
        # A batch's curvature is relative to its own mean, so that the loss's scale may change at any time.
        seen, reference = curvature(pair, k, c, source), None
    else:
        # A single gradient matrix is too noisy for that: its mean would turn with it, and the fixed point would move.
        seen, reference = gradient_curvature(pair, k, c, source), level
    mean = seen.absolute_mean
    seen = seen.absolute() if level is None else seen.relative_to(reference)
    rate, limit = settings.b1, settings.bound
    if not settings.inside:
        rate, limit = 1.0, settings.bound / settings.b1 if settings.b1 else math.inf
    size_k, size_c = pair.left.mean_square(k), pair.right.mean_square(c)
    m_k = pair.left.tangent(k, seen.in_k, seen.weight_k, settings.damping * size_c, limit, rate)
    m_c = pair.right.tangent(c, seen.in_c, seen.weight_c, settings.damping * size_k, limit, rate)
    finite = finite_layers([*m_k, *m_c], layers)
    may = (ok & finite).repeat_interleave(len(mean) // layers)
    sides = zip(pair, (k, c), (m_k, m_c), momenta, strict=True)
    (new_k, momentum_k), (new_c, momentum_c) = (_moved(*side, settings, may.to(k[0].dtype)) for side in sides)
    if pair.left.has_scale and pair.right.has_scale:
        excess = torch.where(may, imbalance(size_k, size_c), 1)
        new_k, new_c = pair.left.rescaled(new_k, 1 / excess), pair.right.rescaled(new_c, excess)
    new_level = None if level is None else torch.where(may, _followed(level, mean), level)
    return Update(pair.left.pack(new_k), pair.right.pack(new_c), momentum_k, momentum_c, new_level, finite)


def _moved(
    form: FactorForm, a: Element, tangent: Element, momentum: Tensor | None, settings: UpdateSettings, gates: Tensor
) -> tuple[Element, Tensor | None]:
    """Set ``m <- a1 m + tangent`` and ``A <- A Exp(-m)``, with b1 in one of them.

    Nothing changes where a gate is zero.
    """
    # A tangent of zeros changes nothing; to choose between old and new values would take longer.
    m = tuple(block.nan_to_num_(0.0, 0.0, 0.0).mul_(align(gates, block)) for block in tangent)
    if momentum is not None:
        kept = gates * (settings.a1 - 1) + 1
        pairs = zip(m, form.unpack_momentum(momentum), strict=True)
        m = tuple(block.addcmul_(past, align(kept, past)) for block, past in pairs)
        momentum = form.pack_momentum(m)
        m = tuple(block * align(gates, block) for block in m)
    return form.moved(a, m, settings.order, -1.0 if settings.inside else -settings.b1), momentum


def imbalance(size_k: Tensor, size_c: Tensor) -> Tensor:
    """Return the power of two by which K is divided and C multiplied, from ``tr(K^T K)/p`` and ``tr(C^T C)/d``.

    ``K K^T x C C^T`` does not change with it, to the last bit. Nothing in the update holds the scales of K and C alone,
    and its higher orders let them drift apart until products overflow. So the two are balanced as soon as their mean
    squares differ by a factor of 16.
    """
    exponent = (torch.log2(size_k / size_c) / 4).trunc()
    return torch.exp2(torch.where(exponent.isfinite(), exponent, 0))


def finite_layers(tensors: Iterable[Tensor], layers: int) -> Tensor:
    """Return whether all blocks of each layer are finite in all tensors."""
    sums = [tensor.sum(tuple(range(1, tensor.ndim))) for tensor in tensors]  # not finite where an entry is not
    return torch.stack(sums).isfinite().all(0).view(layers, -1).all(1)


def _followed(level: Tensor, now: Tensor) -> Tensor:
    """Return the running mean of the curvature, which begins with the first mean that is not zero."""
    return torch.where(level > 0, level.lerp(now, 1 - LEVEL_MEMORY), now)


# ---------------------------------------------------------------------- schedules of b1
def published_precond_lr(step: int) -> float:
    """Return b1 of the paper's warm-up: 0.0002 for 100 iterations, 0.002 up to 500, then 0.01."""
    return 0.0002 if step < 100 else 0.002 if step < 500 else 0.01


def early_average(step: int) -> float:
    """Return the default b1: 1/2, 1/3, 1/4 and 1/5 from then on, so that the first updates are plain averages."""
    return max(0.2, 1 / (step + 2))
