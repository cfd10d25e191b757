"""Any torch optimizer as a Riemannian one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..frames import Chart
from ..groups import Group
from ..manifolds import Point, all_finite, point_of
from .state import carried_vectors, scales_elementwise, shortened_vectors

Transport = Literal["auto", "corrected", "none"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "corrected", "none")

DEFAULT_RADIUS = 1.0
"""The bound on a step that the bracket correction comes with, unless ``max_step`` is given."""

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def moving_frame(optimizer: O, *, transport: Transport = "auto", max_step: float | None = None) -> O:
    """Let a torch optimizer move points on SPD submanifolds; returns the same optimizer.

    After each ``step()`` the coordinates of every point among its parameters are folded into the point's
    frame (``A <- A Exp(D.eta)``, ``eta <- 0``), and the optimizer's vector state is carried along. Ordinary
    parameters are left alone.

    Args:
        optimizer: any :class:`torch.optim.Optimizer` that holds coordinates of at least one
            :class:`gnomon.SPD` or :class:`gnomon.Gaussian`; closures and line searches included.
        transport: how momenta reach the new frame. ``"auto"``: unchanged where that is exact (full, block-diagonal,
            diagonal, Toeplitz and Kronecker structures), by the chain rule for the mean of a Gaussian, and by the
            bracket correction on asymmetric structures (triangular, arrow, Heisenberg), unless the optimizer
            scales each coordinate by its own history: Adam's second moments do not turn with the frame, and its
            first moments then had better not turn without them. ``"corrected"``: the correction for Gaussians
            and for Adam too. ``"none"``: always unchanged.
        max_step: a trust radius. No batch element moves further than this geodesic distance in a step; a
            step that is cut back takes its momentum with it. None means no bound, except that the bracket
            correction, which holds for short steps, comes with a radius of 1. (Lengths grow with the square root
            of the dimension: raise it where thousands of coordinates have far to go.)

    A step whose gradient is not finite is skipped as a whole, counted in ``optimizer.skipped_steps`` and
    warned about once; so is the move of a point that would overflow. Weight decay acts on coordinates that
    are zero, and so does nothing.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    if max_step is not None and not 0 < max_step < math.inf:
        raise ValueError(f"max_step must be a positive geodesic length, or None for no bound, got {max_step!r}")
    if not _find_points(optimizer):
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) holds no coordinates of a living gnomon.SPD or gnomon.Gaussian: "
            "build it from point.parameters() of a point that you keep, or use it without moving_frame"
        )
    if not isinstance(optimizer, _MovingFrame):
        optimizer.__class__ = _framed_class(type(optimizer))  # type: ignore[assignment]
    optimizer._install(transport, max_step)  # type: ignore[attr-defined]
    return optimizer


def _find_points(optimizer: Optimizer) -> list[tuple[Tensor, Point]]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            point = point_of(parameter)
            if point is not None:
                found.append((parameter, point))
    return found


_framed_classes: dict[type[Optimizer], type[Optimizer]] = {}


def _framed_class(base: type[Optimizer]) -> type[Optimizer]:
    """The subclass of an optimizer's class that folds after each step; made once."""
    if base not in _framed_classes:
        namespace = {"_unframed": base, "__doc__": base.__doc__}
        _framed_classes[base] = type(base.__name__, (_MovingFrame, base), namespace)
    return _framed_classes[base]


def _rebuild(base: type[Optimizer]) -> Optimizer:
    cls = _framed_class(base)
    return cls.__new__(cls)


class _Follower(NamedTuple):
    """A point that follows its coordinates, whether vectors must be carried there, and whether by the bracket."""

    parameter: Tensor
    point: Point
    carries: bool
    by_bracket: bool


