"""The preconditioner: the factors of all layers in the optimizer's state, and the directions that they give."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...linalg import empty
from .factor_rule import FactorRule
from .layers.base import FactoredLayer, Layer, Move, Stack, States, alike, cat, move_state
from .notices import warn_of_skipped_updates
from .statistics import Factors, Statistics, joined
from .strategy import Alone, StatisticsSource

# ---------------------------------------------------------------------- updates and directions
PATIENCE = 10
"""The number of updates of a layer's factors in a row that may be skipped before a warning."""


@dataclass
class LayerGradient:
    """The gradient of a layer: tensors shaped as its parameters, and the rows of which it is the product."""

    tensors: list[Tensor]
    rows: tuple[Tensor, Tensor] | None = None
    """x and g with ``G = g^T x``, where they are so few that to precondition them is cheaper."""


class Skips:
    """Counts for each name how many times in a row something was skipped, and tells when the count passes a limit.

    The counts stay on the device. The host reads what has come of them until now, so that it does not wait.
    """

    def __init__(self, *limits: int) -> None:
        self._limits = limits
        self._counts: dict[tuple[str, ...], Tensor] = {}
        self._read: dict[tuple[str, ...], Tensor] = {}
        self._told: set[tuple[str, int]] = set()

    def count(self, names: tuple[str, ...], skipped: Tensor) -> list[tuple[str, int]]:
        """Add one for each name that was skipped, and begin again at zero for the others.

        Return the names whose counts have passed a limit for the first time, with the counts.
        """
        counts = skipped * (self._counts[names].to(skipped.device) + 1 if names in self._counts else 1)
        self._counts[names] = counts
        if names not in self._read:
            pinned = counts.device.type == "cuda"
            self._read[names] = torch.zeros(len(names), dtype=torch.long, device="cpu", pin_memory=pinned)
        self._read[names].copy_(counts, non_blocking=True)
        known = zip(names, self._read[names].tolist(), strict=True)
        return [found for found in known if found[1] and self._passes_limit(*found)]

    def _passes_limit(self, name: str, count: int) -> bool:
        passed = {(name, limit) for limit in self._limits if count >= limit} - self._told
        self._told |= passed
        return bool(passed)


