"""How far a step may go, and which frames are too near to singular matrices for their precision."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..groups import Affine, Element, Group, LowRankAffine, Marginal
from ..linalg import HALF, align, probe, spectral_norm_by_powers, widen
from ..manifolds import Point

AUTO_RADIUS = 0.5
"""``max_step="auto"``: no direction of tau changes by more than a factor ``sqrt(e)`` in a step.

On metric nearness, where SGD at large rates overshoots, momentum of 0.8 converges twice as fast with it as with 1.
"""
DEFAULT_RADIUS = 1.0
"""Up to here the bracket correction holds; where ``max_step`` is None it comes with this bound on ``||2 D.eta||_2``."""
SEARCH_RADIUS = 4.0
"""The same for a step that a line search of torch's L-BFGS has chosen, which may consist of many iterations."""
SQRT_2 = math.sqrt(2)
CONDITION = 0.1
"""The largest condition number of a factor, in units of the precision: beyond it rounding decides the smallest axes."""
MAGNITUDE = 0.4
"""The largest and the least singular value, as powers of the type's: their squares are then numbers too."""


def greatest_length(coordinates: Tensor) -> float:
    """Return a bound on the stretch of every step in a batch, from one norm; infinite for a step that is not finite.

    The norm of all coordinates is no less than the geodesic length of each step, except that the factors of a Kronecker
    product have lengths of their own, which add up to at most sqrt(2) times it.
    """
    length = SQRT_2 * torch.linalg.vector_norm(widen(coordinates)).item()
    return length if length == length else math.inf


def bounded_share(group: Group, parameter: Tensor, radius: float) -> Tensor:
    """Return the factors that cut the steps of a batch to stretches of at most the radius."""
    return (radius / group.stretch(group.unpack(parameter))).clamp(max=1)  # a zero step: inf, clamped


def hold_at_bound(eta: Tensor, grad: Tensor | None, share: Tensor) -> None:
    """Make a gradient beyond the bound that of a loss which is constant along rays from there on.

    A line search then sees a function of every trial that is continuous, bounded by what the bound lets it reach, and
    flat in the direction that leads further away.
    """
    if grad is None:
        return
    dims = tuple(range(share.ndim, eta.ndim))
    along = (grad * eta).sum(dims, keepdim=True) / eta.square().sum(dims, keepdim=True)
    outside = align(share < 1, grad)
    grad.copy_(torch.where(outside, align(share, grad).to(grad.dtype) * (grad - along * eta), grad))


def _linear_part(group: Group, a: Element) -> tuple[Group, Element]:
    if isinstance(group, (Affine, LowRankAffine)):
        return group.linear, a[: len(group.linear.shapes)]
    return group, a


def nearness(group: Group, a: Element) -> Tensor:
    """Return how near a factor is to what its precision cannot hold, of the batch shape: 1 is too near.

    It is the logarithm of the condition number as a share of the largest one, or that of the largest or least singular
    value, if more; all estimated by the power method.
    """
    group, a = _linear_part(group, a)
    batch = group.batch_shape(a)
    start = probe(group.k, a[0].dtype, a[0].device).expand(*batch, 1, group.k)

    def norm(rows_of: Group, element: Element, inverse: bool = False) -> Tensor:
        act = rows_of.apply_inverse if inverse else rows_of.apply
        return spectral_norm_by_powers(lambda x: act(element, x), lambda x: act(element, x, True), start)

    try:
        if isinstance(group, Marginal):
            inverse = norm(group, a, inverse=True)
        else:
            inverse = norm(group, group.ldiv(a, group.identity_like(a)))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # exactly singular
        return torch.full(batch, math.inf, dtype=torch.float64, device=start.device)
    high, low = norm(group, a).log().reshape(batch), -inverse.log().reshape(batch)
    size = torch.maximum(high.abs(), low.abs()) / (MAGNITUDE * math.log(torch.finfo(a[0].dtype).max))
    return torch.maximum((high - low) / _room(a[0].dtype), size).nan_to_num(nan=math.inf)


@functools.cache
def _room(dtype: torch.dtype) -> float:
    """Return the logarithm of the largest condition number; zero for half precision, which cannot hold any of use."""
    return 0.0 if dtype in HALF else math.log(CONDITION / torch.finfo(dtype).eps)


class ConditionGuard:
    """Keeps a frame where its precision can hold it, at no cost far from there.

    A bounded step alone does not: a loss without a minimum drives a point to a singular matrix, step by step. As a step
    multiplies a condition number by at most e to its length, lengths are added up until the sum may have become too
    large. Only then is :func:`nearness` computed.
    """

    __slots__ = ("_frame", "_near", "_point", "_room", "_version")

    def __init__(self, point: Point) -> None:
        self._point = point
        self._leave(point.frame, -1, math.inf)

    def _leave(self, frame: Tensor, version: int, near: float) -> None:
        """Remember a bound on the nearness of a frame as it is left."""
        self._frame, self._version, self._near, self._room = frame, version, near, _room(frame.dtype)

    def allows(self, length: float) -> bool:
        """Return, before a fold, whether a step of that length surely leads to where the precision can hold it."""
        frame: Tensor = self._point._buffers["frame"]  # type: ignore[assignment]  # quicker than an attribute
        version = frame._version
        if self._frame is not frame or self._version != version:  # the first step, or somebody else has moved it
            group = self._point.group
            known = not _room(frame.dtype) or frame.numel() == 0
            self._leave(frame, version, 0.0 if known else float(nearness(group, group.unpack(frame)).max()))
        if not self._room:
            return False
        self._near += length / self._room
        self._version = version + 1  # a fold writes to the frame once
        return self._near <= 1

    def copy(self) -> Tensor | None:
        """Return a copy of the frame for :meth:`settle`, after a step that is not surely allowed."""
        return self._point.frame.clone() if self._room else None

    def settle(self, before: Tensor) -> Tensor | None:
        """Undo a fold for elements that are too near, and nearer than before it; ``before`` is a copy from then.

        Return which elements have moved if there are any of those, and otherwise None.
        """
        frame, group = self._point.frame, self._point.group
        new = nearness(group, group.unpack(frame))
        refused = new > 1
        if bool(refused.any()):
            old = nearness(group, group.unpack(before))
            refused &= new > old
            new = torch.where(refused, old, new)
            frame.copy_(torch.where(align(refused, frame), before, frame))
        self._leave(frame, frame._version, float(new.max()))
        return ~refused if bool(refused.any()) else None
