"""The runs of the suite: their order, their results, and the choice of a learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ..common.progress import counting_progress
from ..common.workers import Workers
from .contestants import ADAMW, CONTESTANTS, MUON
from .runs import Outcome, Run
from .timing import Times, Timing

CHOICE_SEED = 0
"""The seed of the runs by which a learning rate is chosen."""


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    name: str
    share: float = 1.0
    """The share of a task's steps."""
    steps: int | None = None
    """The steps of every task, if they are not a share of its own."""
    rates: tuple[int, ...] = (0, 1, 2, 3)
    """The places of the rates that are tried, among those of an optimizer."""
    seeds: int = 3
    """The number of further seeds, from 1 on."""
    points: int = 20
    """The number of measures of a curve."""
    references: tuple[str, ...] = (ADAMW, MUON)
    """The optimizers in whose time the others run too."""
    shares: tuple[float, ...] = (0.25, 0.5)
    """The shares of AdamW's time for which shorter runs of the others are planned."""
    around: tuple[float, ...] = (0.5, 2.0)
    """The multiples of the best rate with which all further seeds run too, as they do with the usual rate."""

    def steps_of(self, own: int) -> int:
        """Return the steps of a task that has ``own`` steps."""
        return self.steps or max(round(self.share * own), 1)


FULL = Scale("full")
QUICK = Scale("quick", share=0.1, rates=(1, 2), seeds=1, points=5, references=(ADAMW,), shares=(), around=())


