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
from ..groups import Affine, Group, LowRankAffine
from ..linalg import align, full_precision
from ..manifolds import Point, all_finite, point_of
from .state import carried_vectors, forget_line_search, scales_elementwise, shortened_vectors, squared_vectors
from .step_bound import (
    AUTO_RADIUS,
    DEFAULT_RADIUS,
    SEARCH_RADIUS,
    ConditionGuard,
    bounded_share,
    greatest_length,
    hold_at_bound,
)

Transport = Literal["auto", "corrected", "none"]
MaxStep = float | Literal["auto"] | None
TRANSPORTS: tuple[Transport, ...] = ("auto", "corrected", "none")

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def moving_frame(optimizer: O, *, transport: Transport = "auto", max_step: MaxStep = "auto") -> O:
    """Let a torch optimizer move points on SPD submanifolds; returns the same optimizer.

    After each ``step()`` the coordinates of every point among its parameters are folded into the point's
    frame (``A <- A Exp(D.eta)``, ``eta <- 0``), and the optimizer's vector state is carried along. Ordinary
    parameters are left alone. With SGD this is the update of Eqs. local_rgd_mom to jacobian_transform, and without
    momentum that of Eq. rgd_standard_norm.

    Args:
        optimizer: any :class:`torch.optim.Optimizer` that holds coordinates of at least one
            :class:`gnomon.SPD` or :class:`gnomon.Gaussian`; closures and line searches included.
        transport: how momenta reach the new frame. ``"auto"``: unchanged where that is exact (full, block-diagonal,
            diagonal, Toeplitz and Kronecker structures), by the chain rule for the mean of a Gaussian, and by the
            bracket correction on asymmetric structures (triangular, arrow, Heisenberg), unless the optimizer
            scales each coordinate by its own history: Adam's second moments do not turn with the frame, and its
            first moments then had better not turn without them. Both moments of a Gaussian's mean are carried to
            the new units, which are standard deviations. ``"corrected"``: the correction for Gaussians
            and for Adam too. ``"none"``: always unchanged.
        max_step: a trust radius. A step changes no direction of tau by more than a factor ``e^max_step``, and for a
            Gaussian moves no coordinate of the whitened mean by more than ``max_step`` standard deviations. (This is
            the length of the step in Thompson's metric. The geodesic length would grow with the number of
            coordinates.) Each batch element has a bound of its own. A step that is cut back takes its momentum with
            it, and L-BFGS then starts its memory anew. ``"auto"`` is 0.5, and 4 for the line search of
            ``torch.optim.LBFGS``. None means no bound, except that the bracket correction, which holds for short
            steps, comes with one of its own.

    A step whose gradient is not finite is skipped as a whole; a point (or batch element) that would overflow stays
    where it is and loses its momentum. Both are counted in ``optimizer.skipped_steps`` and warned about once. Weight
    decay acts on coordinates that are zero, and so does nothing.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if getattr(optimizer, "folds_by_itself", False):
        raise ValueError(f"optimizer {type(optimizer).__name__} moves points by itself; use it without moving_frame")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    _check_max_step(max_step)
    if not _find_points(optimizer):
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) holds no coordinates of a living gnomon.SPD or gnomon.Gaussian: "
            "build it from point.parameters() of a point that you keep, or use it without moving_frame"
        )
    patched = vars(optimizer).get("step")
    if patched is not None:
        if not hasattr(patched, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"optimizer.step of this {type(optimizer).__name__} has been replaced by {patched!r}; call "
                "moving_frame before whatever replaces it"
            )
        del optimizer.step  # a scheduler's note that the step was called; the framed step takes it itself
    if not isinstance(optimizer, _MovingFrame):
        optimizer.__class__ = _framed_class(type(optimizer))  # type: ignore[assignment]
    optimizer._install(transport, max_step)  # type: ignore[attr-defined]
    return optimizer


def _check_max_step(max_step: object) -> None:
    if max_step is None or max_step == "auto":
        return
    if not isinstance(max_step, (int, float)) or isinstance(max_step, bool) or not 0 < max_step < math.inf:
        raise ValueError(f"max_step must be a positive number, 'auto', or None for no bound, got {max_step!r}")


def is_framed(optimizer: Optimizer) -> bool:
    """Return whether :func:`moving_frame` has been applied."""
    return isinstance(optimizer, _MovingFrame)


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
    """Return the subclass of an optimizer's class that folds after each step; it is made once."""
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
    guard: ConditionGuard
    carries: bool
    by_bracket: bool
    may_scale: bool
    """Whether it matters that an optimizer scales coordinates one by one: vectors are carried, or there is a mean."""


_KEPT = ("_transport", "_max_step", "skipped_steps", "_params", "_numel_cache")
"""Attributes that copies keep beside what every optimizer keeps; the last two are those of torch's L-BFGS."""

_SKIPPED = "a gradient or step of a manifold parameter is not finite: the step was skipped, and nothing changed"


