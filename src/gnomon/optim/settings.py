"""Settings of optimizers with a preconditioner for each layer: presets, and what may be asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from numbers import Real
from typing import Any

from torch import Tensor, nn

Scalar = float | Callable[[int], float]
"""A number, or a function of the step's number."""
Settings = dict[str, Any]

PRESETS: dict[str, Settings] = {
    "robust": {
        "lr": 1e-2,
        "momentum": 0.8,
        "weight_decay": 0.2,
        "damping": 0.2,
        "update_every": 10,
        "step_rms": 0.5,
        "kl_clip": None,
        "relative": True,
        "growing_intervals": True,
        "subsample": True,
        "approx": "auto",
        "fallback": "adamw",
    },
    "paper": {
        "lr": 1e-2,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "damping": 5e-3,
        "update_every": 10,
        "step_rms": None,
        "kl_clip": None,
        "relative": False,
        "growing_intervals": False,
        "subsample": False,
        "approx": "expand",
        "fallback": "sgd",
    },
}
"""What arguments that are not given mean, as far as all optimizers have them."""

GROWTH = 20
"""With growing intervals factors are updated at each of so many steps at first, then at every second of as many, ..."""

AT_LEAST_ZERO = ("lr", "fallback_lr", "weight_decay", "damping", "precond_lr")
BELOW_ONE = ("momentum", "precond_momentum", "decay")
POSITIVE_OR_NONE = ("step_rms", "kl_clip")
NUMBERS = (*AT_LEAST_ZERO, *BELOW_ONE, *POSITIVE_OR_NONE, "update_every")
SCHEDULABLE = tuple(name for name in NUMBERS if name != "fallback_lr")
"""Settings that may be functions of the step and differ between parameter groups."""


def check_settings(settings: Settings) -> None:
    """Raise for a number that no step could use."""
    for name, value in settings.items():
        if name in NUMBERS and not (value is None and name in POSITIVE_OR_NONE):
            scalar = isinstance(value, Tensor) and value.numel() == 1
            if isinstance(value, bool) or not (isinstance(value, Real) or scalar):
                raise TypeError(f"{name} must be a number or a function of the step that gives one, got {value!r}")
        if name in AT_LEAST_ZERO and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
        if name in BELOW_ONE and not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
        if name in POSITIVE_OR_NONE and value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, or None to leave it out, got {value!r}")
        if name == "update_every" and (not isinstance(value, int) or value < 1):
            raise ValueError(f"update_every must be a positive integer, got {value!r}")
    if settings.get("step_rms") is not None and settings.get("kl_clip") is not None:
        raise ValueError(
            f"step_rms and kl_clip are two ways to choose a step's length: got {settings['step_rms']!r} and "
            f"{settings['kl_clip']!r}; give step_rms=None to use kl_clip"
        )


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def is_due(group: Settings) -> bool:
    """Whether the coming step updates the factors."""
    return bool(group["step"] >= group["next_update"])


def check_parameter(name: str, p: Tensor) -> None:
    if nn.parameter.is_lazy(p):
        raise ValueError(f"{name} has no shape yet; run a batch through the model before building the optimizer")
    if p.requires_grad and not p.is_floating_point():
        raise TypeError(f"{name} is of type {p.dtype}; keep its real and imaginary parts as two real parameters")


def checked_group(group: Settings) -> Settings:
    """A copy of a parameter group, its parameters as a list."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"a group must be a dictionary with 'params' and settings, got {group!r}")
    allowed = {*SCHEDULABLE, "params", "fallback_lr"}
    if unknown := set(group) - allowed:
        raise ValueError(f"a group has no setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(allowed))}")
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if not all(isinstance(p, Tensor) for p in params):
        raise TypeError(f"params must be parameters of the model, got {params!r}")
    return {**group, "params": params}
