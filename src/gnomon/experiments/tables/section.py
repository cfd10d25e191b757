"""The final runs of one model as tables, data and sentences. Every sentence is computed from the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import mean
from typing import Any

from .. import models
from ..common.confidence import half_interval
from ..common.document import Rows
from ..common.words import listed
from ..training.compare import Clock
from ..training.config import Config
from ..training.optimizers import TITLES
from ..training.tune import Search
from .study import RIVALS, Method, Study


def title_of(optimizer: str) -> str:
    """Return the name of an optimizer in a table. INGD is marked as ours."""
    return f"ours ({TITLES[optimizer]})" if optimizer == "ingd" else TITLES[optimizer]


@dataclass(frozen=True)
class Section:
    """The results of one model."""

    task: Config
    methods: list[Method]
    searches: list[Search]
    shorter: Method | None
    """INGD with fewer epochs, so that it takes as long as the faster of its rivals."""
    study: Study

    @property
    def in_loss(self) -> bool:
        return models.MODELS[self.task.model].size is None

    @property
    def measure(self) -> str:
        return "test loss" if self.in_loss else "test error in %"

    @property
    def unit(self) -> str:
        return "" if self.in_loss else " %"

    @cached_property
    def by_name(self) -> dict[str, Method]:
        return {method.optimizer: method for method in self.methods}

    @property
    def ours(self) -> Method | None:
        return self.by_name.get("ingd")

    @property
    def sound(self) -> list[Method]:
        """The methods without a diverged run."""
        return [method for method in self.methods if not method.diverged]

    def number(self, value: float, signed: bool = False) -> str:
        return f"{value:{'+' if signed else ''}.{3 if self.in_loss else 2}f}"

    def mean_text(self, scores: Sequence[float] | None, signed: bool = False) -> str:
        """Return the mean with its interval."""
        if scores is None:
            return "-"
        half = half_interval(scores)
        return self.number(mean(scores), signed) + ("" if math.isnan(half) else f" ± {self.number(half)}")

    def seconds(self, name: str) -> float:
        return self.by_name[name].seconds(self.study.clock)

    def in_time_of(self, method: Method, name: str) -> list[float] | None:
        return method.scores_in_time_of(self.by_name[name], self.study.clock)

    # ------------------------------------------------------------------ tables
    @property
    def clocks(self) -> list[str]:
        """The optimizers whose time is the budget in a comparison of all methods."""
        return [name for name in (*RIVALS, "ingd") if name in self.by_name and not self.by_name[name].diverged]

    def table(self) -> Rows:
        """Return a table of the results at equal epochs."""
        clock = "CPU s" if self.study.clock == "cpu" else "s"
        header = ["method", "lr", f"{self.measure}, all epochs", "INGD minus it", f"{clock} an epoch"]
        return Rows(header, [self._row(method) for method in self.methods])

    def _row(self, method: Method) -> list[str]:
        row = [title_of(method.optimizer), f"{method.config.lr:g}"]
        if method.diverged:
            return [*row, f"diverged in {method.diverged} of {len(method.results)}", "-", "-"]
        row += [self.mean_text(method.scores()), self.mean_text(self.differences(method), signed=True)]
        return [*row, f"{method.seconds(self.study.clock) / method.config.epochs:.2f}"]

    def table_in_time(self) -> Rows:
        """Return a table of the results at equal time."""
        rows = [
            [title_of(m.optimizer), *(self.mean_text(self.in_time_of(m, name)) for name in self.clocks)]
            for m in self.methods
        ]
        return Rows(["method", *(f"in {TITLES[name]}'s time" for name in self.clocks)], rows)

    def differences(self, method: Method) -> list[float] | None:
        """Return INGD's result minus the result of a method, for each seed."""
        ours, theirs = self.ours and self.ours.scores(), method.scores()
        if not ours or not theirs or method is self.ours:
            return None
        return [a - b for a, b in zip(ours, theirs, strict=True)]

    def tried(self) -> Rows:
        """Return a table of the learning rates that were tried, with their results on the held-out part."""
        header = ["method", f"validation {'loss' if self.in_loss else 'error in %'} at each rate", "chosen"]
        rows = []
        for search in self.searches:
            tried = ", ".join(f"{self.number(t.value)} at {t.config.lr:g}" for t in search.trials)
            at_end = " (an end)" if search.at_edge else ""
            row = [title_of(search.optimizer), tried.replace("inf", "diverged"), f"{search.best.config.lr:g}{at_end}"]
            rows.append(row)
        return Rows(header, rows)

    def settings(self) -> Rows:
        """Return a table of the settings that were not searched."""
        names = ("weight_decay", "momentum", "damping", "update_every", "preset")
        rows = [
            [title_of(m.optimizer), *("" if (v := getattr(m.config, n)) is None else str(v) for n in names)]
            for m in self.methods
        ]
        return Rows(["method", *(name.replace("_", " ") for name in names)], rows)

    # ------------------------------------------------------------------ words
    def findings(self) -> list[str]:
        """Return sentences about the order of the methods."""
        return [*self._at_equal_epochs(), *self._at_equal_time(), *self._at_ends()]

    def _at_equal_epochs(self) -> Iterator[str]:
        lost = [TITLES[method.optimizer] for method in self.methods if method.diverged]
        if lost:
            yield f"Runs of {listed(lost)} diverged with the chosen setting; they are left out of what follows."
        means = {m.optimizer: mean(scores) for m in self.methods if (scores := m.scores()) is not None}
        if "ingd" not in means or len(means) < 2:
            return
        best, ours = min(means, key=lambda name: means[name]), means["ingd"]
        above = [TITLES[n] for n, value in means.items() if n != "ingd" and ours <= value]
        below = [TITLES[n] for n, value in means.items() if value < ours]
        yield (
            f"At equal epochs {TITLES[best]} has the lowest mean, {self.number(means[best])}{self.unit}"
            + ("" if best == "ingd" else f". INGD has {self.number(ours)}{self.unit}")
            + (f", at or below that of {listed(above)}" if above else "")
            + (f"; {listed(below)} {'has' if len(below) == 1 else 'have'} less" if below else "")
            + "."
        )
        sides = {m.optimizer: d for m in self.methods if (d := self.differences(m)) is not None and len(d) > 1}
        clear = [TITLES[n] for n, d in sides.items() if abs(mean(d)) > half_interval(d)]
        if sides:
            rest = [TITLES[n] for n in sides if TITLES[n] not in clear]
            yield (
                f"Over {len(next(iter(sides.values())))} seeds, the 95% interval of the difference to INGD "
                + "; ".join(
                    part
                    for names, part in (
                        (clear, f"leaves out zero for {listed(clear)}"),
                        (rest, f"holds zero for {listed(rest)}"),
                    )
                    if names
                )
                + "."
            )

    def _at_equal_time(self) -> Iterator[str]:
        ours = self.ours
        if ours is None or ours.diverged:
            return
        for name in RIVALS:
            rival = self.by_name.get(name)
            scores = None if rival is None else rival.scores()
            if scores is None:
                continue
            reached = self.in_time_of(ours, name)
            theirs = f"{TITLES[name]}'s {self.number(mean(scores))}{self.unit}"
            if reached is None:
                yield f"When {TITLES[name]} had finished, INGD had not finished an epoch."
            else:
                yield (
                    f"When {TITLES[name]} had finished all its epochs ({self.seconds(name):.0f} s), INGD stood at "
                    f"{self.number(mean(reached))}{self.unit}, {_side(mean(reached), mean(scores))} {theirs}."
                )
            if self.shorter is not None and (short := self.shorter.scores()) is not None:
                yield (
                    f"Runs of INGD planned for that time, of {self.shorter.config.epochs} instead of "
                    f"{ours.config.epochs} epochs, end at {self.mean_text(short)}{self.unit} after "
                    f"{self.shorter.seconds(self.study.clock):.0f} s, {_side(mean(short), mean(scores))} {theirs}."
                )
        if self.shorter is None:
            yield "INGD's whole runs take no longer than those of its rivals, so none were planned for their time."

    def _at_ends(self) -> Iterator[str]:
        ends = [TITLES[search.optimizer] for search in self.searches if search.at_edge]
        if ends:
            yield f"The best learning rate of {listed(ends)} is at an end of the range: a better one may lie beyond."

    # ------------------------------------------------------------------ data
    def as_data(self) -> dict[str, Any]:
        """Return the results for the JSON file."""
        clock = self.study.clock
        return {
            "model": self.task.model,
            "data": self.task.data,
            "measure": self.measure,
            "methods": [
                {
                    **_method_data(method, clock),
                    "in the time of": {name: self.in_time_of(method, name) for name in self.clocks},
                    "INGD minus it": self.differences(method),
                }
                for method in self.methods
            ],
            "INGD in its rivals' time": None if self.shorter is None else _method_data(self.shorter, clock),
            "tried": {
                search.optimizer: [[t.config.lr, None if math.isinf(t.value) else t.value] for t in search.trials]
                for search in self.searches
            },
        }


def _method_data(method: Method, clock: Clock) -> dict[str, Any]:
    scores = method.scores()
    return {
        "optimizer": method.optimizer,
        "settings": _without_place(method.config),
        "scores": scores,
        "mean": None if scores is None else mean(scores),
        "half of the 95% interval": None if scores is None or len(scores) < 2 else half_interval(scores),
        "seconds of a run": None if scores is None else method.seconds(clock),
        "diverged": method.diverged,
        "runs": [[asdict(epoch) for epoch in result.epochs] for result in method.results],
    }


def _without_place(config: Config) -> dict[str, Any]:
    said = asdict(replace(config, data_dir=None))
    return {name: value for name, value in said.items() if value is not None}


def _side(one: float, other: float) -> str:
    return "below" if one < other else "above" if one > other else "equal to"
