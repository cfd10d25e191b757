"""Hooks that hand a layer's inputs and output gradients to an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Receiver = Callable[[nn.Module, Tensor, Tensor, int], None]
"""Called with the module, its input, the gradient of its output, and the number of the forward pass."""


class Capture:
    """Watches modules: while ``active``, each backward pass through one reaches ``receive``.

    The hooks hold this object weakly: they go with it, and a copy of the model has none.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module], receive: Receiver) -> None:
        self.active = True
        self.passes = 0
        self._receive = receive
        self._handles = [module.register_forward_hook(_Hook(self)) for module in modules]
        self._handles.append(model.register_forward_pre_hook(_PassCounter(self)))
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Ask for the gradient of the output, if there will be one."""
        if not (self.active and torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad):
            return
        x, number, me = inputs[0].detach(), self.passes, weakref.ref(self)

        def backward(gradient: Tensor) -> None:
            capture = me()
            if capture is not None:
                with torch.no_grad():
                    capture._receive(module, x, gradient.detach(), number)

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
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.forward(module, inputs, output)


class _PassCounter(_Hook):
    """Counts forward passes of the model, so that a layer used twice in one of them is told from two batches."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> None:
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.passes += 1
