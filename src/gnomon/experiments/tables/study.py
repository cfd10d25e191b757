"""The runs of a table: their settings, their order and their results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console

from .. import models
from ..common.progress import counting_progress
from ..common.workers import Workers
from ..training.compare import Clock, RunGroup
from ..training.config import Config, TrainingError, completed
from ..training.optimizers import TITLES
from ..training.trainer import Epoch
from ..training.tune import Search, Trial, for_optimizer, judged, rate_grid
from .runs import Result, Run, Timing, rehearse
from .scales import Scale

RIVALS = ("sgd", "adamw")
"""The optimizers whose time is the budget of a second run of INGD, with fewer epochs."""

ELSEWHERE = {"lion": "pytorch_optimizer", "soap": "pytorch_optimizer"}
"""The optimizers that come from other packages, with those packages."""


def as_trial(result: Result) -> Trial:
    """Return a result as a trial of a search."""
    return judged(result.config, None if result.diverged else result.epochs[-1])


def spent(epoch: Epoch, clock: Clock) -> float:
    """Return the seconds from the start of the run to the end of an epoch."""
    return epoch.cpu_seconds if clock == "cpu" else epoch.seconds


def within(epochs: list[Epoch], seconds: float, clock: Clock) -> list[Epoch]:
    """Return the epochs that ended within a time."""
    return [epoch for epoch in epochs if spent(epoch, clock) <= seconds]


@dataclass(frozen=True)
class Method:
    """The final runs of an optimizer with its best setting."""

    config: Config
    results: list[Result]
    last: int
    """The number of epochs at the end of a run over which its result is the mean."""

    @property
    def optimizer(self) -> str:
        return self.config.optimizer

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return sum(result.diverged for result in self.results)

    @property
    def group(self) -> RunGroup:
        """The runs as ``gnomon compare`` groups them. The group is empty if a run diverged."""
        return RunGroup(self.config, [] if self.diverged else [result.epochs for result in self.results])

    def times(self, clock: Clock) -> list[float]:
        """Return the seconds of the whole run of each seed."""
        return [spent(epochs[-1], clock) for epochs in self.group.runs]

    def seconds(self, clock: Clock) -> float:
        """Return the mean seconds of a whole run."""
        return mean(self.times(clock))

    def scores(self) -> list[float] | None:
        """Return the mean over the last epochs for each seed, or None if a run diverged."""
        return self._scores(self.group.runs)

    def scores_in_time_of(self, other: Method, clock: Clock) -> list[float] | None:
        """Return the scores in the time of another method's whole run with the same seed.

        The result is None if a run diverged or did not finish an epoch in that time.
        """
        if self.diverged or other.diverged:
            return None
        pairs = zip(self.group.runs, other.times(clock), strict=True)
        return self._scores([within(run, seconds, clock) for run, seconds in pairs])

    def _scores(self, runs: list[list[Epoch]]) -> list[float] | None:
        return RunGroup(self.config, runs).scores(self.last) if runs and all(runs) else None


class Study:
    """All runs of a table at a scale, in a folder. The runs of a stage are known when the stage before it has ended."""

    def __init__(self, scale: Scale, folder: Path, data_dir: Path | None = None) -> None:
        self.folder, self.data_dir = folder, None if data_dir is None else str(data_dir)
        self.scale, self.absent = _installed(scale)
        self.tasks = [self._placed(task) for task in self.scale.tasks]
        self._finished: dict[Path, Result] = {}

    def _placed(self, task: Config) -> Config:
        return replace(task, data_dir=self.data_dir)

    @cached_property
    def clock(self) -> Clock:
        """Wall-clock time on a GPU, else CPU time, which depends less on other processes."""
        return "wall" if torch.cuda.is_available() else "cpu"

    def result(self, run: Run) -> Result | None:
        """Return the result of a run, or None if it has not ended. A result is read from the disk once."""
        if run.folder not in self._finished and (found := run.result()) is not None:
            self._finished[run.folder] = found
        return self._finished.get(run.folder)

    def results(self, runs: Iterable[Run]) -> list[Result] | None:
        """Return the results of the runs, or None if one has not ended."""
        found = [self.result(run) for run in runs]
        return None if None in found else [result for result in found if result is not None]

    # ------------------------------------------------------------------ stages
    def trials(self, task: Config, optimizer: str) -> list[Run]:
        """Return the runs of the settings that are tried. There are none if there is only one setting."""
        if self.scale.settings < 2:
            return []
        one = for_optimizer(replace(task, validation=self.scale.validation), optimizer)
        return [
            Run(config, self._folder("trials", config), keep_weights=False)
            for config in rate_grid(one, self.scale.settings)
        ]

    def search(self, task: Config, optimizer: str) -> Search | None:
        """Return the search of an optimizer, or None if it has not ended or has only one setting."""
        runs = self.trials(task, optimizer)
        results = self.results(runs)
        if not runs or results is None:
            return None
        rates = [run.config.lr for run in runs if run.config.lr is not None]
        return Search(optimizer, [as_trial(result) for result in results], {"lr": (min(rates), max(rates))})

    def chosen(self, task: Config, optimizer: str) -> Config | None:
        """Return the best setting, for training on the whole training set and measuring on the test set."""
        if self.scale.settings < 2:
            return completed(for_optimizer(task, optimizer))
        search = self.search(task, optimizer)
        return None if search is None else replace(search.best.config, validation=0.0)

    def finals(self, task: Config, optimizer: str) -> list[Run]:
        """Return the final runs of an optimizer. There are none while its best setting is not known."""
        config = self.chosen(task, optimizer)
        return [] if config is None else self._seeded("runs", config)

    def method(self, task: Config, optimizer: str) -> Method | None:
        """Return the results of the final runs, or None if one has not ended."""
        config, results = self.chosen(task, optimizer), self.results(self.finals(task, optimizer))
        return Method(config, results, self.scale.last) if config is not None and results else None

    def shorter(self, task: Config) -> list[Run]:
        """Return runs of INGD with fewer epochs, so that they take as long as those of the faster rival.

        The schedule is shorter too. There are no such runs if INGD takes no longer than its rivals.
        """
        wanted = [self.method(task, name) for name in ("ingd", *RIVALS) if name in self.scale.optimizers]
        if len(wanted) < 2 or wanted[0] is None or any(one is None or one.diverged for one in wanted):
            return []
        ours, *rivals = [one for one in wanted if one is not None]
        share = min(rival.seconds(self.clock) for rival in rivals) / ours.seconds(self.clock)
        epochs = max(1, int(share * ours.config.epochs))
        if epochs >= ours.config.epochs:
            return []
        return self._seeded("shorter", replace(ours.config, epochs=epochs))

    def in_rivals_time(self, task: Config) -> Method | None:
        """Return the results of the runs with fewer epochs, or None if there are none."""
        runs = self.shorter(task)
        results = self.results(runs)
        return Method(runs[0].config, results, self.scale.last) if results else None

    def cells(self) -> list[Run]:
        """Return the runs of the grid over learning rates and dampings."""
        grid = self.scale.grid
        if grid is None:
            return []
        configs = [
            completed(replace(self._placed(grid.task), optimizer=optimizer, preset=preset, lr=lr, damping=damping))
            for preset in grid.presets
            for optimizer in ("ingd", "kfac")
            for damping in grid.dampings
            for lr in grid.rates
        ]
        return [Run(config, self._folder("grid", config), keep_weights=False) for config in configs]

    def _seeded(self, stage: str, config: Config) -> list[Run]:
        configs = [replace(config, seed=seed) for seed in self.scale.seeds]
        return [Run(config, self._folder(stage, config)) for config in configs]

    def _folder(self, stage: str, config: Config) -> Path:
        parts = [config.optimizer, f"lr{config.lr:g}"]
        parts += [f"damping{config.damping:g}", str(config.preset)] if stage == "grid" else [f"seed{config.seed}"]
        return self.folder / stage / config.model / "-".join(parts)

    # ------------------------------------------------------------------ all stages
    def pairs(self) -> Iterator[tuple[Config, str]]:
        """Yield every task with every optimizer."""
        return ((task, optimizer) for task in self.tasks for optimizer in self.scale.optimizers)

    def left(self) -> list[Run]:
        """Return the runs that have not ended and whose settings are known."""
        known = [run for task, name in self.pairs() for run in self.trials(task, name)]
        known += [run for task, name in self.pairs() for run in self.finals(task, name)]
        known += [run for task in self.tasks for run in self.shorter(task)]
        return [run for run in [*known, *self.cells()] if self.result(run) is None]

    def to_come(self) -> list[Config]:
        """Return the runs whose settings are not known yet, with default settings, which take equally long."""
        waiting = [pair for pair in self.pairs() if self.method(*pair) is None]
        untuned = [for_optimizer(*pair) for pair in waiting if self.chosen(*pair) is None]
        shorter = [for_optimizer(task, name) for task, name in waiting if name == "ingd"]
        return [completed(config) for config in [*untuned, *shorter] for _ in self.scale.seeds]

    @property
    def progress(self) -> tuple[int, int]:
        """The number of runs that have ended, and of all runs."""
        left, to_come = len(self.left()), len(self.to_come())
        return len(self._finished), len(self._finished) + left + to_come

    def finish(self, jobs: int, console: Console, tell: Callable[[], None] = lambda: None) -> None:
        """Do all runs that have not ended, in ``jobs`` processes. ``tell`` is called after some of them."""
        if not self.left():
            return
        with Workers(jobs) as workers:
            self._tell_estimate(workers, console)
            with counting_progress(console) as progress:
                bar = progress.add_task("training runs")
                going: dict[Future[None], Run] = {}
                while runs := self.left():
                    begun = set(going.values())
                    going |= {workers.submit(run.perform): run for run in runs if run not in begun}
                    ended, total = self.progress
                    progress.update(bar, completed=ended, total=total)
                    for future in wait(going, return_when=FIRST_COMPLETED).done:
                        future.result()
                        run = going.pop(future)
                        self._check_ended(run)
                        console.print(self._line(run), highlight=False, soft_wrap=True)
                    tell()

    def _check_ended(self, run: Run) -> None:
        if self.result(run) is None:
            raise TrainingError(f"the run in {run.folder} ended before its last epoch; delete the folder and go on")

    def _line(self, run: Run) -> str:
        """Return a line about a run that has ended."""
        config, result = run.config, self.result(run)
        assert result is not None
        damping = f", damping {config.damping:g}" if config.damping is not None else ""
        measure = "validation" if config.validation else "test"
        if result.diverged:
            ended = "diverged"
        else:
            trial = as_trial(result)
            what = f"loss {trial.value:.3f}" if trial.value == trial.tie else f"error {trial.value:.2f} %"
            ended = f"{measure} {what}"
        where = f"{config.model}, {TITLES[config.optimizer]}"
        return f"{where}, lr {config.lr:g}{damping}, {config.epochs} epochs, seed {config.seed}: {ended}"

    def _tell_estimate(self, workers: Workers, console: Console) -> None:
        """Print an estimate of the time, from two short epochs of each kind of run."""
        configs = [run.config for run in self.left()] + self.to_come()
        times = {kind: workers.submit(rehearse, kind) for kind in dict.fromkeys(map(_kind, configs))}
        found: dict[Config, Timing] = {kind: future.result() for kind, future in times.items()}
        minutes = sum(found[_kind(config)].of(config) for config in configs) / workers.count / 60
        hours = f" ({minutes / 60:.0f} hours)" if minutes > 180 else ""
        console.print(
            f"{len(configs)} training runs in {workers.count} processes: about {minutes:.0f} minutes{hours} on this "
            "machine. They may be interrupted: the same command goes on.",
            highlight=False,
            soft_wrap=True,
        )


def _kind(config: Config) -> Config:
    """Return the settings on which the time of a step depends, with a rate at which no run diverges."""
    return replace(config, lr=1e-6, damping=None, seed=0, validation=0.0, epochs=1)


def _installed(scale: Scale) -> tuple[Scale, list[str]]:
    """Return the scale without the models and optimizers that are not installed, and descriptions of those."""
    missing = [o for o in scale.optimizers if o in ELSEWHERE and importlib.util.find_spec(ELSEWHERE[o]) is None]
    lacking = [task for task in scale.tasks if not models.MODELS[task.model].installed]
    tasks = tuple(task for task in scale.tasks if task not in lacking)
    absent = [f"{TITLES[o]} ({ELSEWHERE[o]} is not installed)" for o in missing]
    absent += [f"{models.MODELS[task.model].title} (timm is not installed)" for task in lacking]
    if not tasks:
        raise TrainingError("no model of this table is installed; pip install 'gnomon[vision]'")
    optimizers = tuple(name for name in scale.optimizers if name not in missing)
    return replace(scale, tasks=tasks, optimizers=optimizers), absent
