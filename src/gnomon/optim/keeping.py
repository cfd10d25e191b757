"""The state of layers: where it is, how it is saved, and whether what is loaded fits."""

from __future__ import annotations

import copy
from abc import abstractmethod

import torch
from torch import Tensor

from .gathering import Gathering
from .moves import Tracked, cat, parted
from .ranks import local, sharded_as
from .settings import Settings
from .shortcut import VERDICT


class Keeping(Gathering):
    """Keeps the factors and momenta of layers as torch's optimizers keep theirs."""

    @abstractmethod
    def _factor_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        """The tensors that the factors of a matrix take in the state."""

    def _state_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        """Those, and what else an update needs."""
        return self._factor_shapes(tracked)

    def _stored_dtype(self, tracked: Tracked) -> torch.dtype:
        """In which factors are kept."""
        return self._computing_dtype(tracked)

    @abstractmethod
    def _find_due(self) -> None:
        """Note whose factors the coming step updates."""

    @abstractmethod
    def _drop_what_others_keep(self, tracked: Tracked) -> None:
        """Forget the state of a layer that other ranks have."""

    def _gathered(self, stack: list[Tracked], key: str) -> Tensor:
        """The state of several layers of one kind, block after block."""
        return cat([self.state[tracked.layer.weight][key] for tracked in stack])

    def _scatter(self, stack: list[Tracked], key: str, values: Tensor) -> None:
        for tracked, value in zip(stack, parted(values, len(stack)), strict=True):
            self.state[tracked.layer.weight][key] = value

    def _adapt(self, tracked: Tracked) -> None:
        """State follows its parameters to another device or type."""
        place = tracked.layer.weight.device, tracked.layer.weight.dtype
        if tracked.place != place:
            factors, dtype = self._factor_shapes(tracked), self._stored_dtype(tracked)
            for p in tracked.layer.parameters:
                follow(self.state[p], p, dict.fromkeys(factors, dtype))
            tracked.place = place

    def state_dict(self) -> Settings:
        """The state, as torch's optimizers give it."""
        self._shortcut.heed(self.param_groups[0])
        return super().state_dict()

    def load_state_dict(self, state_dict: Settings) -> None:
        """Take a state of the same model and structure; the dictionary stays as it is, and nothing is shared."""
        own = copy.deepcopy(state_dict)
        self._check_state(own)
        super().load_state_dict(own)
        numbers = [n for group in own["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            # As it was saved: torch would turn the factors into the parameter's type.
            if number in own["state"]:
                self.state[p] = {
                    k: sharded_as(v.to(p.device), p) if isinstance(v, Tensor) else v
                    for k, v in own["state"][number].items()
                }
        for tracked in self._tracked.values():
            tracked.forget()
            tracked.cache.clear()
            tracked.place = None
            self._drop_what_others_keep(tracked)
        self._find_due()

    def _check_state(self, state_dict: Settings) -> None:
        if not {"state", "param_groups"} <= set(state_dict):
            raise ValueError(
                f"state_dict must have 'state' and 'param_groups', as state_dict() gives; got {[*state_dict]}"
            )
        theirs = [[len(g["params"]), g.get("role")] for g in state_dict["param_groups"]]
        ours = [[len(g["params"]), g["role"]] for g in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f"the state is of another model or other groups: it has groups of {theirs} parameters, this has {ours}"
            )
        for group, own in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if missing := set(own) - set(group) - {"skipped_steps", "skipped_updates", "initial_lr", VERDICT}:
                raise ValueError(f"the state is of another optimizer: its groups have no {', '.join(sorted(missing))}")
        names = {id(p): name for name, p in self._model.named_parameters()}
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            found = state_dict["state"].get(number, {})
            expected = {k: tuple(p.shape) for k in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
            factors = self._state_shapes(self._tracked[p]) if p in self._tracked else {}
            for key, shape in {**expected, **factors}.items():
                # The state of a layer that has had no step yet is empty.
                if key in found and tuple(found[key].shape) != shape:
                    got = f"has shape {tuple(found[key].shape)}, this optimizer needs {shape}"
                elif key in factors and found and key not in found:
                    got = "is missing"
                else:
                    continue
                raise ValueError(f"the state is of another model, structure or preset: {key} of {names[id(p)]} {got}")

    def _momentum_bytes(self, tracked: Tracked) -> int:
        """Of the momenta of a layer's parameters."""
        return 0 if self._precondition_only else sum(p.numel() * p.element_size() for p in tracked.layer.parameters)

    def memory_usage(self) -> int:
        """Bytes of the state that this rank keeps, cached products included."""
        kept = [local(v) for state in self.state.values() for v in state.values() if isinstance(v, Tensor)]
        kept += [v for tracked in self._tracked.values() for square in tracked.cache.values() for v in square]
        return sum(v.numel() * v.element_size() for v in kept)


def follow(state: Settings, p: Tensor, dtypes: dict[str, torch.dtype] | None = None) -> None:
    """State of a parameter in its place, its momentum also in its type; other types as given."""
    wanted = {"momentum_buffer": p.dtype, **(dtypes or {})}
    for key, value in state.items():
        dtype = wanted.get(key, value.dtype)
        if (value.dtype, value.device) != (dtype, p.device):
            state[key] = value.to(p.device, dtype)
