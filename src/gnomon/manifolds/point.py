"""What all points share: a frame as a buffer, coordinates as a parameter, and the fold between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..frames import Chart
from ..groups import Element, Group

_owners: Any = WeakIdKeyDictionary()
"""Coordinates -> weak reference to their point: how an optimizer finds the points behind its parameters."""


def point_of(parameter: Tensor) -> Point | None:
    """The point whose coordinates ``parameter`` is, or None for an ordinary parameter."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


class _AtOrigin(torch.autograd.Function):
    """``general(frame, eta)`` at ``eta = 0``, where its value and first derivative are cheap.

    The value is ``value(frame)`` and the gradient ``pullback(frame, grads)``. When the backward pass is itself
    differentiated (``create_graph=True``) it goes through ``general``, so that higher derivatives are right.
    """

    @staticmethod
    def forward(
        ctx: Any,
        eta: Tensor,
        frame: Tensor,
        value: Callable[[Tensor], Element],
        pullback: Callable[[Tensor, Element], Tensor],
        general: Callable[[Tensor, Tensor], Element],
    ) -> Element:
        ctx.save_for_backward(eta, frame)
        ctx.pullback, ctx.general = pullback, general
        return value(frame)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        eta, frame = ctx.saved_tensors
        if torch.is_grad_enabled():
            (grad,) = torch.autograd.grad(ctx.general(frame, eta), eta, grads, create_graph=True)
        else:
            grad = ctx.pullback(frame, grads)
        return grad, None, None, None, None


class Point(nn.Module):
    """A point on a submanifold: ``A(eta)`` with the frame ``A`` as a buffer and ``eta`` as a parameter.

    ``eta`` is zero except while an optimizer moves it; :meth:`fold` moves the frame along and returns it
    to zero. Both are stored as one vector per batch element. At ``eta = 0`` a forward pass reads the frame and
    its backward is one pull-back; elsewhere (line searches, ``torch.func.functional_call``, a compiled
    graph) the retraction is evaluated and differentiated for real.

    A write through ``eta.data`` escapes PyTorch's version counter and so is seen only by the next fold.
    """

    frame: Tensor
    eta: Tensor

    def __init__(self, chart: Chart, element: Element) -> None:
        super().__init__()
        self.chart = chart
        frame = chart.group.flatten(element).contiguous()
        self.register_buffer("frame", frame.clone())
        self.eta = nn.Parameter(torch.zeros_like(frame))
        self._exploring = False
        self._bind()

    # ------------------------------------------------------------------ the factor and its derivatives
    def element(self) -> Element:
        """The blocks of the factor at the current coordinates."""
        group, chart = self.chart.group, self.chart
        if not self._at_origin():
            return self._moved(self.frame, self.eta)
        blocks: Element = _AtOrigin.apply(
            self.eta,
            self.frame,
            group.unflatten,
            lambda frame, grads: group.flatten(chart.pullback(group.unflatten(frame), grads)),
            self._moved,
        )
        return blocks

    def _moved(self, frame: Tensor, eta: Tensor) -> Element:
        group = self.chart.group
        return self.chart.retract(group.unflatten(frame), group.unflatten(eta))

    def _logdet(self) -> Tensor:
        """``log det tau``. Its gradient at the origin is a constant: nothing is inverted."""
        group, chart = self.chart.group, self.chart
        if not self._at_origin():
            return chart.logdet(self.element())
        (value,) = _AtOrigin.apply(
            self.eta,
            self.frame,
            lambda frame: (chart.logdet(group.unflatten(frame)),),
            lambda frame, grads: grads[0].unsqueeze(-1)
            * group.flatten(chart.logdet_gradient(group.unflatten(frame))),
            lambda frame, eta: (chart.logdet(self._moved(frame, eta)),),
        )
        return value

    # ------------------------------------------------------------------ the moving frame
    @torch.no_grad()
    def fold(self) -> None:
        """``A <- A(eta)``, ``eta <- 0``. :func:`gnomon.moving_frame` calls it after each step."""
        self.frame.copy_(self.chart.group.flatten(self._moved(self.frame, self.eta)))
        self.return_to_origin()

    @torch.no_grad()
    def return_to_origin(self) -> None:
        """``eta <- 0`` without moving the frame: the step is given up."""
        self.eta.zero_()
        self._mark_origin()

    @contextmanager
    def exploring(self) -> Iterator[None]:
        """While an optimizer evaluates closures, in which it may move eta in ways that leave no trace."""
        self._exploring = True
        try:
            yield
        finally:
            self._exploring = False

    def _at_origin(self) -> bool:
        if torch.compiler.is_compiling():
            return False
        if self._exploring:
            return not bool(self.eta.any())
        return self._origin == (id(self.eta), self.eta._version)

    def _mark_origin(self) -> None:
        self._origin = (id(self.eta), self.eta._version)

    def _bind(self) -> None:
        """Register the coordinates, wherever they have become a new tensor, and see whether they are zero."""
        _owners[self.eta] = weakref.ref(self)
        self._origin = (0, 0)
        if not self.eta.is_meta and not bool(self.eta.any()):
            self._mark_origin()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Point:
        super()._apply(fn, recurse)
        self._bind()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._bind()

    # ------------------------------------------------------------------ description
    @property
    def group(self) -> Group:
        """The structure of the factor."""
        return self.chart.group

    @property
    def batch_shape(self) -> torch.Size:
        return self.frame.shape[:-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.frame.dtype

    @property
    def device(self) -> torch.device:
        return self.frame.device

    def extra_repr(self) -> str:
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"{self.group!r}, {self.chart.form}, order={self.chart.order}, {self.dtype}{batch}"
