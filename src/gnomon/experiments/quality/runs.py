"""A run of the suite: one optimizer with one learning rate and one seed on one task. Its result is a JSON file."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ..common.files import write_atomically
from ..common.machine import versions
from .contestants import CONTESTANTS
from .suite import TASKS
from .task import Task, train

FAILURES = (ArithmeticError, ValueError, RuntimeError)
"""Errors of optimizers that are results, for example of an eigendecomposition of nan."""


class DivergedError(ArithmeticError):
    """A measure is not finite."""


@dataclass(frozen=True)
class Outcome:
    """What a run has measured. A run that failed has infinite measures."""

    validation: float
    test: float
    seconds: float
    """The CPU time of the steps, without measures."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps, CPU seconds and the validation measure, at even intervals."""
    failure: str | None = None

    def as_data(self) -> dict[str, Any]:
        """Return what a JSON file can hold, which has no infinite numbers."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Outcome:
        measures = {name: math.inf if data[name] is None else data[name] for name in ("validation", "test")}
        curve = [(int(step), float(seconds), float(value)) for step, seconds, value in data["curve"]]
        return cls(**measures, seconds=data["seconds"], curve=curve, failure=data["failure"])


@dataclass(frozen=True)
class Run:
    """A run, and the folder of all runs."""

    folder: Path
    task: str
    optimizer: str
    rate: float
    seed: int
    steps: int
    plan: str = "steps"
    """Why the run has this number of steps: the task's own, or as many as fit in the time of an optimizer."""
    points: int = 20
    """The number of measures of the curve."""

    IDENTITY: ClassVar = ("task", "optimizer", "rate", "seed", "steps", "plan", "settings")
    """What determines the result beside the program."""

    @property
    def path(self) -> Path:
        return self.folder / self.task / self.optimizer / f"{self.plan}-{self.rate:.3g}-{self.seed}.json"

    @property
    def identity(self) -> dict[str, Any]:
        """The values of :attr:`IDENTITY`."""
        named = {name: getattr(self, name) for name in self.IDENTITY[:-1]}
        return {**named, "settings": settings_digest(self.optimizer)}

    def outcome(self) -> Outcome | None:
        """Return the result, or None if there is no readable file of this run with the same settings."""
        try:
            data = json.loads(self.path.read_text())
            return Outcome.from_data(data) if data["run"] == self.identity else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def perform(self) -> None:
        """Train, and write the result."""
        # A copy of the task, because some tasks remember which samples are left of an epoch.
        self.keep(_trained(self, copy.copy(task_of(self.task))))

    def keep(self, outcome: Outcome) -> None:
        """Write a result."""
        data = {"run": self.identity, **outcome.as_data(), "versions": versions()}
        write_atomically(self.path, json.dumps(data) + "\n")


def settings_digest(optimizer: str) -> str:
    """Return a short text that differs where the settings of an optimizer differ."""
    settings = json.dumps(CONTESTANTS[optimizer].settings, sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:12]


def _trained(run: Run, task: Task) -> Outcome:
    """Train a task. An error of the optimizer or a measure that is not finite is a result."""
    contestant = CONTESTANTS[run.optimizer]
    tests: list[float] = []

    def validate(model: nn.Module) -> float:
        return _finite(task.validate(model))

    def measure_test(step: int, model: nn.Module, optimizer: object) -> None:
        if step == run.steps:
            tests.append(_finite(task.evaluate(model)))

    try:
        history = train(
            task,
            lambda model: contestant.build(model, run.rate),
            run.steps,
            run.seed,
            every=max(run.steps // run.points, 1),
            watch=measure_test,
            measure=validate,
        )
    except FAILURES as error:
        return Outcome(math.inf, math.inf, 0.0, failure=f"{type(error).__name__}: {error}".splitlines()[0])
    curve = [(step, history.seconds_at[step], value) for step, value in history.measured.items()]
    return Outcome(history.final, tests[0], history.seconds, curve)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise DivergedError(f"a measure is {value}")
    return value


@functools.cache
def task_of(name: str) -> Task:
    """Return a task. A process reads its data once."""
    return TASKS[name]()
