"""Running averages of points, on the submanifold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn

from ..groups import Square
from .divergence import trace_of_ratio
from .gaussian import Gaussian
from .point import Point, known_points

STEPS = 30
"""Natural-gradient steps to a new average at most; where points differ little, two or three are enough."""
ENOUGH = 1e-3
"""A step of this length, as a share of the precision's root, is the last."""
LONGEST = 0.5


def _covariance(point: Point) -> Square:
    if isinstance(point, Gaussian):
        return point.normals().covariance
    group, a, form = point.group, point.element(), point.chart.form
    if form == "inner":
        return Square(group.transposed, group.transpose(a), False)
    return Square(group, a, form == "inverse")


@torch.no_grad()
def move_average(average: Point, frame: Tensor, share: float) -> None:
    """Set ``average <- (1 - share) average + share point`` on the submanifold, for a point of the same sort at a frame.

    The new average is the point of the submanifold whose matrix tau is nearest to that of the two matrices' average in
    Kullback-Leibler divergence: on the full manifold the average itself. It minimizes
    ``sum_i w_i (tr(tau^-1 tau_i) + log det tau)``, by natural-gradient steps at the cost of the structure. The mean
    of a Gaussian is averaged as it is.
    """
    point = copy.deepcopy(average)
    point.frame.copy_(frame)
    parts = [(1 - share, _frozen(average)), (share, _frozen(point))]
    if isinstance(average, Gaussian):
        assert isinstance(point, Gaussian)
        mean = torch.lerp(average.loc, point.loc, share)
    close = ENOUGH * torch.finfo(average.dtype).eps ** 0.5
    for _ in range(STEPS):
        with torch.enable_grad():
            tau = _covariance(average)
            loss = sum((weight * trace_of_ratio(other, tau).sum() for weight, other in parts), tau.logdet().sum())
            (gradient,) = torch.autograd.grad(loss, average.eta)
        if _step(average, gradient) <= close:
            break
    if isinstance(average, Gaussian):
        average.assign_(loc=mean)


def _frozen(point: Point) -> Square:
    """Return the covariance as it is now, in memory of its own."""
    square = _covariance(point)
    return square._replace(element=tuple(block.detach().clone() for block in square.element))


def _step(point: Point, gradient: Tensor) -> float:
    """Take a natural-gradient step of a bounded length.

    The metric is twice Fisher's, and the loss twice a divergence.
    """
    group = point.group
    gradient = gradient / len(group.coordinate_sets)  # factors that are normalized apart move a common scale together
    stretch = group.stretch(group.unpack(gradient))
    share = (LONGEST / stretch).clamp(max=1).reshape(stretch.shape + (1,) * (gradient.ndim - stretch.ndim))
    point.eta.copy_(-share * gradient)
    point.fold()
    return float(stretch.max()) if stretch.numel() else 0.0


class _AveragedPoints(AveragedModel):
    """An average of a model in which points are averaged as matrices of their submanifold."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        average = None if decay is None else get_ema_multi_avg_fn(decay)
        super().__init__(model, multi_avg_fn=average)
        self._decay = decay

    def update_parameters(self, model: nn.Module) -> None:
        """Add the model as it is now to the average."""
        count = int(self.n_averaged)
        pairs = [
            (mine, theirs)
            for mine, theirs in zip(self.module.modules(), model.modules(), strict=True)
            if isinstance(mine, Point) and isinstance(theirs, Point)
        ]
        frames = [mine.frame.clone() for mine, _ in pairs]
        super().update_parameters(model)  # which copies buffers, as frames are
        if not count:
            return
        share = 1 / (count + 1) if self._decay is None else 1 - self._decay
        for (mine, theirs), frame in zip(pairs, frames, strict=True):
            mine.frame.copy_(frame)
            move_average(mine, theirs.group.pack(theirs.element()).detach(), share)


def averaged(model: nn.Module, *, decay: float | None = None) -> AveragedModel:
    """Return a running average of a model in which points stay on their submanifolds.

    It is a :class:`torch.optim.swa_utils.AveragedModel`. Call its ``update_parameters(model)`` after optimizer steps.
    Ordinary parameters are averaged as torch does. The average of points is the point of the submanifold that is
    nearest, in Kullback-Leibler divergence, to the average of their matrices; it costs a few products of the structure.

    Args:
        model: a model that holds points, or a point.
        decay: None for the average of all updates, else an exponential average in which the latest counts
            ``1 - decay``.
    """
    _check_decay(decay)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return _AveragedPoints(model, decay)


def get_avg_fn(decay: float | None = None) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    """Return an ``avg_fn`` for :class:`torch.optim.swa_utils.AveragedModel`, for code that builds this model itself.

    Points are averaged as by :func:`averaged`. Their frames are buffers, so that the model must be built with
    ``use_buffers=True``: ``AveragedModel(model, avg_fn=gnomon.get_avg_fn(0.99), use_buffers=True)``. Other buffers are
    then averaged too, those of integers are copied.

    Args:
        decay: None for the average of all updates, else an exponential average in which the latest counts
            ``1 - decay``.
    """
    _check_decay(decay)
    ordinary = get_swa_avg_fn() if decay is None else get_ema_avg_fn(decay)
    waiting: WeakSet[Point] = WeakSet()  # points whose coordinates have come; their frames come with the buffers

    @torch.no_grad()
    def average(averaged: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        if not averaged.is_floating_point():
            return current
        for point in known_points():
            if _same_memory(point.eta, averaged):
                if point in waiting:
                    raise ValueError("the model holds points, so AveragedModel needs use_buffers=True")
                waiting.add(point)
                return averaged
            if _same_memory(point.frame, averaged):
                waiting.discard(point)
                move_average(point, current, 1 / (int(num_averaged) + 1) if decay is None else 1 - decay)
                return point.frame
        return ordinary(averaged, current, num_averaged)

    return average


def _check_decay(decay: float | None) -> None:
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"decay must be None or a number from 0 to below 1, got {decay!r}")


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.device == other.device
