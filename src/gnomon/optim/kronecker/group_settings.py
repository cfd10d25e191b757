"""Parameter groups: their settings, how these follow schedules, and when a group's factors are updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

from torch import Tensor, nn

from .config import IN_PLACE_OF, StepConfig
from .layers.base import Settings

AT_LEAST_ZERO = ("lr", "fallback_lr", "weight_decay", "damping", "precond_lr")
BELOW_ONE = ("momentum", "precond_momentum", "decay")
POSITIVE_OR_NONE = ("step_rms", "base_width", "kl_clip")
Schedules = dict[str, Callable[[int], float]]
"""Settings that are functions of the step."""
NUMBERS = (*AT_LEAST_ZERO, *BELOW_ONE, *POSITIVE_OR_NONE, "update_every")
"""Settings that may be functions of the step and differ between parameter groups."""
MAY_BE_NONE = (*POSITIVE_OR_NONE, "fallback_lr")


def check_settings(settings: Settings) -> None:
    """Raise for a number that no step could use."""
    for name, value in settings.items():
        if value is None and name in MAY_BE_NONE:
            continue
        if name in NUMBERS:
            scalar = isinstance(value, Tensor) and value.numel() == 1
            if isinstance(value, bool) or not (isinstance(value, Real) or scalar):
                raise TypeError(f"{name} must be a number or a function of the step that gives one, got {value!r}")
        if name in AT_LEAST_ZERO and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
        if name in BELOW_ONE and not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
        if name in POSITIVE_OR_NONE and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, or None to leave it out, got {value!r}")
        if name == "update_every" and (not isinstance(value, int) or value < 1):
            raise ValueError(f"update_every must be a positive integer, got {value!r}")
    if settings.get("step_rms") is not None and settings.get("kl_clip") is not None:
        raise ValueError(
            f"step_rms and kl_clip are two ways to choose a step's length: got {settings['step_rms']!r} and "
            f"{settings['kl_clip']!r}; give step_rms=None to use kl_clip"
        )


def at_step(settings: Settings, step: int) -> Settings:
    """Return the settings with the value of each function at a step."""
    return {name: value(step) if callable(value) else value for name, value in settings.items()}


def own_numbers(settings: Settings) -> Settings:
    """Return the settings with numbers for tensors of one element. A learning rate becomes a tensor of its own.

    A scheduler changes the rate of each group in its memory.
    """
    found = dict(settings)
    for name in (name for name in NUMBERS if isinstance(found.get(name), Tensor)):
        value = found[name].detach()
        found[name] = value.reshape(()).clone() if name == "lr" else value.item()
    return found


def _is_unusual(name: str, value: object) -> bool:
    """Return whether a changed setting has to become a number, or a tensor without dimensions."""
    return isinstance(value, Tensor) and (name != "lr" or value.ndim > 0)


def is_due(settings: Settings) -> bool:
    """Return whether the coming step updates the factors of a group."""
    return bool(settings["step"] >= settings["next_update"])


def due_weights(groups: list[Settings]) -> set[nn.Parameter]:
    """Return the weights whose factors the coming step updates."""
    return {p for group in groups if group["role"] == "layer" and is_due(group) for p in group["params"]}


def plan_updates(groups: list[Settings], config: StepConfig) -> None:
    """Choose the step at which the factors of groups that were due are updated again."""
    for group in groups:
        if is_due(group):
            grown = 1 + group["step"] // config.growth if config.growing_intervals else group["update_every"]
            group["interval"] = min(group["update_every"], grown)
            group["next_update"] = group["step"] + group["interval"]


def follow_schedules(group: Settings, schedules: Schedules) -> None:
    """Give the settings of a group their values at the coming step."""
    if schedules:
        new = {name: schedule(group["step"]) for name, schedule in schedules.items()}
        check_settings(new)
        group.update(new)
    group.update(own_numbers({name: group[name] for name in NUMBERS if _is_unusual(name, group.get(name))}))
    if group.get("peak_lr") is not None:  # which is None where decay does not follow the schedule
        group["peak_lr"] = max(group["peak_lr"], float(group["lr"]))


def checked_group(group: Settings) -> Settings:
    """Return a copy of a parameter group, with its parameters as a list."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"a group must be a dictionary with 'params' and settings, got {group!r}")
    allowed = {*NUMBERS, "params"}
    if unknown := set(group) - allowed:
        remedies = "".join(f"; {name}: {IN_PLACE_OF[name]}" for name in sorted(unknown) if name in IN_PLACE_OF)
        known = ", ".join(sorted(allowed))
        raise ValueError(f"a group has no setting {', '.join(sorted(unknown))}{remedies}; there are {known}")
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    params = [p[1] if is_named(p) else p for p in params]
    for p in params:
        if not isinstance(p, Tensor):
            raise TypeError(f"params must be parameters of the model, got {type(p).__name__}")
    return {**group, "params": params}


def is_named(pair: object) -> bool:
    """Return whether something is a name and a parameter, as ``named_parameters()`` gives them."""
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)


def split_group(
    members: list[nn.Parameter], others: list[nn.Parameter], wanted: Settings, fallback_lr: Any
) -> Iterator[tuple[Settings, Schedules]]:
    """Yield the parameters of layers and the others as two groups with their schedules, each with its learning rate."""
    settings, counters = own_numbers(at_step(wanted, 0)), {"step": 0, "next_update": 0, "interval": 1}
    schedules = {name: value for name, value in wanted.items() if callable(value)}
    if members:
        yield {"params": members, **settings, **counters, "role": "layer"}, schedules
    if others:
        rate = {"lr": wanted["lr"] if fallback_lr is None else fallback_lr}
        own = {**own_numbers(at_step(rate, 0)), "beta2": 0.99, "eps": 1e-8, "role": "fallback"}
        fixed = {name: value for name, value in schedules.items() if name != "lr"}
        yield {"params": others, **settings, **counters, **own}, {**fixed, **rate} if callable(rate["lr"]) else fixed
