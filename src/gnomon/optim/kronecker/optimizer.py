"""An optimizer with a Kronecker-factored preconditioner for each layer: a step in named phases.

A step takes what the hooks have collected, reduces it over ranks, updates the factors that are due, publishes them,
preconditions the gradients, and moves the weights. Each phase is asked of the object that owns it: the collector, the
strategy, the preconditioner with its rule, and the steps of layers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...linalg import full_precision, peaks
from ...manifolds import point_of
from ..torch_internals import outside_of_graphs, own_attributes
from .config import CurvatureConfig, StepConfig
from .curvature import Collector
from .factor_rule import DirectionRule, FactorRule
from .group_settings import (
    Schedules,
    at_step,
    check_settings,
    checked_group,
    due_weights,
    follow_schedules,
    is_due,
    own_numbers,
    plan_updates,
    split_group,
)
from .layer_steps import LayerSteps, Peaks
from .layers.base import FactoredLayer, Move, Settings, States, parameter_names
from .notices import (
    warn_of_model,
    warn_of_modules_not_called,
    warn_of_other_ranks,
    warn_of_replaced_parts,
    warn_of_skipped_steps,
)
from .preconditioner import Preconditioner, Skips
from .registry import LayerRegistry
from .sampling import Likelihood
from .saved_state import ROWS, fitted_state, loading, put_state
from .strategy import Alone, SharingRule, alone
from .structures import Structure
from .summary import Summary, expected_bytes, layer_row, stored_bytes, summary_rows
from .update_rules import fall_back, gradient_of, start_moves

MANY = 100
"""The number of steps in a row that may be skipped before a second warning."""


def check_gradients(names: dict[nn.Parameter, str], groups: list[Settings]) -> None:
    """Raise for a gradient that no step could use."""
    known = {id(p) for group in groups for p in group["params"]}
    for p, name in names.items():
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError(f"the gradient of {name} is sparse; build its embedding with sparse=False")
        if p.grad is not None and p.is_meta:
            raise RuntimeError(
                f"{name} is on the meta device, without values: give the model a device with to_empty(device=...), "
                "initialize it, and build the optimizer then"
            )
        if p.grad is not None and p.requires_grad and id(p) not in known and point_of(p) is None:
            raise RuntimeError(
                f"{name} has a gradient but is in no group, because it was frozen, or not a part of the model yet, "
                "when this optimizer was built; add it with add_param_group({'params': [...]})"
            )


def begins_with_zeros(parameters: list[nn.Parameter], groups: list[Settings], strategy: Alone) -> bool:
    """Return whether this is the first step and all gradients are zeros.

    So it is where a program asks for the state alone.
    """
    if any(group["step"] for group in groups):
        return False
    return not strategy.maximum(peaks(strategy.local([gradient_of(p) for p in parameters]))).any()


def make_state(
    parameters: list[nn.Parameter],
    layers: dict[nn.Parameter, FactoredLayer],
    preconditioner: Preconditioner,
    config: StepConfig,
    states: States,
) -> None:
    """Make the state of parameters, as a step does, and change nothing else."""
    own = [layers[p] for p in parameters if p in layers]
    preconditioner.start(own)
    if not config.precondition_only:
        start_moves(config.fallback, own, parameters, states, preconditioner.strategy)


def look_around(collector: Collector) -> None:
    """Warn, before the first step, of ranks and modules that the hooks do not see."""
    if not collector.is_watching:
        return
    if collector.strategy.count == 1 and not collector.strategy.is_sharded:
        warn_of_other_ranks(stacklevel=7)
    if not collector.was_called and any(layer.weight.grad is not None for layer in collector.watched()):
        warn_of_modules_not_called(stacklevel=7)


class KroneckerOptimizer(Optimizer):
    """Trains all parameters of a model: layers with a preconditioner by a :class:`FactorRule`, others by a fallback.

    Args:
        model: the model.
        settings: defaults of the settings that parameter groups may have; numbers may be functions of the step.
        rule: how factors are stored, updated and applied.
        structure: the structure of the factors, see :class:`~gnomon.optim.INGD`.
        max_dim: a factor of a larger size is diagonal.
        curvature: where statistics come from.
        steps: how parameters move, and when factors are updated.
        groups: dictionaries with ``params`` and settings for them.
        sharing: finds the ranks that train the model together, and how they share the work.
        low_memory: whether memory is freed after each step.
        direction: how the direction of a step with ``step_rms`` comes from the average of preconditioned gradients;
            None for the average itself.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        *,
        rule: FactorRule,
        structure: Structure = "dense",
        max_dim: int | None = 8192,
        curvature: CurvatureConfig | None = None,
        steps: StepConfig | None = None,
        groups: Iterable[Settings] = (),
        sharing: SharingRule = alone,
        low_memory: bool = False,
        direction: DirectionRule | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
        self._config, self._model, self._rule = steps or StepConfig(), model, rule
        curvature = curvature or CurvatureConfig()
        if self._config.fallback_lr is not None:
            check_settings(at_step({"fallback_lr": self._config.fallback_lr}, 0))
        self._registry = LayerRegistry(model, curvature, rule, structure, max_dim)
        self._schedules: list[Schedules] = []
        self._sharing, self._is_built = sharing, False
        self._skips, self._has_looked_around = Skips(1, MANY), False
        asked = [checked_group(group) for group in groups]
        super().__init__(self._registry.all_groups(asked), {**settings, "role": "layer"})
        self._registry.check_patterns()
        warn_of_model(*self._registry.without_factors(self.param_groups))
        # The collaborators hold the state itself, which is the same object for the life of the optimizer.
        self._preconditioner = Preconditioner(rule, self._states, low_memory)
        self._direction = None if self._config.precondition_only else direction
        if direction is not None:
            direction.check(list(self._layers.values()))
        self._choose_turns()
        self._collector = Collector(curvature, self._preconditioner)
        self._is_built = True
        self._use_strategy(sharing(model, None))
        self._watch()

    # ------------------------------------------------------------------ parameters
    def add_param_group(self, param_group: Settings) -> None:
        """Add parameters of the model. Those of layers and others become two groups, each with its learning rate."""
        self._drop_what_is_gone(parameter_names(self._model))
        asked = checked_group(param_group)
        params = asked.pop("params")
        wanted = {**self.defaults, **asked}
        check_settings(at_step(wanted, 0))
        wanted = own_numbers(wanted)
        fallback_lr = asked.get("fallback_lr", self._config.fallback_lr)
        self._registry.check_new(params, self.param_groups)
        found = self._registry.find(params, wanted, [g["params"] for g in self.param_groups if g["role"] == "fallback"])
        for group, schedules in split_group(found.members, found.others, wanted, fallback_lr):
            super().add_param_group(group)
            self._schedules.append(schedules)
        self._registry.add(found.layers)
        if self._is_built:
            self._choose_turns()
            self._use_strategy(self._strategy)
            self._watch()

    def _drop_what_is_gone(self, there: Collection[nn.Parameter]) -> None:
        """Drop parameters that are no longer in the model, with their state, as after its head was replaced.

        What is left of a layer goes too: it is no layer any more.
        """
        ours = [p for group in self.param_groups for p in group["params"]]
        lost = {p for p in ours if p not in there}
        if not lost:
            return
        if len(lost) == len(ours):
            raise RuntimeError(
                "none of this optimizer's parameters is in the model any more, as after fully_shard(): build the "
                "optimizer anew"
            )
        gone = self._registry.drop(lost)
        lost |= {p for layer in gone for p in layer.layer.parameters}
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if p not in lost]
        for p in lost:
            self.state.pop(p, None)
        self._preconditioner.forget(gone)
        self._use_strategy(self._strategy)
        self._watch()
        what = [repr(layer.name) for layer in gone] or [f"parameters {[tuple(p.shape) for p in lost]}"]
        warn_of_replaced_parts(what, stacklevel=7)

    # ------------------------------------------------------------------ collaborators
    def _use_strategy(self, strategy: Alone) -> None:
        """Let a strategy say who computes what, from now on: give each layer an owner."""
        self._strategy = self._collector.strategy = self._preconditioner.strategy = strategy
        strategy.arrange(list(self._layers.values()), self._cost)
        for layer in self._layers.values():
            self._preconditioner.drop_what_others_store(layer)

    def _adopt_wrapper(self, wrapper: Any) -> None:
        """Share the work with other ranks if a forward pass shows that the model has been wrapped; the hooks stay."""
        strategy = self._sharing(self._model, wrapper)
        if strategy.count > 1:
            self._use_strategy(strategy)

    def _watch(self) -> None:
        """Set hooks on all modules that describe a layer."""
        self._collector.watch(self._model, list(self._layers.values()))
        self._collector.due = due_weights(self.param_groups)
        self._collector.found_wrapper = weakref.WeakMethod(self._adopt_wrapper)

    @property
    def _states(self) -> States:
        return cast(States, self.state)  # torch types its keys as tensors

    @property
    def _layers(self) -> dict[nn.Parameter, FactoredLayer]:
        return self._registry.layers

    def _cost(self, layer: FactoredLayer) -> float:
        """Return what is balanced over ranks.

        It is memory where layers are stored by one rank each, else the work of an update.
        """
        row = layer_row(self._rule, layer, layer.name, self._config, self.param_groups[0]["update_every"])
        return row.bytes if self._strategy.stores_apart else row.update

    def close(self) -> None:
        """Remove the hooks from the model. Factors stay as they are from then on."""
        self._collector.close()

    def __getstate__(self) -> Settings:
        """Return what torch stores and the collaborators, for copies and pickles, which find hooks and ranks again."""
        return {**super().__getstate__(), **own_attributes(self), "_strategy": None}

    def __setstate__(self, state: Settings) -> None:
        super().__setstate__(state)
        if "_strategy" in state:  # torch calls this to load a state too
            self._use_strategy(self._sharing(self._model, None))
            self._watch()

    # ------------------------------------------------------------------ the step
    @outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients that are there; parameters without one stay.

        If an entry of a gradient is not finite no parameter and no state changes, and ``skipped_steps`` counts it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            follow_schedules(group, schedules)
            self._rule.check((self._layers[p] for p in group["params"] if p in self._layers), group)
        parameters = self._checked_parameters()
        if parameters:
            with full_precision(parameters[0]):
                self._step(parameters)
        self._collector.end_step(due_weights(self.param_groups))
        return loss

    def _step(self, parameters: list[nn.Parameter]) -> None:
        """Look at the gradients, reduce the statistics, update the factors that are due, move layers and the rest."""
        strategy, collector = self._strategy, self._collector
        gradients = strategy.local([gradient_of(p) for p in parameters])
        largest = Peaks(strategy.maximum(peaks(gradients)), {p: place for place, p in enumerate(parameters)})
        ok = largest.values.amax() < math.inf
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        moving = [
            Move(layer, group_of[w], {p: group_of[p] for p in layer.layer.parameters if p in largest.place})
            for w, layer in self._layers.items()
            if w in largest.place
        ]
        right = collector.verify_rows([move.layer for move in moving], self.param_groups[0])
        ok = ok if right is None else ok & right.to(ok.device)
        self._count_rows([move.layer for move in moving if is_due(move.group)])
        strategy.reduce(collector)
        for move in moving:
            self._preconditioner.follow_parameters(move.layer)
        due = [move for move in moving if is_due(move.group)]
        if due:
            skipped = self._preconditioner.update(due, collector, ok)
            self._count("skipped_updates", skipped + collector.take_empty_batches())
        plan_updates(self.param_groups, self._config)
        replaces, compiles = self._config.precondition_only, self._config.compile
        steps = LayerSteps(self._states, strategy, self._precondition, replaces, compiles)
        ok = steps.move(moving, largest, self._preconditioner.levels, ok)
        if not self._config.precondition_only:
            others = [p for p in parameters if group_of[p]["role"] == "fallback"]
            fall_back(self._config.fallback, others, group_of, self._states, strategy, ok)
        self._count("skipped_steps", ~ok)
        missed = ~ok if right is None else ~ok & right.to(ok.device)
        for _, count in self._skips.count(("steps",), missed.view(1)):
            warn_of_skipped_steps(count, stacklevel=6)
        for group in self.param_groups:
            group["step"] += 1

    def _count_rows(self, due: list[FactoredLayer]) -> None:
        """Note how many rows all ranks' batches have for layers that were not counted yet."""
        known = self.param_groups[0].setdefault(ROWS, {})  # which torch saves and loads
        new = [layer for layer in due if layer.views and layer.name not in known]
        if new:
            counts = [self._collector.row_count(layer) for layer in new]
            if self._strategy.count > 1:
                counts = self._strategy.sum(torch.tensor(counts, device=new[0].weight.device)).tolist()
            known |= {layer.name: count for layer, count in zip(new, counts, strict=True) if count}
            self._choose_turns()

    def _choose_turns(self) -> None:
        """Say how the direction of each layer comes from its average, by what is known of its batches."""
        known = self.param_groups[0].get(ROWS, {})
        for layer in self._layers.values():
            layer.rows = known.get(layer.name, 0)
            layer.turn = None if self._direction is None else self._direction.turn(layer)

    def _precondition(self, moving: list[Move]) -> tuple[list[list[Move]], list[Tensor]]:
        return self._preconditioner.directions(moving, self._collector)

    # ------------------------------------------------------------------ before a step
    def _checked_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with a gradient; raise where one could not be used, before anything changes."""
        names = parameter_names(self._model)
        self._drop_what_is_gone(names)
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        check_gradients(names, self.param_groups)
        if parameters and begins_with_zeros(parameters, self.param_groups, self._strategy):
            make_state(parameters, self._layers, self._preconditioner, self._config, self._states)
            return []
        if parameters and not self._has_looked_around:
            self._has_looked_around = True
            look_around(self._collector)
        if parameters:
            self._collector.check_observed()
        return parameters

    def observe(self, output: Tensor, likelihood: Likelihood = "categorical") -> None:
        """Collect statistics from targets that are drawn from the model's own predictions, for ``fisher="mc"``.

        Call it with the model's output before the loss's backward pass; the graph is kept for that. ``"categorical"``
        takes logits along the last dimension, ``"bernoulli"`` logits, ``"gaussian"`` means with unit variance. Before a
        step that does not update the factors it does nothing.
        """
        self._collector.observe(output, likelihood)

    @outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the hooks have collected with them."""
        super().zero_grad(set_to_none)
        self._collector.forget()
        self._strategy.forget()

    # ------------------------------------------------------------------ state
    def _count(self, name: str, happened: Tensor) -> None:
        first = self.param_groups[0]  # which torch saves and loads
        first[name] = first[name].to(happened.device) + happened if name in first else happened.long()

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because a gradient, or its natural direction, was not finite."""
        return int(self.param_groups[0].get("skipped_steps", 0))

    @property
    def skipped_updates(self) -> int:
        """Updates of a layer's factors that were not made, because its curvature was not finite or its batch empty."""
        return int(self.param_groups[0].get("skipped_updates", 0)) + self._collector.empty_batches

    def state_dict(self) -> Settings:
        """Return the state, as torch's optimizers give it."""
        self._collector.read_verdict(self.param_groups[0])
        return super().state_dict()

    def load_state_dict(self, state_dict: Settings) -> None:
        """Take a state of the same model and structure; the dictionary stays as it is, and nothing is shared.

        Factors that were saved in another form, with another damping or ``memory``, are converted.
        """
        self._drop_what_is_gone(parameter_names(self._model))
        states = self.state

        def fit(given: Settings) -> Settings:
            return fitted_state(given, self.param_groups, self._registry, self._preconditioner)

        def take(fitted: Settings) -> None:
            put_state(fitted, states, self.param_groups, self._strategy)
            self.state = states
            self._follow_state()

        with loading(self, fit, take):
            super().load_state_dict(state_dict)

    def _follow_state(self) -> None:
        """Forget what came from the old state after another one has been loaded."""
        self._collector.forget()
        self._strategy.forget()
        self._preconditioner.forget(self._layers.values())
        for layer in self._layers.values():
            self._preconditioner.drop_what_others_store(layer)
        self._choose_turns()
        self._collector.read_verdict(self.param_groups[0])
        self._collector.due = due_weights(self.param_groups)

    def memory_usage(self) -> int:
        """Return the bytes of the state that this rank stores, cached products included.

        Before the first step these are the bytes that it will store.
        """
        self._drop_what_is_gone(parameter_names(self._model))
        states = [state for state in self.state.values() if isinstance(state, dict)]
        if not states:
            return expected_bytes(self._registry, self._preconditioner, self._strategy, self._config, self.param_groups)
        return stored_bytes(states, self._strategy, self._rule)

    def summary(self) -> Summary:
        """Return what each parameter gets: structure, bytes of state, multiplications of an update and of a step.

        ``print(optimizer.summary())`` shows it as a table, and so does a notebook; programs take its ``rows``.
        """
        self._drop_what_is_gone(parameter_names(self._model))
        return Summary([*summary_rows(self._model, self._registry, self._rule, self._config, self.param_groups)])