class Preconditioner:
    """The factors of all layers, in the optimizer's state, and the directions that they give."""

    def __init__(self, rule: FactorRule, states: States, low_memory: bool = False) -> None:
        self.rule, self._states, self._low_memory = rule, states, low_memory
        self.strategy: Alone
        self._skips = Skips(PATIENCE)
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._places: dict[int, tuple[torch.device, torch.dtype]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_memory": {}, "strategy": None}

    # ------------------------------------------------------------------ state
    def stored_keys(self, layer: FactoredLayer) -> Collection[str]:
        """Return the parts of a layer's state that this rank stores."""
        return self.strategy.stored_keys(layer, self.rule)

    def stack(self, layers: Sequence[FactoredLayer]) -> Stack:
        """Return layers of one kind with their states, which are created where they are missing."""
        for layer in layers:
            state = self._states[layer.layer.weight]
            for key in self.stored_keys(layer):
                if key not in state:
                    state[key] = self.rule.initial(layer, key)
        return Stack(layers, self._states)

    def start(self, layers: Sequence[FactoredLayer]) -> None:
        """Make what this rank stores of the state of layers."""
        for layer in layers:
            self.stack([layer])

    def projection_factors(self, layer: FactoredLayer) -> Factors:
        """Return the factors through which a layer's rows are projected when they come."""
        if all(form.keeps_matrix for form in layer.pair):
            return None, None
        self.stack([layer])
        return self.rule.projection_factors(layer, self._states[layer.layer.weight])

    def follow_parameters(self, layer: FactoredLayer) -> None:
        """Move the state to the device and type of the parameters, where these have changed."""
        weight = layer.layer.weight
        place = weight.device, weight.dtype
        if self._places.get(layer.index) != place:
            for p in layer.layer.parameters:
                move_state(self._states[p], p, self.rule.dtypes(layer))
            self._places[layer.index] = place

    def forget(self, layers: Iterable[FactoredLayer]) -> None:
        """Drop what was computed from the state of layers, which has changed."""
        layers = list(layers)
        self.rule.forget_products(layers)
        for layer in layers:
            self._places.pop(layer.index, None)

    def drop_what_others_store(self, layer: FactoredLayer) -> None:
        """Drop the parts of a layer's state that another rank stores."""
        if self.strategy.is_mine(layer):
            return
        stored = {*self.stored_keys(layer), *([] if self.strategy.moves_apart else ["momentum_buffer"])}
        for p in layer.layer.parameters:
            if p in self._states:
                for key in self._states[p].keys() - stored:
                    del self._states[p][key]
        self.forget([layer])

    # ------------------------------------------------------------------ updates
    def update(self, due: Sequence[Move], collector: StatisticsSource, ok: Tensor) -> Tensor:
        """Update the factors of layers where ``ok`` is True, and send them to other ranks.

        Return how many layers were skipped because their curvature was not finite.
        """
        strategy, skipped = self.strategy, torch.zeros((), dtype=torch.long, device=ok.device)
        strategy.gather_gradients([move.layer for move in due if not collector.was_reached(move.layer)])
        mine = [move for move in due if strategy.is_mine(move.layer) and self._has_curvature(move.layer, collector)]

        def kind(move: Move) -> tuple[Any, ...]:
            statistics = collector.statistics(move.layer)
            return move.layer.kind, id(move.group), None if statistics is None else statistics.kind

        for stack in alike(mine, kind):
            layers = [move.layer for move in stack]
            finite = self.rule.update(self.stack(layers), stack[0].group, self._source(layers, collector), ok)
            missed = ok.to(finite.device) & ~finite
            for name, count in self._skips.count(tuple(layer.name for layer in layers), missed):
                warn_of_skipped_updates(name, count)
            skipped = skipped + missed.sum().to(skipped.device)
        strategy.publish(self, [move.layer for move in due])
        return strategy.sum(skipped)

    def _source(self, layers: Sequence[FactoredLayer], collector: StatisticsSource) -> Statistics | Tensor:
        """Return the statistics of layers of one kind, or their gradients where there are none."""
        known = [s for layer in layers if (s := collector.statistics(layer)) is not None]
        if known:
            return joined(known)
        matrices = [layer.layer.matrix(*self.strategy.gradients(layer)) for layer in layers]
        return cat(matrices).to(layers[0].computing_dtype)

    def _has_curvature(self, layer: FactoredLayer, collector: StatisticsSource) -> bool:
        """Return whether there are statistics, or the gradient stands in for them.

        Where a model applies a weight by a function, no hook sees its rows. To take the gradient then needs relative
        curvature, because the two have different units.
        """
        if collector.statistics(layer) is not None or not layer.views:
            return True
        may = self.rule.relative and collector.takes_gradients and not collector.is_closed
        return may and not collector.was_reached(layer)

    # ------------------------------------------------------------------ directions
    def directions(self, moving: Sequence[Move], collector: StatisticsSource) -> tuple[list[list[Move]], list[Tensor]]:
        """Return the layers whose directions this rank computes, in stacks, and the directions of each stack.

        Directions are valid until the next step.
        """
        strategy = self.strategy

        def kind(move: Move) -> tuple[Any, ...]:
            rows = collector.rows(move.layer)
            return (*move.layer.kind, move.layer.turn, id(move.group), None if rows is None else rows[0].shape)

        stacks = alike((m for m in moving if not strategy.stores_apart or strategy.is_mine(m.layer)), kind)
        found = []
        for moves in stacks:
            stack = self.stack([move.layer for move in moves])
            gradients = [LayerGradient(strategy.gradients(layer), collector.rows(layer)) for layer in stack.layers]
            found.append(self._preconditioned(stack, gradients, uses=moves[0].group["interval"]))
        return stacks, found

    def levels(self, moving: Sequence[Move]) -> Tensor | None:
        """Return the units of the preconditioner of layers of one kind, or None where it has none of its own."""
        return self.rule.levels(self.stack([move.layer for move in moving]))

    def _preconditioned(self, stack: Stack, gradients: list[LayerGradient], uses: int) -> Tensor:
        """Return ``C C^T G K K^T``, computed as ``(g C C^T)^T (x K K^T)`` from few rows."""
        memory, other = self._memory_for(stack)
        apply = self.rule.apply
        if gradients[0].rows is not None:
            rows = (gradient.rows for gradient in gradients if gradient.rows is not None)
            x, g = (cat(sides) for sides in zip(*rows, strict=True))
            g, x = apply(stack, "C", g, uses, False, None), apply(stack, "K", x, uses, False, None)
            fits = memory is not None and memory.dtype == x.dtype
            return torch.matmul(g.mT, x, out=memory if fits else None)
        layer = stack.layers[0].layer
        matrices = cat([_matrix(layer, gradient, memory) for gradient in gradients])
        fresh = len(stack) > 1 or layer.bias is not None  # not a view of a gradient, which must not be overwritten
        # The inputs' side comes last, so that the rows of the result are laid out in memory as the weight's are.
        scratch = None if other is None else other.mT
        columns = apply(stack, "C", matrices.mT, uses, fresh, scratch)
        free = memory if scratch is not None and columns.data_ptr() == scratch.data_ptr() else other
        return apply(stack, "K", columns.mT, uses, True, free)

    def _memory_for(self, stack: Stack) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return memory for a direction and for an intermediate result.

        It is stored between steps on CPUs, where to allocate it is slow.
        """
        layer = stack.layers[0].layer
        weight, index = layer.weight, stack.layers[0].index
        if weight.device.type != "cpu" or self._low_memory or len(stack) > 1:
            return None, None
        if index not in self._memory or self._memory[index][0].dtype != weight.dtype:
            shape, like = (layer.blocks, layer.d, layer.p), torch.empty(0, dtype=weight.dtype, device="cpu")
            make = partial(empty, like) if stack.pair.left.keeps_matrix else like.new_empty
            self._memory[index] = make(shape), make(shape)
        return self._memory[index]


def _matrix(layer: Layer, gradient: LayerGradient, memory: Tensor | None) -> Tensor:
    weight, *bias = gradient.tensors
    return layer.matrix(weight, bias[0] if bias else None, memory)
