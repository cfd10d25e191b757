"""A physics-informed network (Raissi et al. 2019) for Burgers' equation."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from ..models.perceptron import perceptron
from .task import Task

VISCOSITY = 0.05 / math.pi
"""A fifth of the usual steepness, so that the front can be learned in a short run."""


class Burgers(Task):
    """``u_t + u u_x = v u_xx`` for t in [0, 1] and x in [-1, 1], with ``u(0, x) = -sin(pi x)`` and ``u(t, +-1) = 0``.

    A perceptron 2-64-64-64-64-1 with tanh in float64 takes (t, x). The loss is the mean squared residual at random
    points of the interior, and ten times the mean squared error at random points of the border.
    """

    name, steps, warmup, measure = "equation", 600, 20, "relative L2 error of the solution in %"
    interior, border, weight = 256, 96, 10.0

    def __init__(self) -> None:
        moments, places = (torch.linspace(a, 1, n, dtype=torch.float64) for a, n in ((0, 41), (-1, 101)))
        self._grid = torch.cartesian_prod(moments, places)
        self._solution = solution(*self._grid.T)

    def model(self) -> nn.Module:
        return perceptron((2, 64, 64, 64, 64, 1), nn.Tanh).double()

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return points of the interior, then of the border. The loss differentiates by them, so they are targets."""
        t, x = torch.rand(self.interior + self.border, 2, dtype=torch.float64, generator=generator).T
        x = 2 * x - 1
        start, sides = slice(self.interior, self.interior + self.border // 2), slice(-self.border // 2, None)
        t[start] = 0
        x[sides] = x[sides].sign()
        points = torch.stack([t, x], 1).requires_grad_()
        return points, points

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        inside = slice(self.interior)
        first = _gradient(output, target)
        second = _gradient(first[:, 1], target)
        residual = first[inside, 0] + output[inside, 0] * first[inside, 1] - VISCOSITY * second[inside, 1]
        wanted = torch.where(target[:, 0] == 0, -torch.sin(math.pi * target[:, 1]), 0)[self.interior :].detach()
        border = output[self.interior :, 0] - wanted
        return residual.square().mean() + self.weight * border.square().mean()

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            error = model(self._grid)[:, 0] - self._solution
        return 100 * (error.norm() / self._solution.norm()).item()


def _gradient(values: Tensor, points: Tensor) -> Tensor:
    """Return the derivatives of each value by the coordinates of its point."""
    return torch.autograd.grad(values.sum(), points, create_graph=True)[0]


def solution(t: Tensor, x: Tensor, nodes: int = 200) -> Tensor:
    """Return the solution by the Cole-Hopf transformation (Cole 1951), as an integral by Gauss-Hermite quadrature::

    u(t, x) = - E sin(pi y) f(y) / E f(y)    with    y ~ N(x, 2 v t),    f(y) = exp(-cos(pi y) / (2 pi v))
    """
    places, weights = (torch.from_numpy(values) for values in np.polynomial.hermite.hermgauss(nodes))
    y = x[:, None] - (4 * VISCOSITY * t[:, None]).sqrt() * places
    # The largest exponent is subtracted, because numerator and denominator may be multiplied by the same number.
    exponents = -torch.cos(math.pi * y) / (2 * math.pi * VISCOSITY)
    share = weights * torch.exp(exponents - exponents.amax(1, keepdim=True))
    return -(torch.sin(math.pi * y) * share).sum(1) / share.sum(1)
