"""L-BFGS whose line search moves the frame."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..manifolds import all_finite, point_of
from .step_bound import DEFAULT_RADIUS

SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
LONGEST_STEP: dict[int | None, float] = {1: 1.0, 2: 1.5, None: 4.0}
"""By order of the exponential: no step changes a direction of tau by more than e to this power.

The quadratic one turns back where ``2 N`` reaches -2, the linear one is singular there. (``DEFAULT_RADIUS`` bounds
steps along which the memory is carried by the bracket correction.)
"""
MORE_TRIALS = 4
"""After a first trial that decreases the loss enough, so many are made for a longer step at most."""


class LBFGS(Optimizer):
    """Limited-memory BFGS for deterministic problems, with a weak Wolfe line search; one iteration a step.

    ``torch.optim.LBFGS`` behind :func:`gnomon.moving_frame` evaluates its trial points in the old frame, where
    derivatives are dear, and the accepted one again in the new. Here each trial *is* a new frame: the loss and its
    gradient are evaluated at the origin, a unit step costs one evaluation, and the pairs ``s = t d``,
    ``y = g_new - g`` are those of Riemannian L-BFGS, since vectors reach the new frame as
    :meth:`gnomon.frames.Chart.carry` says (unchanged on the full manifold).

    It folds by itself: do not wrap it in :func:`gnomon.moving_frame`. Ordinary parameters may be among ``params``.
    ``step(closure)`` returns the loss at the new point, and leaves the gradients there. Where no trial decreases the
    loss nothing moves, the memory starts anew, and ``stalled_steps`` counts one more. The loss and the gradient are
    kept from step to step, so that the closure must stay the same function; for another one build another optimizer.
    """

    folds_by_itself = True
    stalled_steps: int = 0
    _seen: list[int] | None = None  # the versions of what it moves, where it last evaluated; not kept by copies

    def __init__(self, params: Any, *, history_size: int = 10, max_eval: int = 25) -> None:
        for name, value in (("history_size", history_size), ("max_eval", max_eval)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        super().__init__(params, {"history_size": history_size, "max_eval": max_eval})

    # ------------------------------------------------------------------ the iteration
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise ValueError("closure is None, but a line search evaluates the loss several times; pass one")
        evaluate = partial(_value, closure)
        self.evaluate(closure)
        state = self.state[self._parameters[0]]
        direction = self._direction(state)
        slope = float(direction @ state["gradient"])
        if not slope < 0:  # rounding has spoilt the memory
            state["steps"], state["changes"] = [], []
            direction = -state["gradient"]
            slope = float(direction @ state["gradient"])
        if slope < 0:
            start = [place.clone() for place in self._places()]
            try:
                self._search(evaluate, state, start, direction, slope)
            except BaseException:  # of the closure: nothing has happened
                self._move(start, direction, 0.0)
                raise
        return torch.tensor(state["loss"], dtype=torch.float64)

    @torch.no_grad()
    def evaluate(self, closure: Callable[[], Any]) -> float:
        """Return the loss at the current point, with its gradients in place.

        Both are from memory if nothing has moved since.
        """
        state = self.state[self._parameters[0]]
        if self._seen != self._versions():  # the first step, or somebody else moved a parameter
            before = state.get("gradient")
            self._arrive(state, _value(closure), self._gradient())
            if before is None or not torch.equal(before, state["gradient"]):
                state["steps"], state["changes"] = [], []
        return float(state["loss"])

    def _search(
        self,
        evaluate: Callable[[], float],
        state: dict[str, Any],
        start: list[Tensor],
        direction: Tensor,
        slope: float,
    ) -> None:
        """Search for a weak Wolfe step by Lewis and Overton's bracket, with interpolation on the way back.

        Where rounding hides whether the loss has decreased, its slope decides, by the approximate Wolfe conditions of
        Hager and Zhang (2005): it is between ``CURVATURE`` times the first slope and its opposite, nearly.
        """
        longest = self._longest(direction)
        low, high, t = 0.0, math.inf, min(longest, self._first_trial(state, direction))
        more, rounding = MORE_TRIALS, self._rounding(state)
        for _ in range(self.param_groups[0]["max_eval"]):
            loss = evaluate() if self._move(start, direction, t) else math.inf
            gradient = self._gradient()
            rise = loss - state["loss"] if all_finite(gradient) else math.inf
            new_slope = float(gradient @ self._velocity(direction, t)) if rise <= rounding else math.inf
            enough = rise <= SUFFICIENT_DECREASE * t * slope
            if not enough and new_slope > (2 * SUFFICIENT_DECREASE - 1) * slope:
                # The vertex of the parabola through what is known, kept away from the ends of the bracket.
                vertex = 0.5 * slope * t * t / (slope * t - rise) if math.isfinite(rise) else 0.0
                if math.isfinite(new_slope):
                    vertex = slope * t / (slope - new_slope)
                high, t = t, min(max(vertex, low + 0.1 * (t - low)), low + 0.5 * (t - low))
                continue
            short = new_slope < CURVATURE * slope
            if not short or t >= longest or not more:
                self._remember(state, direction, gradient, t)
                self._arrive(state, loss, gradient)
                return
            more -= 1
            low, t = t, min(longest, 2 * t if high == math.inf else 0.5 * (t + high))
        self._move(start, direction, low)
        state["steps"], state["changes"] = [], []
        if not low:
            self.stalled_steps += 1
        self._arrive(state, evaluate(), self._gradient())

    def _rounding(self, state: dict[str, Any]) -> float:
        """Return the difference by which two values of the loss must differ to tell which is lower."""
        return abs(state["loss"]) * torch.finfo(self._parameters[0].dtype).eps ** (2 / 3)

    def _arrive(self, state: dict[str, Any], loss: float, gradient: Tensor) -> None:
        if not math.isfinite(loss) or not all_finite(gradient):
            raise ValueError(f"the loss is {loss} or its gradient is not finite; start from another point")
        state["loss"], state["gradient"] = loss, gradient
        self._seen = self._versions()

    def _remember(self, state: dict[str, Any], direction: Tensor, gradient: Tensor, t: float) -> None:
        """Carry the pairs to the new frame and add the new one; the oldest is dropped."""
        old = [direction, state["gradient"], *state["steps"], *state["changes"]]
        direction, before, *memory = self._carry(old, t * direction)
        half = len(memory) // 2
        keep = slice(1 - self.param_groups[0]["history_size"] or half, None)
        state["steps"] = [*memory[:half][keep], t * direction]
        state["changes"] = [*memory[half:][keep], gradient - before]

    def _direction(self, state: dict[str, Any]) -> Tensor:
        """Return ``-H g`` by the two loops, with ``H = s^T y / y^T y`` of the newest pair as a start."""
        q = -state["gradient"]
        pairs = [(s, y, float(s @ y)) for s, y in zip(state["steps"], state["changes"], strict=True)]
        pairs = [pair for pair in pairs if pair[2] > 0]
        weights = []
        for s, y, sy in reversed(pairs):
            weights.append(float(s @ q) / sy)
            q.add_(y, alpha=-weights[-1])
        if pairs:
            _, y, sy = pairs[-1]
            q.mul_(sy / float(y @ y))
        for s, y, sy in pairs:
            q.add_(s, alpha=weights.pop() - float(y @ q) / sy)
        return q

    def _first_trial(self, state: dict[str, Any], direction: Tensor) -> float:
        """Return the first step to try: 1, except where no scale is known yet for ordinary parameters."""
        if state["steps"]:
            return 1.0
        ordinary = zip(self._parameters, self._split(direction), strict=True)
        return min([1.0, *[1 / max(part.norm().item(), 1e-300) for p, part in ordinary if point_of(p) is None]])

    def _longest(self, direction: Tensor) -> float:
        """Return the longest step that the points can follow."""
        t = math.inf
        for p, part in zip(self._parameters, self._split(direction), strict=True):
            point = point_of(p)
            if point is not None:
                reach = point.group.reach(point.group.unpack(part)).max().item()
                longest = LONGEST_STEP[point.chart.order]
                if point.chart.carries_by_bracket():
                    longest = min(longest, DEFAULT_RADIUS)
                t = min(t, longest / reach) if reach else t
        return t

    def _velocity(self, direction: Tensor, t: float) -> Tensor:
        """Return the velocity of the curve along the direction, in the frame at t."""
        parts = []
        for p, part in zip(self._parameters, self._split(direction), strict=True):
            point = point_of(p)
            if point is not None:
                part = point.group.pack(point.chart.velocity(point.group.unpack(part), t))
            parts.append(part.flatten())
        return torch.cat(parts)

    # ------------------------------------------------------------------ places
    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _places(self) -> list[Tensor]:
        """Return what a move changes: the frame of a point, or an ordinary parameter itself."""
        points = ((p, point_of(p)) for p in self._parameters)
        return [p if point is None else point.frame for p, point in points]

    def _versions(self) -> list[int]:
        return [place._version for place in self._places()]

    def _gradient(self) -> Tensor:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([part.flatten() for part in parts])

    def _split(self, flat: Tensor) -> list[Tensor]:
        parameters = self._parameters
        parts = flat.split([p.numel() for p in parameters])
        return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]

    def _move(self, start: list[Tensor], direction: Tensor, t: float) -> bool:
        """Move everything to ``start + t direction``; return False where a point would overflow."""
        reached = True
        places = zip(self._parameters, self._places(), start, self._split(direction), strict=True)
        for p, place, origin, part in places:
            point = point_of(p)
            if point is None:
                torch.add(origin, part, alpha=t, out=place)
                continue
            place.copy_(origin)
            torch.mul(part, t, out=p)
            reached &= point.fold() is None
        return reached

    def _carry(self, vectors: list[Tensor], step: Tensor) -> list[Tensor]:
        """Return the vectors in the frame that ``step`` has led to."""
        points = [point_of(p) for p in self._parameters]
        if all(point is None or point.group.trivial_transport for point in points):
            return vectors
        stacked = torch.stack(vectors)
        columns = stacked.split([p.numel() for p in self._parameters], -1)
        for p, point, part, column in zip(self._parameters, points, self._split(step), columns, strict=True):
            if point is not None and not point.group.trivial_transport:
                group = point.group
                along = group.unpack(part.expand(len(vectors), *p.shape))
                carried = point.chart.carry(along, group.unpack(column.reshape(-1, *p.shape)))
                column.copy_(group.pack(carried).flatten(1))
        return list(stacked)


def _value(closure: Callable[[], Any]) -> float:
    """Return the loss, and set its gradients."""
    with torch.enable_grad():
        loss = closure()
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
