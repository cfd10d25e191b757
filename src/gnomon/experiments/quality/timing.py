"""The CPU time of an optimizer on a task, beside AdamW's in turns: only such a ratio holds on a busy machine too."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common.files import write_atomically
from .contestants import ADAMW, CONTESTANTS
from .runs import FAILURES, settings_digest, task_of
from .task import Training

TURNS = 20
"""The number of turns of each optimizer."""
ADAMW_SHARE = 4
"""AdamW takes one step for so many of the other's, because its steps all take the same time."""


@dataclass(frozen=True)
class Times:
    """The time of a run of an optimizer until some of its steps, in units of a whole run of AdamW."""

    steps: list[int]
    shares: list[float]

    @property
    def total(self) -> float:
        return self.shares[-1]

    def until(self, step: float) -> float:
        """Return the time until a step, of the run or beyond its end."""
        if step <= self.steps[-1]:
            return float(np.interp(step, [0, *self.steps], [0.0, *self.shares]))
        return self.total + (step - self.steps[-1]) * self._last_pace

    def steps_in(self, share: float) -> int:
        """Return the number of steps that fit in a time, at least 1."""
        if share <= self.total:
            return max(round(float(np.interp(share, [0.0, *self.shares], [0, *self.steps]))), 1)
        return round(self.steps[-1] + (share - self.total) / self._last_pace)

    @property
    def _last_pace(self) -> float:
        """The time of a step in the second half of the run."""
        start = [0, *self.steps][len(self.steps) // 2]
        return (self.total - self.until(start)) / (self.steps[-1] - start)


@dataclass(frozen=True)
class Timing:
    """A run of an optimizer at its usual rate in turns with AdamW. Its result is a JSON file."""

    folder: Path
    task: str
    optimizer: str
    steps: int

    @property
    def path(self) -> Path:
        return self.folder / self.task / self.optimizer / "times.json"

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the result beside the program and the machine."""
        named = {"task": self.task, "optimizer": self.optimizer, "steps": self.steps}
        return {**named, "settings": settings_digest(self.optimizer)}

    def outcome(self) -> Times | None:
        """Return the times, or None if they were not measured yet."""
        try:
            data = json.loads(self.path.read_text())
            return Times(data["marks"], data["shares"]) if data["timing"] == self.identity else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def perform(self) -> None:
        """Train both, and write the times."""
        times = self._measured()
        self.keep(times)

    def keep(self, times: Times) -> None:
        """Write the times, with as many digits as they have in the repository.

        Other runs get their number of steps from them, which must be the same when the times are restored from there.
        """
        shares = [float(f"{share:.4g}") for share in times.shares]
        data = {"timing": self.identity, "marks": times.steps, "shares": shares}
        write_atomically(self.path, json.dumps(data) + "\n")

    def _measured(self) -> Times:
        own, adamw = (self._training(name) for name in (self.optimizer, ADAMW))
        marks = sorted({max(round(turn * self.steps / TURNS), 1) for turn in range(1, TURNS + 1)})
        spent = []
        for mark in marks:
            try:
                own.advance(mark - own.done)
            except FAILURES:  # a run that diverges has the times until then
                break
            adamw.advance(max((mark - adamw.done * ADAMW_SHARE) // ADAMW_SHARE, 1))
            spent.append(own.seconds)
        whole = adamw.seconds / adamw.done * self.steps
        return Times(marks[: len(spent)] or [self.steps], [one / whole for one in spent] or [1.0])

    def _training(self, name: str) -> Training:
        contestant, task = CONTESTANTS[name], copy.copy(task_of(self.task))
        return Training(task, lambda model: contestant.build(model, contestant.usual), self.steps, seed=0)
