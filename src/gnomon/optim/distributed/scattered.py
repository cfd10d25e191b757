"""Several ranks that hold parts of each parameter and send the parts of gradients to the owners of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..kronecker.layers.base import FactoredLayer, Move, Part, as_whole
from ..kronecker.strategy import Alone
from .process_group import Purpose, Ranks
from .sharded_tensors import holders_of, local, region, whole
from .together import Together, Way


class Scattered(Together):
    """Ranks that hold parts of parameters. The owner of a layer has its factors and momenta, and makes its steps.

    At each step an owner receives the parts of its layers' gradients, and each rank its part of all directions. With P
    bytes of parameters on R ranks that is 2 P / R for a rank on average.
    """

    def __init__(self, ranks: Ranks, way: Way, wrappers: list[nn.parallel.DistributedDataParallel]) -> None:
        super().__init__(ranks, way, wrappers)
        self._members: set[Tensor] = set()
        self._weights: dict[Tensor, Tensor] = {}
        self._whole: dict[Tensor, Tensor] = {}
        """The whole gradients that this rank has, by parameter."""

    def arrange(self, layers: Sequence[FactoredLayer], cost: Callable[[FactoredLayer], float]) -> None:
        super().arrange(layers, cost)
        self._members = {p for layer in layers for p in layer.layer.parameters}

    def portions(self, moving: list[Move]) -> list[list[Move]]:
        return [moving]  # a rank has the whole gradients of its own layers alone

    # ------------------------------------------------------------------ to owners
    def gather_gradients(self, layers: Sequence[FactoredLayer]) -> None:
        missing = [layer for layer in layers if layer.index not in self._gradients]
        own = [
            pair for layer in missing for pair in zip(layer.layer.parameters, Alone.gradients(self, layer), strict=True)
        ]
        self._whole |= self._at_owners(missing, dict(own), "gradients")
        for layer in missing:  # nothing at ranks that own others: all ranks know what was sent
            self._gradients[layer.index] = [self._whole[p] for p in layer.layer.parameters if p in self._whole]

    def gather_weights(self, layers: Sequence[FactoredLayer]) -> None:
        sources: dict[Tensor, Tensor] = {p: p for layer in layers for p in layer.layer.parameters}
        self._weights = self._at_owners(layers, sources, "weights")

    def drop_gradients(self, layers: Sequence[FactoredLayer]) -> None:
        super().drop_gradients(layers)
        self._weights = {}
        for p in (p for layer in layers for p in layer.layer.parameters):
            self._whole.pop(p, None)

    def _at_owners(
        self, layers: Sequence[FactoredLayer], sources: dict[Tensor, Tensor], purpose: Purpose
    ) -> dict[Tensor, Tensor]:
        """Return the whole tensors of layers that this rank owns, from the parts that ranks have."""
        sent: list[list[Tensor]] = [[] for _ in range(self.count)]
        received: list[list[Tensor]] = [[] for _ in range(self.count)]
        wholes: dict[Tensor, Tensor] = {}
        for layer in layers:
            owner = self.owner(layer)
            for p in layer.layer.parameters:
                source, holders = sources[p], holders_of(p, owner, self.count)
                if self.ranks.rank in holders:
                    sent[owner].append(local(source))
                if owner == self.ranks.rank:
                    wholes[p] = torch.empty(as_whole(p).shape, dtype=source.dtype, device=p.device)
                    for place in holders:
                        received[place].append(wholes[p][region(p, place)])
        self.ranks.exchange(sent, received, purpose)
        return wholes

    def gradients(self, layer: FactoredLayer) -> list[Tensor]:
        return self._gradients[layer.index]

    def zeros_as(self, p: nn.Parameter) -> Tensor:
        return torch.zeros(as_whole(p).shape, dtype=p.dtype, device=p.device)

    def weights(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [self._weights[p] for p in parameters]

    def gradients_at_hand(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [self._whole[p] for p in parameters]

    def sharded_as(self, tensor: Tensor, like: Tensor) -> Tensor:
        return whole(tensor) if like in self._members else super().sharded_as(tensor, like)

    # ------------------------------------------------------------------ from owners
    def gather_directions(
        self, moving: list[Move], mine: list[Move], made: list[Part], *numbers: Tensor
    ) -> tuple[list[Part], Tensor]:
        """Send each rank its parts of the directions that this rank made, and receive those of the others."""
        known = {part.p: part.direction for part in made}
        table = torch.zeros(len(moving), len(numbers), dtype=torch.float32, device=moving[0].layer.weight.device)
        rows = {id(move): row for move, row in zip(mine, torch.stack([n.float() for n in numbers], 1), strict=True)}
        parts: list[Part] = []
        sent: list[list[Tensor]] = [[] for _ in range(self.count)]
        received: list[list[Tensor]] = [[] for _ in range(self.count)]
        for place, move in enumerate(moving):
            owner = self.owner(move.layer)
            for p, group in move.groups.items():
                direction = torch.empty(local(p).shape, dtype=p.dtype, device=p.device)
                parts.append(Part(p, group, direction, place))
                received[owner].append(direction)
                for rank in range(self.count) if p in known else ():
                    sent[rank].append(known[p].to(p.dtype)[region(p, rank)])
            received[owner].append(table[place])
            for rank in range(self.count) if id(move) in rows else ():
                sent[rank].append(rows[id(move)])
        self.ranks.exchange(sent, received, "directions")
        return parts, table

    def sum_of_shares(self, value: Tensor) -> Tensor:
        return self.ranks.sum(value)
