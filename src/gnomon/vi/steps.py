"""Steps of a Gaussian along a direction in its moving frame, with momentum and bounds."""

from __future__ import annotations

import math

import torch

from ..groups import Element, LowRank
from ..groups.base import add, times
from ..manifolds import Gaussian

LONGEST_FACTOR_STEP = 1.0
"""A bound on ``||2 D.eta||_2`` of the factor: no variance changes by more than a factor of e in a step."""
LONGEST_MEAN_STEP = 2.0
"""A bound on each coordinate of the mean's step in the frame, which is in standard deviations of q."""


class NaturalSteps:
    """``m <- alpha m + (1 - alpha) g``, ``q <- q(rate m)``, and m carried to the new frame (Eq. jacobian_transform).

    The mean and the factor have a bound each, so that a far mean does not slow the factor down. Gradients are cut to
    it before they enter the momentum, which one of them then cannot dominate.
    """

    def __init__(self, q: Gaussian, momentum: float) -> None:
        self.q, self.momentum = q, momentum
        self._velocity: Element | None = None

    @torch.no_grad()
    def take(self, gradient: Element, rate: float) -> bool:
        """Take one step up the gradient with learning rate ``rate``; return False where it would have overflowed."""
        q, group = self.q, self.q.group
        bounded = self._bounded(gradient, rate)
        if self._velocity is None or not self.momentum:
            velocity = bounded
        else:
            average = add(times(self.momentum, self._velocity), bounded, 1 - self.momentum)
            velocity = self._bounded(average, rate)
        if self.momentum:
            self._velocity = q.chart.carry(times(rate, velocity), velocity)
        q.eta.copy_(group.pack(velocity)).mul_(rate)
        if q.fold() is None:
            return True
        self.forget()
        return False

    def forget(self) -> None:
        """Begin anew without momentum."""
        self._velocity = None

    def _bounded(self, gradient: Element, rate: float) -> Element:
        cut = len(self.q.structure.shapes)
        factor, mean = gradient[:cut], gradient[-1]
        length = rate * factor_reach(self.q, factor)
        if length > LONGEST_FACTOR_STEP:
            factor = times(LONGEST_FACTOR_STEP / length, factor)
        longest = LONGEST_MEAN_STEP * math.sqrt(2) / rate  # a step of the mean is F eta / sqrt(2)
        longest = min(longest, torch.finfo(mean.dtype).max)
        mean = mean.clamp(-longest, longest)
        return (*factor, *gradient[cut:-1], mean)


def factor_reach(q: Gaussian, eta: Element) -> float:
    """Return an estimate of ``||2 D.eta||_2`` for coordinates of the factor."""
    linear = q.structure
    if isinstance(linear, LowRank):
        return float(linear.reach(eta))
    return 2 * float(linear.norm_estimate(linear.scale(eta)))


def squared_norm(vector: Element) -> float:
    """Return the squared length of a tangent vector in orthonormal coordinates."""
    norms = torch.stack([torch.linalg.vector_norm(block) for block in vector])
    return float(norms.square().sum())
