"""Which tensors of an optimizer's state are tangent vectors, and so move with the frame."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

vector_state: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg",),
    torch.optim.AdamW: ("exp_avg",),
    torch.optim.Adamax: ("exp_avg",),
    torch.optim.NAdam: ("exp_avg",),
    torch.optim.RAdam: ("exp_avg",),
    torch.optim.RMSprop: ("momentum_buffer", "grad_avg"),
    torch.optim.Rprop: ("prev",),
    torch.optim.Adagrad: (),
    torch.optim.Adadelta: (),
    torch.optim.LBFGS: ("d", "prev_flat_grad", "old_dirs", "old_stps"),
}
"""State keys that hold tangent vectors, per optimizer class; subclasses inherit.

Squared averages such as ``exp_avg_sq`` are not vectors and stay as they are. Add your own optimizer with
``gnomon.optim.vector_state[MyOptimizer] = ("velocity",)``.
"""

COMMON_KEYS = ("momentum_buffer", "exp_avg")
"""What an optimizer that is not listed is assumed to use, if it uses it."""


ELEMENTWISE_KEYS = frozenset({"exp_avg_sq", "exp_inf", "square_avg", "sum", "step_size"})
"""State of optimizers that scale each coordinate by its own history, as Adam does."""


SQUARED_KEYS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""State that holds squares of gradients."""


def scales_elementwise(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether the optimizer keeps a scale for each coordinate, which cannot turn with the frame."""
    return not ELEMENTWISE_KEYS.isdisjoint(optimizer.state.get(parameter, ()))


def vector_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the keys of the nearest listed ancestor class."""
    for cls in type(optimizer).__mro__:
        if cls in vector_state:
            return vector_state[cls]
    return COMMON_KEYS


def carried_vectors(optimizer: Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    """Return the tangent vectors that belong to ``parameter``, in its shape, as tensors to be changed in place."""
    return _vectors(optimizer, parameter, vector_keys(optimizer))


def shortened_vectors(optimizer: Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    """Return the vectors that shrink with a step that is cut back.

    L-BFGS forgets instead (:func:`forget_line_search`).
    """
    keys = () if isinstance(optimizer, torch.optim.LBFGS) else vector_keys(optimizer)
    return _vectors(optimizer, parameter, keys)


def squared_vectors(optimizer: Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    """Return averages or sums of the squares of gradients, in the shape of the parameter."""
    return _vectors(optimizer, parameter, SQUARED_KEYS)


def forget_line_search(optimizer: Optimizer) -> None:
    """Let L-BFGS begin again with steepest descent: its pairs describe a path that was not taken."""
    if isinstance(optimizer, torch.optim.LBFGS):
        for state in optimizer.state.values():
            state["n_iter"] = 0


def _vectors(optimizer: Optimizer, parameter: Tensor, keys: tuple[str, ...]) -> Iterator[Tensor]:
    if isinstance(optimizer, torch.optim.LBFGS):
        yield from _flat_vectors(optimizer, parameter, keys)
        return
    state = optimizer.state.get(parameter, {})
    for key in keys:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            yield value


def _flat_vectors(optimizer: torch.optim.LBFGS, parameter: Tensor, keys: tuple[str, ...]) -> Iterator[Tensor]:
    """Yield the parts of L-BFGS's vectors that belong to a parameter.

    L-BFGS keeps its vectors under its first parameter, over all parameters end to end.
    """
    parameters = optimizer.param_groups[0]["params"]
    state = optimizer.state.get(parameters[0], {})
    before = next(i for i, p in enumerate(parameters) if p is parameter)
    start = sum(p.numel() for p in parameters[:before])
    for key in keys:
        value = state.get(key)
        for vector in value if isinstance(value, list) else [value]:
            if isinstance(vector, Tensor):
                yield vector[start : start + parameter.numel()].view_as(parameter)
