"""What INGD stores, computes and sends on several ranks, counted from shapes: without data, and without ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..groups import Group
from .assignment import Assignment
from .exchange import statistics_size
from .factors import settled
from .ingd import INGD
from .moves import Tracked
from .settings import check_choice
from .sharing import MODES, Mode
from .summary import scaled, table


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


@dataclass(frozen=True)
class Plan:
    """What training on so many ranks takes of each, with ``DistributedDataParallel``.

    What ranks send is counted as payload: a message counts once, whatever way it takes. By the usual algorithms a rank
    sends ``2 (ranks - 1) / ranks`` of what is added up for all (a ring), and at most all of what is added up for one or
    told by one (a chain, or a tree). A few numbers, under 32 bytes a step, are not counted.
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
        """Multiplications of preconditioning at each rank; only where others have no factors do they leave it."""
        if self.shard == "full":
            return self._owned(lambda layer: layer.step)
        return (sum(layer.step for layer in self.layers),) * self.ranks

    @property
    def largest_step(self) -> int:
        return max(self.step_work)

    def _owned(self, amount: Callable[[LayerPlan], int]) -> tuple[int, ...]:
        """The sums over the layers of each rank."""
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

    def __str__(self) -> str:
        lines = [
            (layer.name, "all" if layer.owner is None else str(layer.owner), *_cells([layer])) for layer in self.layers
        ]
        memory = f"largest rank {scaled(self.largest_memory)}B, mean {scaled(self.mean_memory)}B"
        work = f"largest rank {scaled(self.largest_update)}, a step {scaled(self.largest_step)}"
        told = f"{scaled(self.bytes_per_update)}B an update, {scaled(self.bytes_per_step)}B a step"
        return "\n".join(
            [
                f'{self.ranks} ranks, shard="{self.shard}"',
                table(HEADER, lines, ("total", "", *_cells(self.layers))),
                f"memory: {memory}",
                f"multiplications: an update {work}",
                f"sent: {told}",
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
    """What ``optimizer`` would take on so many ranks.

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
    shard = optimizer._shard if shard is None else shard
    check_choice("shard", shard, MODES)
    tracked = [*optimizer._tracked.values()]
    owners: tuple[int | None, ...] = (None,) * len(tracked)
    if shard != "none" and ranks > 1:
        owners = Assignment.balanced([optimizer._cost(one, shard) for one in tracked], ranks).owners
    layers = tuple(_layer_plan(optimizer, one, shard, owner, ranks) for one, owner in zip(tracked, owners, strict=True))
    others = itertools.islice(optimizer._rows(), len(tracked), None)  # layers come first
    return Plan(ranks, shard, layers, sum(row.bytes for row in others))


def _layer_plan(optimizer: INGD, tracked: Tracked, shard: Mode, owner: int | None, ranks: int) -> LayerPlan:
    state, row = _state(optimizer, tracked), optimizer._layer_row(tracked, tracked.name)
    products, momentum = optimizer._square_bytes(tracked), optimizer._momentum_bytes(tracked)
    stored = sum(_bytes(value) for value in state.values()) + products
    seen = ranks > 1 and tracked.views
    if owner is None:
        told, kept, moved = 0, stored, momentum
    else:
        shared = {key: state[key] for key in optimizer._kept_by_all(tracked, shard)}
        told = sum(_bytes(optimizer._as_sent(key, value)) for key, value in shared.items())
        kept = sum(_bytes(value) for value in shared.values()) + (products if shard == "update" else 0)
        moved = momentum if shard == "update" else 0
    return LayerPlan(
        tracked.name,
        owner,
        statistics=statistics_size(tracked) * optimizer._computing_dtype(tracked).itemsize if seen else 0,
        factors=told,
        directions=0 if owner is None or shard != "full" else _direction_bytes(optimizer, tracked),
        stored_by_owner=stored,
        stored_by_others=kept,
        momentum_by_owner=momentum,
        momentum_by_others=moved,
        update=row.update,
        step=row.step,
    )


def _state(optimizer: INGD, tracked: Tracked) -> dict[str, Tensor]:
    """What the owner keeps of a layer's factors, without data."""
    dtype = optimizer._stored_dtype(tracked)
    shapes = optimizer._owned_shapes(tracked)
    state = {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in shapes.items()}
    if optimizer._fixed["relative"]:
        state["level"] = torch.empty(tracked.layer.blocks, dtype=torch.float64, device="meta")
    return state


def _direction_bytes(optimizer: INGD, tracked: Tracked) -> int:
    """Each parameter once, and for the layer whether it moves and, where steps have a given size, how far."""
    weight = tracked.layer.weight
    group = next(group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
    numbers = 1 if group["step_rms"] is None else 2
    return sum(_bytes(p) for p in tracked.layer.parameters) + numbers * torch.float32.itemsize


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------------- statistics
def statistics_work(tracked: Tracked, rows: int) -> int:
    """Multiplications of a layer's statistics from so many rows, which every rank has of its own batch."""
    inputs, outputs, blocks = tracked.factors.left, tracked.factors.right, tracked.layer.blocks
    counted = 0 if tracked.layer.one_hot else _moment_work(inputs, blocks, rows)  # counts of indices are additions
    return counted + _moment_work(outputs, blocks, rows)


@functools.lru_cache(maxsize=256)
def _moment_work(group: Group, blocks: int, rows: int) -> int:
    factor = None if group.keeps_covariance else group.identity((blocks,), device="meta")
    with FlopCounterMode(display=False) as counter:
        settled(group, factor, torch.empty(blocks, rows, group.k, device="meta"), torch.empty(blocks, device="meta"))
    return counter.get_total_flops() // 2 + blocks * rows * group.k
