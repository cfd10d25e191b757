"""One call that minimizes a problem."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..manifolds import point_of
from ..optim import LBFGS, moving_frame
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
    parameters: list[Tensor] = [point] if isinstance(point, Tensor) else list(point.parameters())
    if optimizer is None:
        method: Optimizer = LBFGS(parameters)
    else:
        method = optimizer(parameters)
        if not isinstance(method, LBFGS) and any(point_of(p) is not None for p in parameters):
            method = moving_frame(method)
    evaluation = _Evaluation(problem, point, parameters)
    start = time.perf_counter()
    message, iteration, stalls = f"stopped after {max_iterations} iterations", 0, 0
    while True:
        value, norm = evaluation.here()
        if callback is not None:
            callback(iteration, value)
        if norm <= tolerance:
            message = f"the gradient is no longer than {tolerance:g}"
        if stalls == 2:  # with and without memory
            message = "no step decreases the loss: the precision is exhausted"
        if norm <= tolerance or stalls == 2 or iteration == max_iterations:
            break
        # A step begins with an evaluation where the last one was, except that LBFGS keeps it from step to step.
        keeps = isinstance(method, LBFGS)
        evaluation.fresh = iteration == 0 or not keeps
        method.step(evaluation)  # type: ignore[arg-type]
        evaluation.fresh = keeps
        stalls = stalls + 1 if keeps and float(evaluation.loss.detach()) >= value else 0
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


class _Evaluation:
    """A closure that does not evaluate the same point twice: neither here and then in a step, nor the reverse."""

    def __init__(self, problem: Callable[[Any], Tensor], point: Any, parameters: list[Tensor]) -> None:
        self.problem, self.point, self.parameters = problem, point, parameters
        self.count = 0
        self.fresh = False
        self.loss = torch.tensor(math.nan)

    def __call__(self) -> Tensor:
        if not self.fresh:
            for p in self.parameters:
                p.grad = None
            self.loss = self.problem(self.point)
            self.loss.backward()
            self.count += 1
        self.fresh = False
        return self.loss

    def here(self) -> tuple[float, float]:
        """The loss and the length of its gradient at the current point."""
        loss = float(self().detach())
        self.fresh = True
        lengths = [p.grad.norm() for p in self.parameters if p.grad is not None]
        return loss, float(torch.stack(lengths).norm()) if lengths else 0.0
