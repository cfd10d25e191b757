"""Trials: one method with one setting on one problem. Curves are stored on disk, so that runs can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.optim import Optimizer

from .files import write_atomically
from .machine import versions

SOLVED = 1e-6
"""A problem counts as solved when the gap is this share of the initial gap."""


@dataclass
class Curve:
    """The result of a trial: the loss at the start and after each iteration, and what was spent until then."""

    panel: str
    method: str
    settings: dict[str, float]
    seed: int
    shared: bool = False
    """Whether all methods share these settings."""
    minimum: float | None = None
    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """The cost in gradients. A Hessian-vector product counts as two gradients."""
    notes: dict[str, float] = field(default_factory=dict)
    """Other measurements."""
    failure: str | None = None
    versions: dict[str, str] = field(default_factory=lambda: versions())
    """The versions of the packages that made the curve."""

    @property
    def gaps(self) -> list[float]:
        """The differences between the losses and the minimum."""
        return [loss - (self.minimum or 0.0) for loss in self.loss]

    @property
    def final(self) -> float:
        """The last loss. It is infinite if the method failed or ended above the loss at the start."""
        last = self.loss[-1] if self.loss else math.inf
        return last if self.failure is None and last <= self.loss[0] else math.inf

    @property
    def seconds_per_iteration(self) -> float:
        """The mean CPU seconds of an iteration."""
        return self.seconds[-1] / max(len(self.loss) - 1, 1) if self.seconds else math.nan

    def iterations_to_solve(self) -> float:
        """Return how many iterations reduce the gap to ``SOLVED`` of the initial gap.

        The number is infinite if no iteration does, or if the minimum is not known.
        """
        if self.minimum is None or not self.loss:
            return math.inf
        gaps = self.gaps
        return next((float(i) for i, gap in enumerate(gaps) if gap <= SOLVED * gaps[0]), math.inf)


class Recorder:
    """Fills a curve. The clock is the process's CPU time. It is stopped while a value is recorded."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self._spent = 0.0
        self._since = time.process_time()

    def __call__(self, loss: float, evaluations: float | None = None) -> None:
        """Record a loss. A loss that is not finite ends the trial."""
        self._spent += time.process_time() - self._since
        if not math.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        self.curve.loss.append(loss)
        self.curve.seconds.append(float(f"{self._spent:.6g}"))
        if evaluations is not None:
            self.curve.evaluations.append(evaluations)
        self.resume()

    def pause(self) -> None:
        """Stop the clock."""
        self._spent += time.process_time() - self._since

    def resume(self) -> None:
        """Start the clock again."""
        self._since = time.process_time()


class _RehearsedError(Exception):
    """Ends a rehearsal."""


class Rehearsal(Recorder):
    """Ends a run after a few iterations.

    The first use of a factorization in torch takes long. The rehearsal keeps that time out of the measured run.
    """

    def __call__(self, loss: float, evaluations: float | None = None) -> None:
        super().__call__(loss, evaluations)
        if len(self.curve.loss) == 3:
            raise _RehearsedError


@dataclass(frozen=True)
class Trial:
    """A method with a setting on a problem. ``run`` takes the recorder."""

    panel: str
    method: str
    settings: dict[str, float]
    seed: int
    sizes: dict[str, Any]
    """The sizes of the problem and of the run, on which the curve depends too."""
    run: Callable[[Recorder], None]
    minimum: float | None = None
    shared: bool = False

    def __call__(self) -> Curve:
        """Run the method, after a rehearsal, and return its curve."""
        for recorder in (Rehearsal, Recorder):
            curve = Curve(self.panel, self.method, self.settings, self.seed, self.shared, self.minimum)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    self.run(recorder(curve))
            except _RehearsedError:
                continue
            except (FloatingPointError, ValueError, LinAlgError) as error:
                curve.failure = str(error)  # a method that diverges is a result
        return curve


class Store:
    """Finished trials in a folder, one file each. The name of the file depends on the sizes and the settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, trial: Trial) -> Path:
        what = [trial.panel, trial.method, trial.settings, trial.seed, trial.sizes]
        return self.folder / f"{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]}.json"

    def load(self, trial: Trial) -> Curve | None:
        """Return the curve, or None if there is no readable file. The trial is then run again."""
        try:
            curve = Curve(**json.loads(self._path(trial).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        curve.shared = trial.shared  # the grid decides which settings are shared
        return curve

    def save(self, trial: Trial, curve: Curve) -> None:
        """Write the curve of a trial."""
        write_atomically(self._path(trial), json.dumps(asdict(curve)))


def run_trials(trials: Iterable[Trial], store: Store) -> Iterator[Curve]:
    """Yield the curves. Trials that are on disk are not run again."""
    for trial in trials:
        curve = store.load(trial)
        if curve is None:
            curve = trial()
            store.save(trial, curve)
        yield curve


def descend(
    loss: Callable[[], Tensor], optimizers: list[Optimizer], iterations: int, record: Recorder, watch: Callable[[], Any]
) -> None:
    """Run a plain training loop. ``watch`` is called after each iteration, while the clock is stopped."""
    for _ in range(iterations):
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss()
        value.backward()
        record(value.item())
        for optimizer in optimizers:
            optimizer.step()
        record.pause()
        watch()
        record.resume()
    with torch.no_grad():
        record(loss().item())
