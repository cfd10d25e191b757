"""Hooks that show the input of each watched module together with the gradient of its output."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import base_of, run_outside_of_graphs

Filter = Callable[[nn.Module, Tensor], bool]
"""A method that says whether a backward pass through a module with this input is of use."""
Receiver = Callable[[nn.Module, Tensor, Tensor, int], None]
"""A method that takes a module, its input, the gradient of its output, and the number of the forward pass."""


def is_ordinary(x: object) -> bool:
    """Return whether an object is a tensor with values of its own.

    Such a tensor is none of ``torch.func``, which is valid only within it, and neither sparse nor nested.
    """
    if not isinstance(x, Tensor) or x.is_nested:
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return False
    return True


def computed_tensor(output: Tensor) -> Tensor:
    """Return the tensor that a module has computed, of which its output may be a reshaped view.

    Linear maps of sequences give such views. Where a module works in place on such an output, torch forgets the hooks
    of the output, but not those of that tensor.
    """
    base = base_of(output)
    if base is None or not base.requires_grad or base.numel() != output.numel():
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output


def input_of(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the first argument of a module, by its place or by its name; None where it was not given."""
    if inputs:
        return inputs[0]
    return keywords.get(next(iter(inspect.signature(module.forward).parameters), ""))


class Capture:
    """Watches modules: each backward pass through one reaches ``receive``, if ``wants`` asked for it.

    The hooks hold this object weakly: they go with it, and a copy of the model has none. The two methods are held
    weakly too, because their owner owns this object.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module], wants: Filter, receive: Receiver) -> None:
        self.passes = 0
        self._wants, self._receive = weakref.WeakMethod(wants), weakref.WeakMethod(receive)
        self._ended_backward = False
        self.was_called = False
        """Whether a module has been called."""
        self._handles: list[Any] = [module.register_forward_hook(_Hook(self), with_kwargs=True) for module in modules]
        self._handles.append(model.register_forward_pre_hook(_PassHook(self)))
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def begin(self) -> None:
        """Begin a forward pass of the model."""
        self.passes += 1
        self._ended_backward = False

    def forward(self, module: nn.Module, x: Any, output: Any) -> None:
        """Ask for the gradient of a module's output, if there will be one and it is of use."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined]  # what a hook computes would be a part of the trace
            return
        self.was_called = True
        if self._ended_backward:  # the model's parts are called without the model itself: this is a new pass
            self.begin()
        if not (torch.is_grad_enabled() and is_ordinary(x) and is_ordinary(output) and output.requires_grad):
            return
        wants = self._wants()
        if wants is None or not wants(module, x):
            return
        x, number, me, shape = x.detach(), self.passes, weakref.ref(self), output.shape

        def backward(gradient: Tensor) -> None:
            capture = me()
            receive = None if capture is None else capture._receive()
            if capture is not None and receive is not None and is_ordinary(gradient):
                capture._ended_backward = True
                with torch.no_grad():
                    receive(module, x, gradient.detach().reshape(shape), number)

        # Registered on the output as it is now: an activation that works in place later does not disturb it.
        computed_tensor(output).register_hook(backward)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


# What torch says where a graph must not end, with fullgraph=True.
run_outside_of_graphs._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "the hooks of a gnomon optimizer cannot be a part of a graph; for fullgraph=True build it with "
    "curvature='gradient', which has no hooks"
)


class _Hook:
    """A hook that holds a capture weakly; copies and pickles of it do nothing."""

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = weakref.ref(capture) if capture is not None else None

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()

    @property
    def __name__(self) -> str:
        """What ``torch.jit.script`` asks for first."""
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of a gnomon optimizer: script the model, or a copy of it, after "
            "optimizer.close(), or take torch.jit.trace or torch.compile"
        )

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            run_outside_of_graphs(self.run, *arguments)
        else:
            self.run(*arguments)

    def run(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.forward(module, input_of(module, inputs, keywords), output)


class _PassHook(_Hook):
    """Counts forward passes of the model, so that a layer used twice in one pass is told from two batches."""

    def run(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:  # type: ignore[override]
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.begin()
