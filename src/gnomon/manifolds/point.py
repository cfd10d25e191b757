"""What all points share: a frame as a buffer, coordinates as a parameter, and the fold between them."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.utils.weak import WeakIdKeyDictionary

from ..frames import Chart
from ..groups import Element, Group, Marginal
from ..linalg import align, full_precision

_owners: Any = WeakIdKeyDictionary()
"""Coordinates -> weak reference to their point: how an optimizer finds the points behind its parameters."""


def all_finite(*tensors: Tensor) -> bool:
    """Return whether every entry is finite, with one synchronisation.

    A finite sum proves it, and after any other each tensor is looked into.
    """
    total = None
    for t in tensors:
        part = t.sum()
        total = part if total is None else total + part.to(total.device)
    return total is None or math.isfinite(total.item()) or all(bool(t.isfinite().all()) for t in tensors)


def known_points() -> Iterator[Point]:
    """Yield all points that are alive."""
    for reference in list(_owners.values()):
        point = reference()
        if point is not None:
            yield point


def point_of(parameter: Tensor) -> Point | None:
    """Return the point whose coordinates ``parameter`` is, or None for an ordinary parameter."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


class AtOrigin(torch.autograd.Function):
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
        with full_precision(frame):
            # Detached: a graph that outlives the frame then fails with torch's own message about in-place changes.
            return tuple(block.detach() for block in value(frame))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        eta, frame = ctx.saved_tensors
        with full_precision(frame):
            if torch.is_grad_enabled():
                (grad,) = torch.autograd.grad(ctx.general(frame, eta), eta, grads, create_graph=True)
            else:
                grad = ctx.pullback(frame, grads)
        return grad, None, None, None, None


class _Origin:
    """Knows, without reading the values, whether a tensor is the one last seen to be zero, and unchanged."""

    __slots__ = ("identity", "memory", "strayed", "version")

    def __init__(self) -> None:
        self.identity = self.memory = self.version = self.strayed = -1

    def mark(self, eta: Tensor) -> None:
        self.strayed = -1  # the version at which the tensor was first seen to be elsewhere
        if not eta.is_inference():  # such tensors have no version
            self.identity, self.memory, self.version = id(eta), eta.data_ptr(), eta._version

    def is_marked(self, eta: Tensor) -> bool:
        return self.identity == id(eta) and self.version == eta._version and self.memory == eta.data_ptr()