@dataclass
class Study:
    """All runs of some optimizers on some tasks. The runs of a stage are known when the stage before it has ended."""

    folder: Path
    tasks: dict[str, int]
    """The tasks, with the steps of each."""
    optimizers: list[str]
    scale: Scale
    _finished: dict[Run, Outcome] = field(default_factory=dict)
    _times: dict[tuple[str, str], Times] = field(default_factory=dict)

    def outcome(self, run: Run) -> Outcome | None:
        """Return the result of a run, or None if it has not ended. A result is read from the disk once."""
        if run not in self._finished and (found := run.outcome()) is not None:
            self._finished[run] = found
        return self._finished.get(run)

    def outcomes(self, runs: Iterable[Run]) -> list[Outcome] | None:
        """Return the results of the runs, or None if there are none or one has not ended."""
        found = [self.outcome(run) for run in runs]
        return [one for one in found if one is not None] if found and None not in found else None

    # ------------------------------------------------------------------ stages
    def tried(self, task: str, optimizer: str) -> dict[float, Run]:
        """Return the runs by which the learning rate is chosen, by their rates."""
        rates = CONTESTANTS[optimizer].rates
        return {rates[i]: self._run(task, optimizer, rates[i], CHOICE_SEED) for i in self.scale.rates}

    def chosen_rate(self, task: str, optimizer: str) -> float | None:
        """Return the rate with the lowest validation measure, or None while a run is missing."""
        runs = self.tried(task, optimizer)
        found = self.outcomes(runs.values())
        if found is None:
            return None
        return min(zip(runs, found, strict=True), key=lambda pair: pair[1].validation)[0]

    def finals(self, task: str, optimizer: str) -> list[Run]:
        """Return the runs of the further seeds at the chosen rate. There are none while it is not known."""
        rate = self.chosen_rate(task, optimizer)
        return [] if rate is None else self._at(rate, task, optimizer)

    def others(self, task: str, optimizer: str) -> dict[float, list[Run]]:
        """Return the runs of the further seeds at rates beside the chosen one, by these rates.

        The rates are multiples of the chosen one, and the optimizer's usual one.
        """
        best = self.chosen_rate(task, optimizer)
        if best is None or not self.scale.around:
            return {}
        rates = {factor * best for factor in self.scale.around} | {CONTESTANTS[optimizer].usual}
        return {rate: self._at(rate, task, optimizer) for rate in sorted(rates - {best})}

    def _at(self, rate: float, task: str, optimizer: str) -> list[Run]:
        return [self._run(task, optimizer, rate, seed) for seed in self._seeds]

    def final_outcomes(self, task: str, optimizer: str) -> list[Outcome] | None:
        return self.outcomes(self.finals(task, optimizer))

    def in_time_of(self, reference: str, task: str, optimizer: str, share: float = 1.0) -> list[Run]:
        """Return runs with as many steps as fit in a share of the CPU time of another optimizer's runs.

        The schedule is planned for these steps. There are no such runs if one of the two optimizers failed.
        """
        own, other = self.final_outcomes(task, optimizer), self.final_outcomes(task, reference)
        rate, pace, budget = self.chosen_rate(task, optimizer), self.times(task, optimizer), self.times(task, reference)
        if own is None or other is None or rate is None or any(one.failure for one in (*own, *other)):
            return []
        if pace is None or budget is None:
            return []
        steps = pace.steps_in(share * budget.total)
        plan = f"{reference}-time" if share == 1 else f"{share:g}-{reference}-time"
        return [self._run(task, optimizer, rate, seed, steps, plan) for seed in self._seeds]

    def outcomes_in_time_of(self, reference: str, task: str, optimizer: str) -> list[Outcome] | None:
        """Return the results at equal time. Those of the reference itself are its own."""
        if optimizer == reference:
            return self.final_outcomes(task, optimizer)
        return self.outcomes(self.in_time_of(reference, task, optimizer))

    def by_time(self, task: str, optimizer: str) -> dict[float, list[Outcome]]:
        """Return the results of runs that are planned for a time, by that time in units of AdamW's, the least first.

        They are those for shares of AdamW's time and for the whole of it, and those with the task's own steps.
        """
        found = {share: self.outcomes(self.in_time_of(ADAMW, task, optimizer, share)) for share in self.shares}
        found[1.0] = self.outcomes_in_time_of(ADAMW, task, optimizer)
        if (times := self.times(task, optimizer)) is not None:
            found.setdefault(times.total, self.final_outcomes(task, optimizer))
        return {time: found[time] or [] for time in sorted(found) if found[time]}

    def timing(self, task: str, optimizer: str) -> Timing:
        """Return the measurement of an optimizer's time."""
        return Timing(self.folder, task, optimizer, self.tasks[task])

    def times(self, task: str, optimizer: str) -> Times | None:
        """Return the times of a run, or None if they were not measured yet. AdamW's are the unit."""
        if optimizer == ADAMW:
            return Times([self.tasks[task]], [1.0])
        key = task, optimizer
        if key not in self._times and (found := self.timing(task, optimizer).outcome()) is not None:
            self._times[key] = found
        return self._times.get(key)

    @property
    def references(self) -> list[str]:
        """The optimizers in whose time the others run too."""
        return [name for name in self.scale.references if name in self.optimizers]

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of AdamW's time for which shorter runs are planned."""
        return self.scale.shares if ADAMW in self.optimizers else ()

    @property
    def _seeds(self) -> range:
        return range(1, self.scale.seeds + 1)

    def _run(
        self, task: str, optimizer: str, rate: float, seed: int, steps: int | None = None, plan: str = "steps"
    ) -> Run:
        steps = self.tasks[task] if steps is None else steps
        return Run(self.folder, task, optimizer, rate, seed, steps, plan, self.scale.points)

    # ------------------------------------------------------------------ all stages
    def known(self) -> Iterator[Run]:
        """Yield the runs whose settings are known, task by task."""
        pairs = [(task, optimizer) for task in self.tasks for optimizer in self.optimizers]
        for pair in pairs:
            yield from self.tried(*pair).values()
        for pair in pairs:
            yield from self.finals(*pair)
        for reference in self.references:
            for task, optimizer in pairs:
                if optimizer != reference:
                    yield from self.in_time_of(reference, task, optimizer)
        for share in self.shares:
            for task, optimizer in pairs:
                if optimizer != ADAMW:
                    yield from self.in_time_of(ADAMW, task, optimizer, share)
        for pair in pairs:
            for runs in self.others(*pair).values():
                yield from runs

    def left(self) -> list[Run | Timing]:
        """Return the runs and timings that have not ended and whose settings are known."""
        pairs = [(task, optimizer) for task in self.tasks for optimizer in self.optimizers]
        timings = [self.timing(*pair) for pair in pairs if self.times(*pair) is None]
        return [*timings, *(run for run in self.known() if self.outcome(run) is None)]

    @property
    def size(self) -> int:
        """The number of all runs, of the known ones and of those to come.

        While the best rate is not known, the usual one is taken to be among its multiples.
        """
        rates = len(self.optimizers) * len(self.scale.rates)
        plans = len(self.optimizers) + (len(self.references) + len(self.shares)) * (len(self.optimizers) - 1)
        pairs = [(task, optimizer) for task in self.tasks for optimizer in self.optimizers]
        others = sum(len(self.others(*pair)) or len(self.scale.around) for pair in pairs)
        return len(self.tasks) * (rates + self.scale.seeds * plans) + self.scale.seeds * others

    def finish(self, workers: int, console: Console) -> None:
        """Do all runs that have not ended, in parallel processes. Each run is kept when it ends."""
        if not self.left():
            return
        with Workers(workers) as pool, counting_progress(console) as progress:
            bar = progress.add_task("runs", total=self.size)
            going: dict[Future[None], Run | Timing] = {}
            while runs := self.left():
                begun = set(going.values())
                going |= {pool.submit(run.perform): run for run in runs if run not in begun}
                progress.update(bar, completed=len(self._finished))
                for future in wait(going, return_when=FIRST_COMPLETED).done:
                    future.result()
                    console.print(self._line(going.pop(future)), highlight=False, soft_wrap=True)

    def _line(self, run: Run | Timing) -> str:
        """Return a line about a run that has ended."""
        if isinstance(run, Timing):
            times = self.times(run.task, run.optimizer)
            assert times is not None, f"{run.path} was not written"
            return f"{run.task}, {CONTESTANTS[run.optimizer].title}: {times.total:.2f} times AdamW's time"
        outcome = self.outcome(run)
        assert outcome is not None, f"{run.path} was not written"
        ended = outcome.failure or f"{outcome.test:.4g} in {outcome.seconds:.1f} s"
        where = f"{run.task}, {CONTESTANTS[run.optimizer].title}, rate {run.rate:.3g}, seed {run.seed}"
        return f"{where}, {run.steps} steps ({run.plan}): {ended}"
