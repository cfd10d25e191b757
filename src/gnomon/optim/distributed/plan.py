"""What INGD stores, computes and sends on several ranks, counted from shapes: without data, and without ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..ingd import INGD
from ..kronecker.config import check_choice
from ..kronecker.cost_model import moment_work
from ..kronecker.layers.base import FactoredLayer, as_whole
from ..kronecker.summary import layer_row, momentum_bytes, scaled, state_bytes, table, work
from .assignment import Assignment
from .statistics_exchange import statistics_size
from .strategies import MODES, WAYS, Mode, chosen_mode


@dataclass(frozen=True)
class LayerPlan:
    """A layer on several ranks. Messages are in bytes of what they hold, work is in multiplications."""

    name: str
    owner: int | None
    """The rank that updates its factors; None where all do."""
    statistics: int
    """Sent at each update: sums of squares of inputs and of output gradients."""
    factors: int
    """Sent at each update: what the owner tells the others of the new factors."""
    directions: int
    """Sent at each step: how its parameters move, from the owner to the others."""
    stored_by_owner: int
    """Bytes of its factors, products that are kept included, at the rank that updates them."""
    stored_by_others: int
    """The same at any other rank."""
    momentum_by_owner: int
    """Bytes of its parameters' momenta."""
    momentum_by_others: int
    update: int
    """Work of an update, without the statistics."""
    step: int
    """Work of preconditioning its gradient."""
    parameters: int
    """Bytes of its parameters."""


