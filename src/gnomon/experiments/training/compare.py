"""Several runs together: curves against epochs and time, and the paper's table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from scipy.stats import t as student

from .. import models
from .config import Config, TrainingError
from .curves import save, style
from .folder import CHANGEABLE, RunFolder, differences
from .optimizers import TITLES
from .trainer import Epoch

LAST = 10
"""The paper's results are means over the last 10 epochs."""

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone."""

    config: Config
    runs: list[list[Epoch]]

    @property
    def task(self) -> tuple[str, str]:
        return self.config.data, self.config.model

    @property
    def in_loss(self) -> bool:
        """Whether the measure is the loss, as for text, and not the error in %."""
        return models.MODELS[self.config.model].size is None

    @property
    def epochs(self) -> int:
        """That all runs have done."""
        return min(len(run) for run in self.runs)

    def measure(self, epoch: Epoch) -> float:
        return epoch.test_loss if self.in_loss else epoch.test_error

    def scores(self, last: int = LAST) -> list[float]:
        """Of each run, the mean over its last epochs."""
        return [mean(self.measure(epoch) for epoch in run[-last:]) for run in self.runs]

    def over_runs(self, what: Callable[[Epoch], float]) -> list[list[float]]:
        """At each epoch, a quantity of all runs."""
        return [[what(run[i]) for run in self.runs] for i in range(self.epochs)]


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean, by Student's t; nan for a single value."""
    if len(values) < 2:
        return math.nan
    return float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def read_runs(folders: Iterable[Path]) -> list[Group]:
    """The runs in these folders, those together that differ in the seed alone."""
    groups: dict[Config, list[list[Epoch]]] = {}
    for folder in folders:
        place = RunFolder(folder)
        config, epochs = place.config(), place.epochs()
        if not epochs:
            raise TrainingError(f"the run in {folder} has not finished an epoch; leave it out, or wait for it")
        common = replace(config, **{name: getattr(Config, name) for name in (*CHANGEABLE, "seed")})
        groups.setdefault(common, []).append(epochs)
    return [Group(config, runs) for config, runs in groups.items()]


def labels(groups: list[Group]) -> list[str]:
    """The optimizer of each group, with the settings in which groups of one optimizer and task differ."""
    found = []
    for group in groups:
        rivals = [o for o in groups if o.task == group.task and o.config.optimizer == group.config.optimizer]
        differing = {name for rival in rivals for name, _, _ in differences(group.config, rival.config, set())}
        said = [f"{f.name} {getattr(group.config, f.name)}" for f in fields(Config) if f.name in differing]
        found.append(", ".join([TITLES[group.config.optimizer], *said]))
    return found


# ---------------------------------------------------------------------- tables
def paper_table(groups: list[Group], last: int = LAST) -> Table:
    """A row for each data set and method, a column for each model; the best of a data set and model is bold."""
    names = labels(groups)
    columns = list(dict.fromkeys(group.config.model for group in groups))
    rows = list(dict.fromkeys((group.config.data, name) for group, name in zip(groups, names, strict=True)))
    cells = {(g.config.data, name, g.config.model): g for g, name in zip(groups, names, strict=True)}
    best = {task: min(mean(g.scores(last)) for g in groups if g.task == task) for task in {g.task for g in groups}}
    table = Table("Dataset", "Method", box=box.SIMPLE)
    for model in columns:
        table.add_column(models.MODELS[model].title, justify="right")
    for data, name in rows:
        line = []
        for model in columns:
            group = cells.get((data, name, model))
            text = "" if group is None else score_text(group, last)
            bold = group is not None and mean(group.scores(last)) == best[group.task]
            line.append(f"[bold]{text}[/bold]" if bold else text)
        table.add_row(data, name, *line)
    return table


def score_text(group: Group, last: int = LAST) -> str:
    """The mean over seeds, and its interval where there are several."""
    scores = group.scores(last)
    digits = 3 if group.in_loss else 2
    half = interval(scores)
    return f"{mean(scores):.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def run_table(groups: list[Group]) -> Table:
    """How each group was trained and what it took."""
    table = Table("Run", box=box.SIMPLE)
    for title in ("lr", "Seeds", "Epochs", "Best", "s/epoch", "CPU s/epoch"):
        table.add_column(title, justify="right")
    for group, name in zip(groups, labels(groups), strict=True):
        wall = mean(run[-1].seconds / len(run) for run in group.runs)
        cpu = mean(run[-1].cpu_seconds / len(run) for run in group.runs)
        done = str(group.epochs) if group.epochs >= group.config.epochs else f"{group.epochs}/{group.config.epochs}"
        best = mean(min(map(group.measure, run)) for run in group.runs)
        table.add_row(
            f"{' '.join(group.task)} {name}",
            f"{group.config.lr:g}",
            str(len(group.runs)),
            done,
            f"{best:.{3 if group.in_loss else 2}f}",
            f"{wall:.2f}",
            f"{cpu:.2f}",
        )
    return table


# ---------------------------------------------------------------------- curves
def draw(groups: list[Group], path: Path, clock: Clock = "wall") -> None:
    """A row of two panels for each data set and model: against epochs, and against time.

    Lines are means over seeds, bands reach from the least to the greatest.
    """
    tasks = list(dict.fromkeys(group.task for group in groups))
    figure = Figure(figsize=(11, 4.2 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    named = list(zip(groups, labels(groups), strict=True))
    for (data, model), (by_epoch, by_time) in zip(tasks, panels, strict=True):
        chosen = [(group, name) for group, name in named if group.task == (data, model)]
        longest = max(_seconds(group, clock)[-1] for group, _ in chosen)
        unit, title = next(
            (u, t) for u, t in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if longest >= u or u == 1
        )
        for i, (group, name) in enumerate(chosen):
            values = group.over_runs(group.measure)
            ours = group.config.optimizer == "ingd"
            look = {"color": f"C{i}", "zorder": 3 if ours else 2}
            for panel, x in (
                (by_epoch, [float(n + 1) for n in range(group.epochs)]),
                (by_time, [seconds / unit for seconds in _seconds(group, clock)]),
            ):
                panel.plot(x, [mean(v) for v in values], label=name, linewidth=2.2 if ours else 1.4, **look)
                panel.fill_between(x, list(map(min, values)), list(map(max, values)), alpha=0.15, linewidth=0, **look)
        measure = "test loss" if chosen[0][0].in_loss else "test error in %"
        style(by_epoch, "epoch", measure)
        style(by_time, f"{title} of training{', CPU time' if clock == 'cpu' else ''}", "")
        by_epoch.set_title(f"{models.MODELS[model].title} on {data}", fontsize=11, loc="left")
    save(figure, path)


def _seconds(group: Group, clock: Clock) -> list[float]:
    values = group.over_runs(lambda epoch: epoch.cpu_seconds if clock == "cpu" else epoch.seconds)
    return [mean(v) for v in values]