class _GradientError(Exception):
    """Leaves an optimizer's step from within its first closure."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class _MovingFrame(Optimizer):
    """Mixed in before the optimizer's own class, so that its ``step`` is wrapped and all else is its own."""

    _unframed: type[Optimizer]
    skipped_steps: int

    def _install(self, transport: Transport, max_step: float | None, skipped_steps: int = 0) -> None:
        self._transport, self._max_step = transport, max_step
        self._corrected = transport == "corrected"
        self.skipped_steps = skipped_steps
        self._followers: list[_Follower] | None = None  # looked up at the first step

    # ------------------------------------------------------------------ the step
    def step(self, *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            return self._step_with_closure(closure, *args[1:], **kwargs)
        if not self._gradients_are_finite():
            self._skip("gradient")
            return None
        result = super().step(*args, **kwargs)
        self._fold()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step runs torch's hooks

    def _step_with_closure(self, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("closure", None)
        evaluations = 0

        def checked_closure() -> Any:
            nonlocal evaluations
            loss = closure()
            evaluations += 1
            if evaluations == 1 and not self._gradients_are_finite():
                raise _GradientError(loss)
            return loss

        points = [follower.point for follower in self._manifold()]
        with ExitStack() as stack:
            for point in points:
                stack.enter_context(point.exploring())
            try:
                result = super().step(checked_closure, *args, **kwargs)
            except BaseException as error:
                for point in points:
                    point.return_to_origin()
                if isinstance(error, _GradientError):
                    self._skip("gradient")
                    return error.loss
                raise
        if all_finite(*(follower.parameter for follower in self._manifold())):
            self._fold()
        else:  # a line search that ran away: its memory is spoilt as well
            for point in points:
                point.return_to_origin()
            self.state.clear()
            self._skip("step")
        return result

    def _manifold(self) -> list[_Follower]:
        if self._followers is None:
            self._followers = [self._follower(*found) for found in _find_points(self)]
            if not self._followers:
                raise RuntimeError(
                    "none of this optimizer's parameters belongs to a point any more; copy the model and "
                    "the optimizer together (copy.deepcopy((model, optimizer))), or build the optimizer anew"
                )
        return self._followers

    def _follower(self, parameter: Tensor, point: Point) -> _Follower:
        carries = self._transport != "none" and not point.group.trivial_transport
        return _Follower(parameter, point, carries, carries and point.chart.carries_by_bracket(self._corrected))

    def _gradients_are_finite(self) -> bool:
        return all_finite(*[f.parameter.grad for f in self._manifold() if f.parameter.grad is not None])

    def _skip(self, what: str) -> None:
        if self.skipped_steps == 0:
            warnings.warn(
                f"a {what} of a manifold parameter is not finite: the step was skipped, and nothing changed; "
                "look at the loss, the data or the learning rate (further ones are only counted, in "
                "optimizer.skipped_steps)",
                RuntimeWarning,
                stacklevel=4,
            )
        self.skipped_steps += 1

    # ------------------------------------------------------------------ the fold
    def _fold(self) -> None:
        for parameter, point, carries, by_bracket in self._manifold():
            if parameter.grad is None:
                continue
            if by_bracket and self._transport == "auto" and scales_elementwise(self, parameter):
                carries = by_bracket = False
            radius = DEFAULT_RADIUS if self._max_step is None and by_bracket else self._max_step
            if radius is not None:
                self._bound(parameter, point.group, radius)
            if carries:
                self._carry(parameter, point.chart)
            if not point.fold():  # a step cut back to nothing
                for vector in shortened_vectors(self, parameter):
                    vector.zero_()
                self._skip("step")

    @torch.no_grad()
    def _bound(self, parameter: Tensor, group: Group, radius: float) -> None:
        dims = tuple(range(-len(group.storage_shape), 0))
        length = torch.linalg.vector_norm(parameter, dim=dims, keepdim=True, dtype=torch.float64)
        share = (radius / length).clamp(max=1).to(parameter.dtype)  # a zero step: inf, clamped
        parameter.mul_(share)
        for vector in shortened_vectors(self, parameter):
            vector.mul_(share)

    @torch.no_grad()
    def _carry(self, parameter: Tensor, chart: Chart) -> None:
        vectors = list(carried_vectors(self, parameter))
        if not vectors:
            return
        group = chart.group
        stacked = torch.stack(vectors)  # L-BFGS has hundreds: one batch, not a loop
        step = group.unpack(parameter.expand_as(stacked))
        carried = group.pack(chart.carry(step, group.unpack(stacked), self._corrected))
        for vector, new in zip(vectors, carried, strict=True):
            vector.copy_(new)

    # ------------------------------------------------------------------ copies and pickles
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._followers = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "frame": (self._transport, self._max_step, self.skipped_steps)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict comes here too, with the optimizer's state alone
        settings = state.pop("frame", None)
        super().__setstate__(state)
        if settings is not None:
            self._install(*settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._unframed,), self.__getstate__()
