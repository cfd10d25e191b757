"""tau as a function of flat coordinates, and what automatic differentiation says of it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from gnomon.frames import Chart
from gnomon.groups import Element, Group


def projector(group: Group) -> Tensor:
    """The coordinates that count: symmetric ones of a dense block, and none of a fixed entry."""
    units = group.unflatten(torch.eye(group.numel, dtype=torch.float64))
    return group.flatten(group.unscale(group.scale(units)))


def tau_of(chart: Chart, a: Element) -> Callable[[Tensor], Tensor]:
    """The map phi of the paper at the frame ``a``, from the coordinates to the entries of tau in one row."""
    return lambda eta: chart.matrix(chart.retract(a, chart.group.unflatten(eta))).flatten(-2)


def chain_rule(chart: Chart, a: Element, step: Element, vector: Element) -> Tensor:
    """Eq. jacobian_transform: ``w^T d(eta)/d(xi)`` between the charts before and after a step, at the new point."""
    eta = chart.group.flatten(step)
    old, new = tau_of(chart, a), tau_of(chart, chart.retract(a, step))
    change = torch.linalg.pinv(jacobian(old, eta), rtol=1e-9) @ jacobian(new, torch.zeros_like(eta))
    return chart.group.flatten(vector) @ change
