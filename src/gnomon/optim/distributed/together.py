"""Several ranks that train one model: who updates, stores and applies the factors of which layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..kronecker.factor_rule import FactorRule
from ..kronecker.layers.base import FactoredLayer, Move, Part
from ..kronecker.strategy import Alone, FactorStore, StatisticsSource
from ..torch_internals import active_wrapper, at_end_of_backward_pass, current_backward_pass, hides_forward_pass
from .assignment import Assignment
from .process_group import Ranks
from .sharded_tensors import joined, local, sharded_as, share, whole
from .statistics_exchange import StatisticsExchange, decoded, portions

PORTION = 2**26
"""The numbers of gradients that are whole at a time, where parameters are sharded."""


@dataclass(frozen=True)
class Way:
    """A way of sharing the work on factors."""

    has_owners: bool
    """Whether one rank alone updates the factors of a layer, and sends them to the others."""
    stores_apart: bool
    """Whether it also stores them alone, and sends directions."""

    def shared_keys(self, layer: FactoredLayer, rule: FactorRule) -> list[str]:
        """Return the parts of a layer's state that the owner sends to all ranks after an update.

        Ranks that compute directions need both factors and their units. Others need the factors through which rows are
        projected when they come.
        """
        if not self.has_owners:
            return []
        if not self.stores_apart:
            return list(rule.shared_keys)
        if not layer.views:
            return []
        sides = zip(("K", "C"), layer.pair, strict=True)
        return [name for name, form in sides if not form.keeps_matrix]


class Together(Alone):
    """Several ranks, each with a part of every batch."""

    def __init__(self, ranks: Ranks, way: Way, wrappers: list[nn.parallel.DistributedDataParallel]) -> None:
        self.ranks, self.way, self._wrappers = ranks, way, wrappers
        self.count, self.is_sharded = ranks.count, ranks.is_sharded
        self._has_owners = way.has_owners and ranks.count > 1
        self.stores_apart = way.stores_apart and ranks.count > 1
        self.moves_apart = self.stores_apart
        # Where every rank has all factors, the momenta of sharded parameters are sharded too.
        self.moves_shares = ranks.is_sharded and not self.stores_apart
        self._owners: dict[int, int] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        self._exchange: StatisticsExchange | None = None
        self._reached: set[int] = set()
        """The layers that a batch of any rank has reached so far; the same at all ranks that receive statistics."""

    # ------------------------------------------------------------------ who does what
    def arrange(self, layers: Sequence[FactoredLayer], cost: Callable[[FactoredLayer], float]) -> None:
        """Give each layer an owner; those that have one keep it."""
        if self.count == 1:
            return
        if self._has_owners:
            costs, loads = [cost(layer) for layer in layers], [0.0] * self.count
            for layer, known in zip(layers, costs, strict=True):
                if layer.index in self._owners:
                    loads[self._owners[layer.index]] += known
            new = [(t, c) for t, c in zip(layers, costs, strict=True) if t.index not in self._owners]
            owners = Assignment.balanced([c for _, c in new], self.count, loads).owners
            self._owners |= {t.index: owner for (t, _), owner in zip(new, owners, strict=True)}
        seen = [layer for layer in layers if layer.views]
        self._exchange = StatisticsExchange(self.ranks, seen, [self._owners.get(layer.index) for layer in seen])

    def owner(self, layer: FactoredLayer) -> int:
        """Return the rank that updates a layer's factors; this one, where all do."""
        return self._owners.get(layer.index, self.ranks.rank)

    def is_mine(self, layer: FactoredLayer) -> bool:
        return self.owner(layer) == self.ranks.rank

    def stored_keys(self, layer: FactoredLayer, rule: FactorRule) -> Collection[str]:
        if self.is_mine(layer):
            return rule.shapes(layer)
        shared = self.way.shared_keys(layer, rule)
        return [*shared, "forms"] if shared and "forms" in rule.shapes(layer) else shared

    @property
    def takes_part(self) -> bool:  # type: ignore[override]
        """Whether the pass goes through a wrapper, or is run again for a checkpoint in a backward pass."""
        inside = active_wrapper() is not None or any(hides_forward_pass(wrapper) for wrapper in self._wrappers)
        return inside or not self._wrappers or current_backward_pass() != -1

    # ------------------------------------------------------------------ statistics
    def is_fresh(self, weight: nn.Parameter) -> bool:
        return weight.grad is None and not self.is_sharded  # sharded gradients may be moved where no hook sees it

    def _may_send(self, due: Collection[Tensor]) -> bool:
        """Return whether statistics may leave during a backward pass.

        Under ``no_sync()`` another pass comes before the step. The first statistics wait until ranks agree on units.
        """
        assert self._exchange is not None
        synchronized = all(wrapper.require_backward_grad_sync for wrapper in self._wrappers)
        return synchronized and self._exchange.has_units(due)

    def hand_over(self, collector: StatisticsSource, layer: FactoredLayer, backward_pass: int) -> None:
        """Send a layer's statistics once the backward pass has been through all its uses."""
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.is_new(backward_pass):
            if all(self.is_fresh(other.weight) for other in collector.watched()):
                exchange.forget()
            exchange.begin(backward_pass)
            me, weak = self, weakref.ref(collector)
            at_end_of_backward_pass(lambda: me._end_pass(weak()))
        complete = collector.is_complete(layer)
        if complete and self._may_send(collector.due):
            self._put(collector, layer)
            exchange.send_full(collector.due)

    @torch.no_grad()
    def _end_pass(self, collector: StatisticsSource | None) -> None:
        """Send the rest at the end of a backward pass, unless more passes come before the step."""
        if collector is not None and self._exchange is not None and self._may_send(collector.due):
            for layer in collector.watched():
                self._put(collector, layer)
            self._exchange.send_rest(collector.due)

    def _put(self, collector: StatisticsSource, layer: FactoredLayer) -> None:
        statistics = collector.statistics(layer)
        if self._exchange is not None and statistics is not None:
            self._exchange.put(layer, collector.preconditioner.projection_factors(layer), statistics)
            collector.put_statistics(layer, None)

    def reduce(self, collector: StatisticsSource) -> None:
        exchange = self._exchange
        if exchange is None or not collector.due or collector.is_closed:
            return
        due = [layer for layer in collector.watched() if layer.weight in collector.due]
        exchange.agree_on_units(collector.due, collector.statistics)
        for layer in due:
            self._put(collector, layer)
        sums = exchange.collect(collector.due)
        for layer in due:
            vector = sums.get(layer.index)
            # Where no rank has ever reached a layer, the gradient stands in for statistics. The count of rows tells.
            if vector is not None and (layer.index in self._reached or float(vector[-2]) > 0):
                self._reached.add(layer.index)
                collector.put_statistics(layer, decoded(layer, vector, exchange.units[layer.index], self.count))

    def has_statistics(self, collector: StatisticsSource) -> bool:
        return super().has_statistics(collector) or not (self._exchange is None or self._exchange.is_empty)

    def forget(self) -> None:
        if self._exchange is not None:
            self._exchange.forget()

    # ------------------------------------------------------------------ factors
    def publish(self, preconditioner: FactorStore, layers: Sequence[FactoredLayer]) -> None:
        if not self._has_owners:
            return
        owned: dict[int, list[Tensor]] = {rank: [] for rank in range(self.count)}
        there: list[tuple[FactoredLayer, str, Tensor]] = []
        for layer in layers:
            stack = preconditioner.stack([layer])
            for key in self.way.shared_keys(layer, preconditioner.rule):
                sent = preconditioner.rule.sent(layer, key, stack.get(key))
                owned[self.owner(layer)].append(sent)
                there.append((layer, key, sent))
        self.ranks.share_out(owned, "factors")
        for layer, key, sent in there:
            if not self.is_mine(layer):
                preconditioner.stack([layer]).set(key, preconditioner.rule.received(layer, key, sent))
                preconditioner.rule.forget_products([layer])

    def sum(self, count: Tensor) -> Tensor:
        return self.ranks.sum(count)

    # ------------------------------------------------------------------ gradients and directions
    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [local(tensor) for tensor in tensors]

    def sharded_as(self, tensor: Tensor, like: Tensor) -> Tensor:
        return sharded_as(tensor, like)

    def maximum(self, values: Tensor) -> Tensor:
        return self.ranks.maximum(values) if self.is_sharded else values

    def portions(self, moving: list[Move]) -> list[list[Move]]:
        return portions(moving, lambda move: move.layer.layer.size, PORTION) if self.is_sharded else [moving]

    def gather_gradients(self, layers: Sequence[FactoredLayer]) -> None:
        if self.is_sharded:
            for layer in layers:
                self._gradients[layer.index] = [whole(gradient) for gradient in super().gradients(layer)]

    def drop_gradients(self, layers: Sequence[FactoredLayer]) -> None:
        for layer in layers:
            self._gradients.pop(layer.index, None)

    def gradients(self, layer: FactoredLayer) -> list[Tensor]:
        return self._gradients.get(layer.index) or super().gradients(layer)

    def gather_directions(
        self, moving: list[Move], mine: list[Move], made: list[Part], *numbers: Tensor
    ) -> tuple[list[Part], Tensor]:
        """Send the directions that this rank made, and receive those of the others.

        ``made`` are the parts of the layers ``mine``. Each tensor of ``numbers`` has one number for each of them.
        """
        known = {part.p: part.direction for part in made}
        table = torch.zeros(len(moving), len(numbers), dtype=torch.float32, device=moving[0].layer.weight.device)
        rows = {id(move): row for move, row in zip(mine, torch.stack([n.float() for n in numbers], 1), strict=True)}
        parts: list[Part] = []
        owned: dict[int, list[Tensor]] = {rank: [] for rank in range(self.count)}
        for place, move in enumerate(moving):
            there = owned[self.owner(move.layer)]
            for p, group in move.groups.items():
                if p in known:
                    direction = known[p].to(p.dtype).contiguous()
                else:
                    direction = torch.empty(p.shape, dtype=p.dtype, device=p.device)
                parts.append(Part(p, group, direction, place))
                there.append(direction)
            table[place] = rows.get(id(move), table[place])
            there.append(table[place])
        self.ranks.share_out(owned, "directions")
        return parts, table

    def share(self, parts: list[Part]) -> list[Part]:
        if not self.moves_shares:
            return parts
        return [replace(part, direction=share(part.direction, part.p).contiguous()) for part in parts]

    def gather_shares(self, parts: list[Part]) -> list[Part]:
        return [replace(part, direction=whole(joined(part.direction, part.p))) for part in parts]

    def rms_of_shares(self, parts: list[Part], layers: Sequence[FactoredLayer]) -> Tensor:
        device = parts[0].direction.device
        index = torch.tensor([part.layer for part in parts], device=device)
        norms = torch.stack([torch.linalg.vector_norm(part.direction, dtype=torch.float64) for part in parts])
        sums = torch.zeros(len(layers), dtype=torch.float64, device=device).scatter_add(0, index, norms.square())
        sizes = torch.tensor([layer.layer.size for layer in layers], device=device)
        return (self.ranks.sum_of_shares(sums) / sizes).sqrt()

    def sum_of_shares(self, value: Tensor) -> Tensor:
        return self.ranks.sum_of_shares(value) if self.is_sharded or self.stores_apart else value

    def agrees(self, ok: Tensor) -> Tensor:
        return self.ranks.maximum((~ok).float()) == 0 if self.stores_apart else ok
