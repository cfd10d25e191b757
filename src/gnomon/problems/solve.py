"""One call that minimizes a problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..manifolds import point_of
from ..optim import LBFGS, StructuredNewton, moving_frame
from ..optim.moving_frame import is_framed
from .base import Problem


@dataclass(frozen=True)
class Solution:
    """Where :func:`solve` ended, and why."""

    point: Any
    """The module or parameter that was moved."""
    loss: float
    minimum: float | None
    """The known least value of the loss, or None."""
    gradient_norm: float
    """The length of the Riemannian gradient."""
    iterations: int
    evaluations: int
    """Of the loss and its gradient."""
    seconds: float
    converged: bool
    """Whether the gradient became as small as asked."""
    message: str

    @property
    def gap(self) -> float | None:
        """The loss above its known minimum."""
        return None if self.minimum is None else self.loss - self.minimum


def solve(
    problem: Problem | Callable[[Any], Tensor],
    point: nn.Module | Tensor | None = None,
    *,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
    callback: Callable[[int, float], object] | None = None,
) -> Solution:
    """Minimize a deterministic problem; :class:`gnomon.optim.LBFGS` unless another optimizer is given.

    Args:
        problem: a problem, or any function from a point to its loss.
        point: where to start: a point, a module that holds points and ordinary parameters, or a parameter. It is
            moved in place. ``problem.start()`` unless given.
        optimizer: makes an optimizer of the parameters, for example ``lambda p: torch.optim.Adam(p, lr=0.1)``; it is
            framed by :func:`gnomon.moving_frame` where there are points.
        tolerance: stop when the Riemannian gradient is no longer than this. The metric is scale-free, so that near a
            minimum of curvature one the gap is half the square.
        max_iterations: stop after as many steps.
        callback: called with the iteration and the loss there, before each step and at the end.
    """
    if point is None:
        if not isinstance(problem, Problem):
            raise ValueError("point is None, but the problem is a function without a start; give a point to move")
        point = problem.start()
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance!r}")
    if not isinstance(max_iterations, int) or max_iterations < 0:
        raise ValueError(f"max_iterations must be an integer of at least 0, got {max_iterations!r}")
    parameters: list[Tensor] = [point] if isinstance(point, Tensor) else list(point.parameters())
    if not any(p.requires_grad for p in parameters):
        raise ValueError("point holds no parameter that requires a gradient, so nothing can be moved; unfreeze one")
    method = LBFGS(parameters) if optimizer is None else _framed(optimizer(parameters), parameters)
    evaluation = _Evaluation(problem, point, parameters)
    start = time.perf_counter()
    message, iteration, stalls = f"stopped after {max_iterations} iterations", 0, 0
    while True:
        value = method.evaluate(evaluation) if isinstance(method, LBFGS) else evaluation.ahead()
        norm = _gradient_norm(parameters)
        if callback is not None:
            callback(iteration, value)
        if norm <= tolerance:
            message = f"the gradient is no longer than {tolerance:g}"
        if stalls == 2:  # with and without memory
            message = "no step decreases the loss: the precision is exhausted, or the loss has no minimum"
        if norm <= tolerance or stalls == 2 or iteration == max_iterations:
            break
        if isinstance(method, StructuredNewton):
            method.step(lambda: problem(point))  # it differentiates the loss itself
        else:
            method.step(evaluation)  # type: ignore[arg-type]
        if isinstance(method, LBFGS):
            stalls = stalls + 1 if method.evaluate(evaluation) >= value else 0
        iteration += 1
    return Solution(
        point=point,
        loss=value,
        minimum=problem.minimum if isinstance(problem, Problem) else None,
        gradient_norm=norm,
        iterations=iteration,
        evaluations=evaluation.count,
        seconds=time.perf_counter() - start,
        converged=norm <= tolerance,
        message=message,
    )


def _framed(method: Optimizer, parameters: list[Tensor]) -> Optimizer:
    """Return an optimizer that moves points, unless it does so already or there are none."""
    points = any(point_of(p) is not None for p in parameters)
    return moving_frame(method) if points and not isinstance(method, LBFGS) and not is_framed(method) else method


def _gradient_norm(parameters: list[Tensor]) -> float:
    lengths = [p.grad.double().norm() for p in parameters if p.grad is not None]
    return float(torch.stack(lengths).norm()) if lengths else 0.0


class _Evaluation:
    """A closure that counts, and that can be evaluated ahead of the step whose first call then takes what is there."""

    def __init__(self, problem: Callable[[Any], Tensor], point: Any, parameters: list[Tensor]) -> None:
        self.problem, self.point, self.parameters = problem, point, parameters
        self.count = 0
        self._loss: Tensor | None = None

    def __call__(self) -> Tensor:
        loss, self._loss = self._loss, None
        if loss is not None:
            return loss
        for p in self.parameters:
            p.grad = None
        loss = self.problem(self.point)
        loss.backward()
        self.count += 1
        return loss

    def ahead(self) -> float:
        self._loss = None
        self._loss = self()
        return float(self._loss.detach())
