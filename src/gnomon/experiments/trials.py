"""Trials: one method with one setting on one problem, recorded as a curve and kept on disk, so that runs resume."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from .files import write_atomically

SOLVED = 1e-6
"""The share of the initial gap at which a problem counts as solved."""


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("gnomon", "torch", "scipy")}


@dataclass
class Curve:
    """How a trial went: the loss at the start and after each iteration, with what had been spent until then."""

    panel: str
    method: str
    settings: dict[str, float]
    seed: int
    shared: bool = False
    """Whether these are the settings that all methods share."""
    minimum: float | None = None
    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """In gradients; a Hessian-vector product counts as two."""
    notes: dict[str, float] = field(default_factory=dict)
    """What else was measured."""
    failure: str | None = None
    versions: dict[str, str] = field(default_factory=lambda: versions())
    """Of what made the curve."""

    @property
    def gaps(self) -> list[float]:
        return [loss - (self.minimum or 0.0) for loss in self.loss]

    @property
    def final(self) -> float:
        """The last loss; infinite where the method failed or left the start's level."""
        last = self.loss[-1] if self.loss else math.inf
        return last if self.failure is None and last <= self.loss[0] else math.inf

    @property
    def seconds_per_iteration(self) -> float:
        return self.seconds[-1] / max(len(self.loss) - 1, 1) if self.seconds else math.nan

    def iterations_to_solve(self) -> float:
        """How many iterations brought the gap to ``SOLVED`` of the initial one; infinite where that is not known."""
        if self.minimum is None or not self.loss:
            return math.inf
        gaps = self.gaps
        return next((float(i) for i, gap in enumerate(gaps) if gap <= SOLVED * gaps[0]), math.inf)


class Recorder:
    """Fills a curve. The clock is the process's CPU time, and stands still while a value is recorded."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self._spent = 0.0
        self._since = time.process_time()

    def __call__(self, loss: float, evaluations: float | None = None) -> None:
        """Note a loss; one that is not finite ends the trial."""
        self._spent += time.process_time() - self._since
        if not math.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        self.curve.loss.append(loss)
        self.curve.seconds.append(float(f"{self._spent:.6g}"))
        if evaluations is not None:
            self.curve.evaluations.append(evaluations)
        self.resume()

    def pause(self) -> None:
        self._spent += time.process_time() - self._since

    def resume(self) -> None:
        self._since = time.process_time()


class _RehearsedError(Exception):
    """Leaves a run that has been going on for long enough."""


class Rehearsal(Recorder):
    """A run of a few iterations: the first use of a factorization in torch takes long, and no method should pay it."""

    def __call__(self, loss: float, evaluations: float | None = None) -> None:
        super().__call__(loss, evaluations)
        if len(self.curve.loss) == 3:
            raise _RehearsedError


@dataclass(frozen=True)
class Trial:
    """What to run: ``run`` is given a recorder."""

    panel: str
    method: str
    settings: dict[str, float]
    seed: int
    sizes: dict[str, Any]
    """Of the problem and the run: what else the curve depends on."""
    run: Callable[[Recorder], None]
    minimum: float | None = None
    shared: bool = False

    def __call__(self) -> Curve:
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
    """Finished trials in a folder, one file each; a trial of other sizes or settings has another name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, trial: Trial) -> Path:
        what = [trial.panel, trial.method, trial.settings, trial.seed, trial.sizes]
        return self.folder / f"{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]}.json"

    def load(self, trial: Trial) -> Curve | None:
        """The curve, or None where there is none that can be read: it is then run again."""
        try:
            curve = Curve(**json.loads(self._path(trial).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        curve.shared = trial.shared  # which settings are shared is a matter of the grid
        return curve

    def save(self, trial: Trial, curve: Curve) -> None:
        write_atomically(self._path(trial), json.dumps(asdict(curve)))


def run_trials(trials: Iterable[Trial], store: Store) -> Iterator[Curve]:
    """The curves, from disk where they are there."""
    for trial in trials:
        curve = store.load(trial)
        if curve is None:
            curve = trial()
            store.save(trial, curve)
        yield curve
