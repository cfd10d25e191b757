"""Hooks that hand a layer's inputs and output gradients to an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Filter = Callable[[nn.Module, Tensor], bool]
"""A method that says whether a backward pass through a module with this input is of use."""
Receiver = Callable[[nn.Module, Tensor, Tensor, int], None]
"""A method, called with the module, its input, the gradient of its output, and the number of the forward pass."""


class Capture:
    """Watches modules: each backward pass through one reaches ``receive``, if ``wants`` asked for it.

    The hooks hold this object weakly: they go with it, and a copy of the model has none.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module], wants: Filter, receive: Receiver) -> None:
        self.passes = 0
        self._wants, self._receive = weakref.WeakMethod(wants), weakref.WeakMethod(receive)  # their owner owns this
        self._backward = False
        self._handles: list[Any] = [module.register_forward_hook(_Hook(self), with_kwargs=True) for module in modules]
        self._handles.append(model.register_forward_pre_hook(_PassCounter(self)))
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def begin(self) -> None:
        """A forward pass of the model begins."""
        self.passes += 1
        self._backward = False

    def forward(self, module: nn.Module, x: Tensor, output: Any) -> None:
        """Ask for the gradient of the output, if there will be one."""
        if (
            self._backward
        ):  # the model's parts are called without the model itself: after a backward pass this is a new one
            self.begin()
        if not (torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad):
            return
        wants = self._wants()
        if wants is None or not wants(module, x):
            return
        x, number, me = x.detach(), self.passes, weakref.ref(self)

        def backward(gradient: Tensor) -> None:
            capture = me()
            receive = None if capture is None else capture._receive()
            if capture is not None and receive is not None:
                capture._backward = True
                with torch.no_grad():
                    receive(module, x, gradient.detach(), number)

        # Registered on the output as it is now: an activation that works in place later does not disturb it.
        output.register_hook(backward)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class _Hook:
    """A hook without a strong hold on anything; copies and pickles of it do nothing."""

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = weakref.ref(capture) if capture is not None else None

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a side effect that a compiled graph cannot hold
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.forward(module, inputs[0] if inputs else keywords["input"], output)


class _PassCounter(_Hook):
    """Counts forward passes of the model, so that a layer used twice in one of them is told from two batches."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.begin()
