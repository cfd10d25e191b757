"""``torch.compile`` for functions of tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


def can_compile() -> bool:
    """Whether torch would: not under a mode that looks at each operation, and after that never again."""
    return _get_current_dispatch_mode() is None


@functools.cache
def compiled(function: Callable[..., Any], kind: Hashable) -> Callable[..., Any]:
    """A function as one graph, with code of its own for each kind of arguments: one is compiled only so often."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, fullgraph=True)
