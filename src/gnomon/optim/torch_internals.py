"""Every private name of torch that the optimizers use. A test fails by name if a version of torch changes one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

current_backward_pass = torch._C._current_graph_task_id
"""The number of the backward pass that is running; -1 outside of one."""

at_end_of_backward_pass = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the running backward pass ends."""

OPTIMIZER_ATTRIBUTES = ("_optimizer_", "_zero_grad", "_patch", "_hook", "_warned")
"""How the names of attributes begin that torch's optimizers set on themselves, and set again after a copy."""

active_wrapper: Callable[[], nn.parallel.DistributedDataParallel | None] = functools.partial(
    getattr, nn.parallel.DistributedDataParallel, "_active_ddp_module"
)
"""The ``DistributedDataParallel`` whose forward pass is running."""

version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How many times a tensor was changed in place."""

base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""The tensor in whose memory a view is; None for others."""

outside_of_graphs = _disable_dynamo
"""Lets ``torch.compile`` call a function as it is, with all that it calls. A first call imports the compiler."""


def hides_forward_pass(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a wrapper does not announce its forward passes, as under ``torch.compile``."""
    return wrapper._use_python_reducer


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long the ranks of a group wait for each other."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return the factor of a ``GradScaler``; None before the first loss, and where the scaler is off."""
    return getattr(scaler, "_scale", None)


def convolution_padding(module: Any) -> list[int]:
    """Return the amounts of padding as ``torch.nn.functional.pad`` takes them, with ``padding="same"`` resolved."""
    return module._reversed_padding_repeated_twice


def is_dispatch_watched() -> bool:
    """Return whether a mode sees each operation, as ``FlopCounterMode`` does; torch then compiles nothing."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode() is not None


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the private attributes of an optimizer that are not torch's own."""
    mine = {k: v for k, v in vars(optimizer).items() if k.startswith("_")}
    return {k: v for k, v in mine.items() if not k.startswith(OPTIMIZER_ATTRIBUTES)}


def run_outside_of_graphs(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function with side effects that a graph of ``torch.compile`` cannot hold.

    ``torch.compiler.disable`` as a decorator would import the compiler with this module, which takes as long as to
    import torch.
    """
    torch.compiler.disable(function)(*arguments)


run_outside_of_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]  # a graph ends before a call of it