@dataclass(frozen=True)
class Plan:
    """The memory, work and messages of each rank in training with ``DistributedDataParallel``.

    What ranks send is counted as payload: a message counts once, whatever way it takes. By the usual algorithms a rank
    sends ``2 (ranks - 1) / ranks`` of what is added up for all (a ring), and at most all of what is added up for one or
    told by one (a chain, or a tree). A few numbers, under 32 bytes a step, are not counted, nor the
    units of statistics that ranks agree on before the first update.
    """

    ranks: int
    shard: Mode
    layers: tuple[LayerPlan, ...]
    other_state: int
    """Bytes of the state of parameters without factors, at every rank."""

    # ------------------------------------------------------------------ memory
    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes of the optimizer's state at each rank."""
        shared = self.other_state + sum(layer.stored_by_others + layer.momentum_by_others for layer in self.layers)
        return tuple(shared + owned for owned in self._owned(_more_of_owner))

    @property
    def largest_memory(self) -> int:
        return max(self.memory)

    @property
    def mean_memory(self) -> float:
        return sum(self.memory) / self.ranks

    # ------------------------------------------------------------------ work
    @property
    def update_work(self) -> tuple[int, ...]:
        """Multiplications of an update at each rank, without the statistics."""
        return self._owned(lambda layer: layer.update)

    @property
    def largest_update(self) -> int:
        return max(self.update_work)

    @property
    def step_work(self) -> tuple[int, ...]:
        """The multiplications of preconditioning at each rank; with ``shard="full"`` a rank has only its own layers."""
        if self.shard == "full":
            return self._owned(lambda layer: layer.step)
        return (sum(layer.step for layer in self.layers),) * self.ranks

    @property
    def largest_step(self) -> int:
        return max(self.step_work)

    def _owned(self, amount: Callable[[LayerPlan], int]) -> tuple[int, ...]:
        """Return the sums over the layers of each rank."""
        sums = [0] * self.ranks
        for layer in self.layers:
            for rank in range(self.ranks) if layer.owner is None else (layer.owner,):
                sums[rank] += amount(layer)
        return tuple(sums)

    # ------------------------------------------------------------------ messages
    @property
    def statistics(self) -> int:
        return sum(layer.statistics for layer in self.layers)

    @property
    def factors(self) -> int:
        return sum(layer.factors for layer in self.layers)

    @property
    def bytes_per_update(self) -> int:
        """Payload of an update: statistics and factors."""
        return self.statistics + self.factors

    @property
    def bytes_per_step(self) -> int:
        """Payload of every step: directions."""
        return sum(layer.directions for layer in self.layers)

    @property
    def sent_per_update(self) -> float:
        """What a rank sends at an update, at most."""
        around = 2 * (self.ranks - 1) / self.ranks if self.shard == "none" else 1
        return around * self.statistics + self.factors

    @property
    def sent_per_step(self) -> int:
        """What a rank sends at every step, at most."""
        return self.bytes_per_step

    @property
    def received_if_sharded(self) -> tuple[int, ...]:
        """What each rank receives at every step where ``fully_shard()`` has divided the parameters evenly.

        With ``"full"``, it receives the other ranks' parts of its layers' gradients, and its parts of other layers'
        directions: on average ``2 (ranks - 1) / ranks^2`` of what the parameters of layers take. Otherwise it receives
        the other ranks' parts of all gradients, ``(ranks - 1) / ranks``, and as much again for layers whose steps go
        along polar factors, which is not counted here.
        """
        total = sum(layer.parameters for layer in self.layers)
        if self.shard != "full":
            return (total * (self.ranks - 1) // self.ranks,) * self.ranks
        owned = self._owned(lambda layer: layer.parameters)
        return tuple((mine * (self.ranks - 1) + total - mine) // self.ranks for mine in owned)

    def __str__(self) -> str:
        lines = [
            (layer.name, "all" if layer.owner is None else str(layer.owner), *_cells([layer])) for layer in self.layers
        ]
        memory = f"largest rank {scaled(self.largest_memory)}B, mean {scaled(self.mean_memory)}B"
        work = f"largest rank {scaled(self.largest_update)}, a step {scaled(self.largest_step)}"
        told = f"{scaled(self.bytes_per_update)}B an update, {scaled(self.bytes_per_step)}B a step"
        sharded = f"received with fully_shard(): largest rank {scaled(max(self.received_if_sharded))}B a step"
        return "\n".join(
            [
                f'{self.ranks} ranks, shard="{self.shard}"',
                table(HEADER, lines, ("total", "", *_cells(self.layers))),
                f"memory: {memory}",
                f"multiplications: an update {work}",
                f"sent: {told}",
                *([sharded] if self.ranks > 1 else []),
            ]
        )


HEADER = ("layer", "owner", "statistics", "factors", "directions", "stored", "by others", "momentum", "update", "step")


def _cells(layers: list[LayerPlan] | tuple[LayerPlan, ...]) -> tuple[str, ...]:
    sizes = ("statistics", "factors", "directions", "stored_by_owner", "stored_by_others", "momentum_by_owner")
    found = [f"{scaled(sum(getattr(layer, name) for layer in layers))}B" for name in sizes]
    return (*found, *(scaled(sum(getattr(layer, name) for layer in layers)) for name in ("update", "step")))


def _more_of_owner(layer: LayerPlan) -> int:
    return layer.stored_by_owner - layer.stored_by_others + layer.momentum_by_owner - layer.momentum_by_others


# ---------------------------------------------------------------------- from an optimizer
def plan(optimizer: INGD, ranks: int, shard: Mode | None = None) -> Plan:
    """Return the memory, work and messages of each rank if so many ranks trained with ``optimizer``.

    One process is enough, and the model may be on the meta device. Layers get the owners that they would have.

    Args:
        optimizer: an INGD of the model.
        ranks: how many train it together, with ``DistributedDataParallel``.
        shard: how they share the work, that of the optimizer unless given.
    """
    if not isinstance(optimizer, INGD):
        raise TypeError(f"optimizer must be an INGD, got {type(optimizer).__name__}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, got {ranks!r}")
    shard = chosen_mode(optimizer._shard, optimizer._model) if shard is None else shard
    check_choice("shard", shard, MODES)
    known = [*optimizer._layers.values()]
    owners: tuple[int | None, ...] = (None,) * len(known)
    if shard != "none" and ranks > 1:
        rows = [layer_row(optimizer._rule, layer, layer.name, optimizer._config, _uses(optimizer)) for layer in known]
        costs = [row.bytes if WAYS[shard].stores_apart else row.update for row in rows]
        owners = Assignment.balanced(costs, ranks).owners
    layers = tuple(_layer_plan(optimizer, one, shard, owner, ranks) for one, owner in zip(known, owners, strict=True))
    others = itertools.islice(optimizer.summary().rows, len(known), None)  # layers come first
    return Plan(ranks, shard, layers, sum(row.bytes for row in others))


def _uses(optimizer: INGD) -> int:
    """Return how often factors are used between updates, in the long run."""
    return optimizer.param_groups[0]["update_every"]


def _layer_plan(optimizer: INGD, layer: FactoredLayer, shard: Mode, owner: int | None, ranks: int) -> LayerPlan:
    rule = optimizer._rule
    update, step = work(rule, layer)
    products, momentum = rule.product_bytes(layer, _uses(optimizer)), momentum_bytes(layer, optimizer._config)
    stored = state_bytes(rule, layer) + products
    told, kept, moved = 0, stored, momentum
    if owner is not None:
        shared = WAYS[shard].shared_keys(layer, rule)
        state = {
            key: torch.empty(shape, dtype=rule.dtypes(layer)[key], device="meta")
            for key, shape in rule.shapes(layer).items()
        }
        told = sum(_bytes(rule.sent(layer, key, state[key])) for key in shared)
        kept = sum(_bytes(state[key]) for key in [*shared, *["forms"] * bool(shared)])
        kept += products if shard == "update" else 0
        moved = momentum if shard == "update" else 0
    return LayerPlan(
        layer.name,
        owner,
        statistics=statistics_size(layer) * layer.computing_dtype.itemsize if ranks > 1 and layer.views else 0,
        factors=told,
        directions=0 if owner is None or shard != "full" else _direction_bytes(optimizer, layer),
        stored_by_owner=stored,
        stored_by_others=kept,
        momentum_by_owner=momentum,
        momentum_by_others=moved,
        update=update,
        step=step,
        parameters=sum(_bytes(as_whole(p)) for p in layer.layer.parameters),
    )


def _direction_bytes(optimizer: INGD, layer: FactoredLayer) -> int:
    """Return the bytes that a layer's owner sends at a step.

    These are its directions, whether the layer moves and, where steps have a given size, how far.
    """
    group = next(group for group in optimizer.param_groups if any(p is layer.weight for p in group["params"]))
    numbers = 1 if group["step_rms"] is None else 2
    return sum(_bytes(as_whole(p)) for p in layer.layer.parameters) + numbers * torch.float32.itemsize


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------------- statistics
def statistics_work(layer: FactoredLayer, rows: int) -> int:
    """Return the multiplications of a layer's statistics from so many rows, which each rank has of its own batch."""
    left, right = layer.pair
    blocks = layer.layer.blocks
    counted = 0 if layer.layer.takes_indices else moment_work(left, blocks, rows)  # counts of indices are additions
    return counted + moment_work(right, blocks, rows)