class _GradientError(Exception):
    """Leaves an optimizer's step from within its first closure."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class _MovingFrame(Optimizer):
    """Mixed in before the optimizer's own class, so that its ``step`` is wrapped and all else is its own."""

    _unframed: type[Optimizer]
    skipped_steps: int = 0

    def _install(self, transport: Transport, max_step: MaxStep) -> None:
        self._transport, self._max_step = transport, max_step
        self._corrected = transport == "corrected"
        self._followers: list[_Follower] | None = None  # looked up at the first step
        self._radius: float | None = None if max_step == "auto" else max_step

    # ------------------------------------------------------------------ the step
    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # what a scheduler wants to know
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            return self._step_with_closure(closure, *args[1:], **{k: v for k, v in kwargs.items() if k != "closure"})
        if not self._gradients_are_finite():
            self._skip(_SKIPPED, stacklevel=3)
            return None
        result = super().step(*args, **kwargs)
        self._fold(stacklevel=4)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step runs torch's hooks
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # see _opt_called

    def _step_with_closure(self, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        for follower in self._manifold():
            if not follower.point.is_folded():
                follower.point.fold()
        # An optimizer that may evaluate its closure after it has moved: what is ordinary must be restored on failure.
        searches = isinstance(self, torch.optim.LBFGS) or not self._unframed.__module__.startswith("torch.optim")
        before = self._snapshot() if searches else []
        evaluations = 0

        def checked_closure() -> Any:
            nonlocal evaluations
            cut = self._bound_trials() if searches else []
            loss = closure()
            for parameter, share in cut:
                hold_at_bound(parameter.detach(), parameter.grad, share)
            evaluations += 1
            if evaluations == 1 and not self._gradients_are_finite():
                raise _GradientError(loss)
            return loss

        with ExitStack() as stack:
            for follower in self._manifold():
                stack.enter_context(follower.point.exploring())
            try:
                result = super().step(checked_closure, *args, **kwargs)
            except _GradientError as error:  # nothing has moved yet
                self._skip(_SKIPPED, stacklevel=4)
                return error.loss
            except BaseException:
                self._give_up(before)
                raise
        if searches and not self._search_ended_well():
            self._give_up(before)
            self._skip(_SKIPPED, stacklevel=4)
            return result
        self._fold(stacklevel=5)
        return result

    def _snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Return copies of the ordinary parameters."""
        manifold = {id(follower.parameter) for follower in self._manifold()}
        ordinary = (p for group in self.param_groups for p in group["params"] if id(p) not in manifold)
        return [(p, p.detach().clone()) for p in ordinary]

    def _search_ended_well(self) -> bool:
        return self._gradients_are_finite() and all_finite(*[follower.parameter for follower in self._manifold()])

    @torch.no_grad()
    def _give_up(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """Move everything back to where the step began.

        A line search starts its memory anew, since the old one is of no use.
        """
        for follower in self._manifold():
            follower.point.return_to_origin()
        for parameter, value in before:
            parameter.copy_(value)
        forget_line_search(self)

    def _manifold(self) -> list[_Follower]:
        if self._followers is None:
            self._followers = [self._follower(*found) for found in _find_points(self)]
            if self._max_step == "auto":
                self._radius = SEARCH_RADIUS if self.param_groups[0].get("line_search_fn") else AUTO_RADIUS
            if not self._followers:
                raise RuntimeError(
                    "none of this optimizer's parameters belongs to a point any more; copy the model and "
                    "the optimizer together (copy.deepcopy((model, optimizer))), or build the optimizer anew"
                )
        return self._followers

    def _follower(self, parameter: Tensor, point: Point) -> _Follower:
        carries = self._transport != "none" and not point.group.trivial_transport
        by_bracket = carries and point.chart.carries_by_bracket(self._corrected)
        may_scale = self._transport == "auto" and (carries or isinstance(point.group, LowRankAffine))
        return _Follower(parameter, point, ConditionGuard(point), carries, by_bracket, may_scale)

    def _gradients_are_finite(self) -> bool:
        return all_finite(*[grad for parameter, *_ in self._manifold() if (grad := parameter.grad) is not None])

    def _skip(self, what: str, stacklevel: int) -> None:
        if self.skipped_steps == 0:
            warnings.warn(
                f"{what}; look at the loss, the data or the learning rate, or set max_step (further ones are only "
                "counted, in optimizer.skipped_steps)",
                RuntimeWarning,
                stacklevel=stacklevel,
            )
        self.skipped_steps += 1

    # ------------------------------------------------------------------ the fold
    def _fold(self, stacklevel: int) -> None:
        followers = self._manifold()
        if torch.is_autocast_enabled(followers[0].parameter.device.type):
            with full_precision(followers[0].parameter):
                self._fold(stacklevel + 1)
                return
        radius = self._radius
        short = 0.0 if radius is None else min(radius, DEFAULT_RADIUS)
        for parameter, point, guard, carries, by_bracket, may_scale in followers:
            if parameter.grad is None and point.is_folded():
                continue
            elementwise = may_scale and scales_elementwise(self, parameter)
            if elementwise:
                carries = by_bracket = False
            before, safe = None, False
            if radius is not None:
                length = greatest_length(parameter.detach())
                if length > short:
                    length = self._bound(parameter, point.group, by_bracket, radius)
                safe = guard.allows(length)
                before = None if safe else guard.copy()
            elif by_bracket:
                self._bound_for_bracket(parameter, point.group)
            if carries:
                self._carry(parameter, point.chart)
            elif elementwise and isinstance(point.group, (Affine, LowRankAffine)):
                self._rescale_mean(parameter, point.group, point.chart.order)
            moved = point.fold(check=not safe)
            if moved is not None:
                self._stop(parameter, moved, "have overflowed", stacklevel + 1)
            if before is not None:
                moved = guard.settle(before)
                if moved is not None:
                    self._stop(parameter, moved, f"be too near to a singular matrix for {point.dtype}", stacklevel + 1)

    def _stop(self, parameter: Tensor, moved: Tensor, why: str, stacklevel: int) -> None:
        for vector in shortened_vectors(self, parameter):
            vector.mul_(align(moved, vector))
        forget_line_search(self)
        self._skip(f"a point would {why}: it stays where it is and loses its momentum", stacklevel)

    def _bound(self, parameter: Tensor, group: Group, by_bracket: bool, radius: float) -> float:
        """Cut a step back to the radius, with its momentum, and return the greatest length that is left."""
        eta = group.unpack(parameter.detach())
        quick = group.quick_stretch(eta)
        if quick is not None and float(quick.max()) <= min(radius, DEFAULT_RADIUS):
            return float(quick.max())
        stretch = group.stretch(eta)
        length = float(stretch.max())
        if length > (min(radius, DEFAULT_RADIUS) if by_bracket else radius):
            forget_line_search(self)  # its pairs describe a path that was not taken, or too long for the bracket
        if length > radius:
            self._shorten(parameter, (radius / stretch).clamp(max=1))
        return min(radius, length)

    def _bound_trials(self) -> list[tuple[Tensor, Tensor]]:
        """Cut back what a line search is about to try; return which coordinates, and to which share."""
        cut: list[tuple[Tensor, Tensor]] = []
        radius = self._radius
        if radius is None:
            return cut
        for parameter, point, *_ in self._manifold():
            if greatest_length(parameter.detach()) > radius:
                share = bounded_share(point.group, parameter.detach(), radius)
                parameter.detach().mul_(align(share, parameter).to(parameter.dtype))
                cut.append((parameter, share))
        return cut

    @torch.no_grad()
    def _bound_for_bracket(self, parameter: Tensor, group: Group) -> None:
        share = (DEFAULT_RADIUS / group.reach(group.unpack(parameter))).clamp(max=1)  # a zero step: inf, clamped
        if isinstance(self, torch.optim.LBFGS):
            if bool((share < 1).any()):  # the line search has chosen this step; only its memory cannot follow so far
                forget_line_search(self)
            return
        self._shorten(parameter, share)

    def _shorten(self, parameter: Tensor, share: Tensor) -> None:
        share = align(share, parameter).to(parameter.dtype)
        parameter.detach().mul_(share)
        for vector in shortened_vectors(self, parameter):
            vector.mul_(share)

    @torch.no_grad()
    def _carry(self, parameter: Tensor, chart: Chart) -> None:
        vectors = list(carried_vectors(self, parameter))
        if not vectors:
            return
        group = chart.group
        # L-BFGS has hundreds: one batch, not a loop.
        stacked = (torch.stack(vectors) if len(vectors) > 1 else vectors[0].unsqueeze(0)).to(parameter.dtype)
        step = group.unpack(parameter.expand_as(stacked))
        carried = group.pack(chart.carry(step, group.unpack(stacked), self._corrected))
        for vector, new in zip(vectors, carried, strict=True):
            vector.copy_(new)

    @torch.no_grad()
    def _rescale_mean(self, parameter: Tensor, group: Affine | LowRankAffine, order: int | None) -> None:
        """Convert the moments of a Gaussian's mean, first and second, to the units of the new frame.

        The whitened mean's gradients shrink and grow with the standard deviations. Second moments that kept the old
        units would let steps vanish where a covariance becomes small.
        """
        factors = group.change_of_units(group.unpack(parameter), order)
        for vectors, scale in ((carried_vectors, factors), (squared_vectors, factors.square())):
            for vector in vectors(self, parameter):
                group.unpack(vector)[-1].mul_(scale)

    # ------------------------------------------------------------------ copies and pickles
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._followers = None

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: vars(self)[key] for key in _KEPT if key in vars(self)}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_transport" in state:  # a copy; load_state_dict comes here too, with the optimizer's own state alone
            self._install(self._transport, self._max_step)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._unframed,), self.__getstate__()
