"""Whether a state that is to be loaded fits an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .curvature import THROUGH_ROWS
from .layers.base import Settings
from .preconditioner import Preconditioner
from .registry import LayerRegistry

ROWS = "rows"
"""The setting that has the numbers of rows of layers by name."""
MAY_BE_MISSING = {"skipped_steps", "skipped_updates", "initial_lr", THROUGH_ROWS, ROWS}
"""The settings of a group that are set only where they are needed."""
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
        if missing := set(own) - set(group) - MAY_BE_MISSING:
            raise ValueError(f"the state is of another optimizer: its groups have no {', '.join(sorted(missing))}")
        for name in (name for name in COUNTERS if name in group):
            if not is_count(group[name]):
                raise ValueError(f"the state is damaged: {name} must be an integer of at least 0, got {group[name]!r}")


def is_count(value: object) -> bool:
    """Whether a value is a number of events, on the host or, without dimensions, on a device."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and bool(value >= 0)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def fitted_state(
    state_dict: Settings, param_groups: list[Settings], registry: LayerRegistry, preconditioner: Preconditioner
) -> Settings:
    """A copy of a state in the forms of the optimizer that is to load it; raises where it does not fit."""
    own, names, rule = copy.deepcopy(state_dict), registry.names(), preconditioner.rule
    check_groups(own, param_groups)
    for number, p in numbered(own["param_groups"], param_groups):
        found, wanted = own["state"].get(number, {}), {}
        if p in registry.layers:
            layer = registry.layers[p]
            found, shapes = rule.loaded(layer, found), rule.shapes(layer)
            wanted = {key: shapes[key] for key in preconditioner.stored_keys(layer)}
        check_tensors(found, names[p], tuple(p.shape), wanted)
        if number in own["state"]:
            own["state"][number] = found
    for group, mine in zip(own["param_groups"], param_groups, strict=True):
        rule.check([registry.layers[p] for p in mine["params"] if p in registry.layers], group)
    return own


def numbered(saved: list[Settings], param_groups: list[Settings]) -> Iterator[tuple[Any, nn.Parameter]]:
    """Each parameter with the number under which its state is saved."""
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
