"""``torch.compile`` for pure functions of tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..torch_internals import is_dispatch_watched


def can_compile() -> bool:
    """Return whether torch would compile now.

    Under a mode that sees each operation it does not, and then never again.
    """
    return not is_dispatch_watched()


@functools.cache
def compiled(function: Callable[..., Any], kind: Hashable) -> Callable[..., Any]:
    """Return a function compiled as one graph, with code of its own for each kind of arguments.

    Torch compiles one code only so often.
    """
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, fullgraph=True)
