"""Which rank updates and stores the factors of which layer, and when ranks tell each other what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from .assignment import Assignment
from .exchange import Exchange
from .moves import Move, Part, Tracked
from .ranks import Ranks, wrappers_in

Mode = Literal["none", "update", "full"]
MODES: tuple[Mode, ...] = ("none", "update", "full")
"""Every rank updates all factors; each layer's are updated by one and told to all; or stored by that one alone."""


class Sharing:
    """The ranks that train a model together; one alone, as a rule."""

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        self.mode, self.ranks = mode, Ranks.of(model)
        self._wrappers = wrappers_in(model)
        self._owners: dict[int, int] = {}
        self.exchange: Exchange | None = None
        """Of statistics; None where this rank is alone."""

    def notice_wrapper(self, model: nn.Module) -> bool:
        """A wrapper that was put around the model after the optimizer was built shows itself in a forward pass.

        Gives whether there is one that was not known.
        """
        wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
        if wrapper is None or self.ranks.count > 1 or not any(module is model for module in wrapper.modules()):
            return False
        self._wrappers, self.ranks = [wrapper], Ranks.of(wrapper)
        return self.ranks.count > 1

    def arrange(
        self, layers: list[Tracked], cost: Callable[[Tracked], float], dtype: Callable[[Tracked], torch.dtype]
    ) -> None:
        """Give each layer an owner; those that have one keep it."""
        if self.ranks.count == 1:
            return
        if self.mode != "none":
            costs, loads = [cost(tracked) for tracked in layers], [0.0] * self.ranks.count
            for tracked, known in zip(layers, costs, strict=True):
                if tracked.index in self._owners:
                    loads[self._owners[tracked.index]] += known
            new = [(t, c) for t, c in zip(layers, costs, strict=True) if t.index not in self._owners]
            owners = Assignment.balanced([c for _, c in new], self.ranks.count, loads).owners
            self._owners |= {t.index: owner for (t, _), owner in zip(new, owners, strict=True)}
        seen = [tracked for tracked in layers if tracked.views]
        self.exchange = Exchange(self.ranks, seen, [self._owners.get(t.index) for t in seen], dtype)

    # ------------------------------------------------------------------ who does what
    def owner(self, tracked: Tracked) -> int:
        """The rank that updates a layer's factors; this one, where all do."""
        return self._owners.get(tracked.index, self.ranks.rank)

    def is_mine(self, tracked: Tracked) -> bool:
        return self.owner(tracked) == self.ranks.rank

    @property
    def has_owners(self) -> bool:
        """Whether a layer's factors are updated by one rank alone."""
        return self.mode != "none" and self.ranks.count > 1

    @property
    def stores_apart(self) -> bool:
        """Whether they are at one rank alone too."""
        return self.mode == "full" and self.ranks.count > 1

    @property
    def moves_apart(self) -> bool:
        """Whether momenta are where the factors are. Those of parameters that are sharded are sharded too."""
        return self.stores_apart and not self.ranks.is_sharded

    @property
    def sends_now(self) -> bool:
        """Whether a backward pass is followed by a step; under ``no_sync()`` another pass comes before."""
        return all(wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    @property
    def is_passing(self) -> bool:
        """Whether all ranks run this forward pass: through a wrapper, or again for a checkpoint in a backward pass."""
        inside = nn.parallel.DistributedDataParallel._active_ddp_module is not None
        unseen = any(wrapper._use_python_reducer for wrapper in self._wrappers)
        return inside or unseen or not self._wrappers or torch._C._current_graph_task_id() != -1

    # ------------------------------------------------------------------ directions
    def exchanged(
        self, moving: list[Move], mine: list[Move], made: list[Part], *numbers: Tensor
    ) -> tuple[list[Part], Tensor]:
        """The parts of all layers that move, from the ranks that made them, and a row of numbers for each layer.

        ``made`` and ``numbers``, with a number for each, are of this rank's layers.
        """
        known = {part.p: part.direction for part in made}
        device = moving[0].tracked.layer.weight.device
        table = torch.zeros(len(moving), len(numbers), device=device)
        rows = {id(move): row for move, row in zip(mine, torch.stack([n.float() for n in numbers], 1), strict=True)}
        parts: list[Part] = []
        owned: dict[int, list[Tensor]] = {rank: [] for rank in range(self.ranks.count)}
        for place, move in enumerate(moving):
            there = owned[self.owner(move.tracked)]
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
