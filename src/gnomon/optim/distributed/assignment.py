"""Which of several ranks does what: a fair share for each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """Owners of tasks, and what each rank has to do."""

    owners: tuple[int, ...]
    """The rank of each task, in the order of the costs."""
    loads: tuple[float, ...]
    """The sum of costs of each rank."""

    @classmethod
    def balanced(cls, costs: Sequence[float], ranks: int, loads: Sequence[float] | None = None) -> Assignment:
        """Assign the costliest first, each to the rank with the least load.

        The largest load is at most 4/3 of the best possible one. Among ranks with equal loads the lowest is taken, so
        that every rank finds the same by itself. ``loads`` are what the ranks have to do already.
        """
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        if any(not cost >= 0 for cost in costs):
            raise ValueError(f"costs must be at least 0, got {list(costs)}")
        if loads is not None and len(loads) != ranks:
            raise ValueError(f"loads must have a number for each of the {ranks} ranks, got {list(loads)}")
        owners = [0] * len(costs)
        waiting = [(load, rank) for rank, load in enumerate(loads or [0.0] * ranks)]
        heapq.heapify(waiting)
        for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
            load, rank = waiting[0]
            owners[task] = rank
            heapq.heapreplace(waiting, (load + costs[task], rank))
        return cls(tuple(owners), tuple(load for load, _ in sorted(waiting, key=lambda item: item[1])))