class Point(nn.Module):
    """A point on a submanifold: ``A(eta)`` with the frame ``A`` as a buffer and ``eta`` as a parameter.

    ``eta`` is zero except while an optimizer moves it; :meth:`fold` moves the frame along and returns it
    to zero. Both have the shape ``(*batch_shape, *group.storage_shape)``. At ``eta = 0`` a forward pass
    reads the frame and its backward is one pull-back; elsewhere (line searches,
    ``torch.func.functional_call``, a compiled graph) the retraction is evaluated and differentiated for real.

    A write through ``eta.data`` escapes PyTorch's version counter and so is seen only by the next fold.
    """

    frame: Tensor
    eta: Tensor
    group: Group
    chart: Chart
    _logdet_gradient: Tensor | None  # made when first needed

    def __init__(self, chart: Chart, element: Element) -> None:
        super().__init__()
        self.chart = chart
        self.group = chart.group
        frame = chart.group.pack(element).contiguous()
        self.register_buffer("frame", frame.clone())
        self.eta = nn.Parameter(torch.zeros_like(frame))
        self._exploring = False
        self._bind()

    # ------------------------------------------------------------------ the factor and its derivatives
    def element(self) -> Element:
        """Return the blocks of the factor at the current coordinates; at the origin they share the frame's memory."""
        if not self._at_origin():
            return self._moved(self.frame, self.eta)
        if not torch.is_grad_enabled():  # which is quicker than to find that nothing needs a gradient
            return self.group.unpack(self.frame.detach())
        return AtOrigin.apply(self.eta, self.frame, self.group.unpack, self._pull_back, self._moved)

    def _moved(self, frame: Tensor, eta: Tensor) -> Element:
        with full_precision(frame):
            return self.chart.retract(self.group.unpack(frame), self.group.unpack(eta))

    def _pull_back(self, frame: Tensor, grads: Element) -> Tensor:
        return self.chart.packed_pullback(frame, grads)

    def _logdet(self) -> Tensor:
        """Return ``log det tau``. Its gradient at the origin is a constant, so nothing is inverted."""
        chart, unpack = self.chart, self.group.unpack
        if isinstance(self.group, Marginal) or not torch.is_grad_enabled() or not self._at_origin():
            with full_precision(self.frame):
                return chart.logdet(self.element())
        (value,) = AtOrigin.apply(
            self.eta,
            self.frame,
            lambda frame: (chart.logdet(unpack(frame)),),
            self._pull_back_logdet,
            lambda frame, eta: (chart.logdet(self._moved(frame, eta)),),
        )
        return value

    def _pull_back_logdet(self, frame: Tensor, grads: Element) -> Tensor:
        if self._logdet_gradient is None:
            anywhere = self.group.identity(dtype=frame.dtype, device=frame.device)
            self._logdet_gradient = self.group.pack(self.chart.logdet_gradient(anywhere))
        return grads[0].view(grads[0].shape + (1,) * self._logdet_gradient.ndim) * self._logdet_gradient

    # ------------------------------------------------------------------ the moving frame
    def fold(self, *, check: bool = True) -> Tensor | None:
        """Set ``A <- A(eta)`` and ``eta <- 0``. :func:`gnomon.moving_frame` calls this after each step.

        A batch element whose move would overflow stays where it is. If there are any, return which elements moved, and
        otherwise None. Without ``check`` the caller knows that there are none.
        """
        # The inner loop of every small problem: attribute look-ups of a module cost as much as a product here.
        frame: Tensor = self._buffers["frame"]  # type: ignore[assignment]
        coordinates: Tensor = self._parameters["eta"]  # type: ignore[assignment]
        eta = coordinates.detach()  # shares the version counter, records no graph
        moved = self.chart.advance(frame, eta)
        movable = None
        if check and not all_finite(moved):
            movable = moved.isfinite().flatten(len(self.batch_shape)).all(-1)
            moved = moved.where(align(movable, moved), frame)
        frame.copy_(moved)
        eta.zero_()
        self._origin.mark(coordinates)
        return movable

    @torch.no_grad()
    def _become(self, element: Element) -> None:
        """Move to an element, whatever the coordinates are."""
        self.frame.copy_(self.group.pack(element))
        self.return_to_origin()

    def return_to_origin(self) -> None:
        """Set ``eta <- 0`` without moving the frame: the step is given up."""
        self.eta.detach().zero_()
        self._origin.mark(self.eta)

    @contextmanager
    def exploring(self) -> Iterator[None]:
        """Take no shortcut at the origin within this context.

        An optimizer that evaluates closures there may move eta in ways that leave no trace.
        """
        self._exploring = True
        try:
            yield
        finally:
            self._exploring = False

    def is_folded(self) -> bool:
        """Return whether nothing has moved the coordinates since the last fold, as far as one can tell unread."""
        return self._origin.is_marked(self.eta)

    def _at_origin(self) -> bool:
        """Return whether the short cuts at ``eta = 0`` may be taken."""
        frame: Tensor = self._buffers["frame"]  # type: ignore[assignment]  # quicker than an attribute of a module
        if torch.compiler.is_compiling() or _are_functorch_transforms_active() or frame.requires_grad:
            return False
        if self._exploring:
            return not bool(self.eta.any())
        folded = self.is_folded()
        if not folded and not self._warned:
            self._notice_steps()
        return folded

    def _notice_steps(self) -> None:
        """Warn where an optimizer has moved the coordinates twice and nothing has folded them."""
        eta, origin = self.eta, self._origin
        if not torch.is_grad_enabled() or point_of(eta) is not self or eta._version == origin.strayed:
            return
        if origin.strayed < 0 or not bool(eta.any()):
            origin.strayed = eta._version
            return
        self._warned = True
        warnings.warn(
            f"the coordinates of {self!r} were moved twice and not folded into its frame, so that they are "
            "no longer normal coordinates; wrap the optimizer: gnomon.moving_frame(optimizer)",
            RuntimeWarning,
            stacklevel=4,
        )

    def _bind(self) -> None:
        """Register the coordinates, wherever they have become a new tensor, and see whether they are zero."""
        if point_of(self.eta) is None:  # a shallow copy shares the coordinates, and must not take them over
            _owners[self.eta] = weakref.ref(self)
        self._origin = _Origin()
        self._warned = False
        self._logdet_gradient = None
        if not self.eta.is_meta and not bool(self.eta.any()):
            self._origin.mark(self.eta)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Point:
        super()._apply(fn, recurse)
        self._bind()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["gnomon"] = self._identity()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        saved = local_metadata.get("gnomon", self._identity())
        if saved != self._identity():
            lists[-1].append(
                f"{prefix}frame was saved for {saved}, but this point is {self._identity()}; build it as it was saved"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        self._bind()

    def _identity(self) -> str:
        """Return a description of what the numbers of a frame mean."""
        return f"{self.group!r} in {self.chart.form} form"

    # ------------------------------------------------------------------ description
    @property
    def batch_shape(self) -> torch.Size:
        return self.frame.shape[: self.frame.ndim - len(self.group.storage_shape)]

    @property
    def dtype(self) -> torch.dtype:
        return self.frame.dtype

    @property
    def device(self) -> torch.device:
        return self.frame.device

    def _kind(self) -> str:
        """Return the structure and the form, as a person has given them."""
        return f"{self.group!r}, {self.chart.form}"

    def extra_repr(self) -> str:
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"{self._kind()}, order={self.chart.order}, {self.dtype}{batch}"
