"""How a state is loaded: whether it fits an optimizer, and its conversion into the forms that the optimizer has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .layers.base import Settings, as_whole
from .preconditioner import Preconditioner
from .registry import LayerRegistry
from .shortcut import THROUGH_ROWS
from .strategy import Alone

ROWS = "rows"
"""The setting that has the numbers of rows of layers by name."""
MAY_BE_MISSING = {"skipped_steps", "skipped_updates", "initial_lr", THROUGH_ROWS, ROWS, "names"}
"""The settings of a group that are set only where they are needed."""
AS_BEFORE: Settings = {"base_width": None, "peak_lr": None}
"""What settings mean that a state of an earlier version does not have."""
COUNTERS = ("step", "next_update", "interval", "skipped_steps", "skipped_updates")
"""The settings of a group that count."""
Shapes = Mapping[str, tuple[int, ...]]


def check_groups(state_dict: Settings, param_groups: list[Settings]) -> None:
    """Raise where a state is of another model or optimizer."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(f"state_dict must have 'state' and 'param_groups', as state_dict() gives; got {[*state_dict]}")
    theirs = [[len(g["params"]), g.get("role")] for g in state_dict["param_groups"]]
    ours = [[len(g["params"]), g["role"]] for g in param_groups]
    if theirs != ours:
        raise ValueError(
            f"the state is of another model or other groups: it has groups of {theirs} parameters, this has {ours}"
        )
    for group, own in zip(state_dict["param_groups"], param_groups, strict=True):
        if missing := set(own) - set(group) - MAY_BE_MISSING - AS_BEFORE.keys():
            raise ValueError(f"the state is of another optimizer: its groups have no {', '.join(sorted(missing))}")
        for name in (name for name in COUNTERS if name in group):
            if not is_count(group[name]):
                raise ValueError(f"the state is damaged: {name} must be an integer of at least 0, got {group[name]!r}")


def is_count(value: object) -> bool:
    """Return whether a value is a number of events, on the host or, without dimensions, on a device."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and bool(value >= 0)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def fitted_state(
    state_dict: Settings, param_groups: list[Settings], registry: LayerRegistry, preconditioner: Preconditioner
) -> Settings:
    """Return a copy of a state in the forms of the optimizer that is to load it; raise where it does not fit."""
    check_groups(state_dict, param_groups)
    own, names, rule = copy_of_state(state_dict), registry.names(), preconditioner.rule
    for number, p in numbered(own["param_groups"], param_groups):
        found, wanted = own["state"].get(number, {}), {}
        if isinstance(found.get("steps"), (int, float)):  # a program may have saved the count as a number
            found["steps"] = torch.tensor(float(found["steps"]))
        if p in registry.layers:
            layer = registry.layers[p]
            found, shapes = rule.loaded(layer, found), rule.shapes(layer)
            wanted = {key: shapes[key] for key in preconditioner.stored_keys(layer)}
        whole = as_whole(p) if p in registry.layers else p
        check_tensors(found, names[p], tuple(whole.shape), wanted)
        if number in own["state"]:
            own["state"][number] = found
    for group, mine in zip(own["param_groups"], param_groups, strict=True):
        group.update({name: value for name, value in AS_BEFORE.items() if name in mine and name not in group})
        group.update({"names": mine["names"]} if "names" in mine else {})
        rule.check([registry.layers[p] for p in mine["params"] if p in registry.layers], group)
    return own


def copy_of_state(state_dict: Settings) -> Settings:
    """Copy groups and the states of parameters; what somebody keeps under keys of their own stays as it is."""
    numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
    states = {key: copy.deepcopy(state) if key in numbers else state for key, state in state_dict["state"].items()}
    return {**state_dict, "state": states, "param_groups": copy.deepcopy(state_dict["param_groups"])}


@contextmanager
def loading(
    optimizer: Optimizer, fit: Callable[[Settings], Settings], take: Callable[[Settings], None]
) -> Iterator[None]:
    """Let torch's ``load_state_dict`` load what ``fit`` makes of a state, and call ``take`` after it.

    They are the last of the hooks before and the first of those after: hooks of others change what is loaded, and see
    it.
    """
    fitted: Settings = {}

    def before(_: Optimizer, given: Settings) -> Settings:
        fitted.update(fit(given))
        return fitted

    hooks = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(lambda _: take(fitted), prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def put_state(fitted: Settings, states: Any, param_groups: list[Settings], strategy: Alone) -> None:
    """Put a state into the memory that the optimizer's parts hold, as it was saved.

    torch has turned the factors of its own copy into the types of the parameters.
    """
    found = fitted["state"]
    states.clear()
    for number, p in numbered(fitted["param_groups"], param_groups):
        if number in found:
            states[p] = {
                key: strategy.sharded_as(value.to(p.device), p) if isinstance(value, Tensor) else value
                for key, value in found.pop(number).items()
            }
    states.update(found)  # what somebody keeps under keys of his own


def numbered(saved: list[Settings], param_groups: list[Settings]) -> Iterator[tuple[Any, nn.Parameter]]:
    """Return each parameter with the number under which its state is saved."""
    numbers = [number for group in saved for number in group["params"]]
    params = [p for group in param_groups for p in group["params"]]
    return zip(numbers, params, strict=True)


def check_tensors(found: Mapping[str, Any], name: str, shape: tuple[int, ...], factors: Shapes) -> None:
    """Raise where the state of a parameter has tensors of other shapes, or lacks some of its factors."""
    momenta: dict[str, tuple[int, ...]] = dict.fromkeys(("momentum_buffer", "exp_avg", "exp_avg_sq"), shape)
    for key, wanted in {**momenta, "steps": (), **factors}.items():
        value = found.get(key)
        # The state of a layer that has had no step yet is empty.
        if key not in found:
            if key not in factors or not found:
                continue
            got = "is missing"
        elif not isinstance(value, Tensor):
            got = f"is {value!r}, this optimizer needs a tensor of shape {wanted}"
        elif tuple(value.shape) != wanted:
            got = f"has shape {tuple(value.shape)}, this optimizer needs {wanted}"
        else:
            continue
        raise ValueError(f"the state is of another model, structure or preset: {key} of {name} {got}")
