"""Comparisons of runs: curves against epochs and time, and the paper's table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Literal

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from .. import models
from ..common import palette
from ..common.confidence import half_interval
from ..common.plots import save_png, style_panel
from ..common.svg import DASHES, Chart, Line, plot
from .config import Config, TrainingError
from .folder import CHANGEABLE, RunFolder, differences
from .optimizers import TITLES
from .trainer import Epoch

LAST = 10
"""The number of epochs at the end of a run over which the paper takes means."""

Clock = Literal["wall", "cpu"]

UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
"""The units of the time axis in seconds. The axis has the largest unit that the longest run exceeds."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds."""

    config: Config
    runs: list[list[Epoch]]

    @property
    def task(self) -> tuple[str, str]:
        """The data set and the model."""
        return self.config.data, self.config.model

    @property
    def in_loss(self) -> bool:
        """Whether the measure is the loss, as for text, instead of the error in %."""
        return models.MODELS[self.config.model].size is None

    @property
    def epochs(self) -> int:
        """The number of epochs that all runs have finished."""
        return min(len(run) for run in self.runs)

    def measure(self, epoch: Epoch) -> float:
        """Return the test loss or the test error of an epoch."""
        return epoch.test_loss if self.in_loss else epoch.test_error

    def scores(self, last: int = LAST) -> list[float]:
        """Return the mean measure over the last epochs of each run."""
        return [mean(self.measure(epoch) for epoch in run[-last:]) for run in self.runs]

    def over_runs(self, what: Callable[[Epoch], float]) -> list[list[float]]:
        """Return a quantity of all runs, for each epoch."""
        return [[what(run[i]) for run in self.runs] for i in range(self.epochs)]


def read_runs(folders: Iterable[Path], tell: Callable[[str], None] = lambda text: None) -> list[RunGroup]:
    """Read the runs in these folders. Runs that differ only in the seed form a group.

    What is no run, and runs without a finished epoch, are left out. ``tell`` is told of them, and it is an error if
    nothing is left.
    """
    groups: dict[Config, list[list[Epoch]]] = {}
    left_out = []
    for folder in folders:
        place = RunFolder(folder)
        if not place.exists:
            left_out.append(f"{folder} holds no run")
        elif not (epochs := place.epochs()):
            left_out.append(f"the run in {folder} has not finished an epoch")
        else:
            common = replace(place.config(), **{name: getattr(Config, name) for name in (*CHANGEABLE, "seed")})
            groups.setdefault(common, []).append(epochs)
    if not groups:
        raise TrainingError(f"there is nothing to compare: {'; '.join(left_out)}; give the folders of runs")
    for reason in left_out:
        tell(reason)
    return [RunGroup(config, runs) for config, runs in groups.items()]


def labels(groups: list[RunGroup]) -> list[str]:
    """Return the optimizer of each group, with the settings in which groups of one optimizer and task differ."""
    found = []
    for group in groups:
        rivals = [o for o in groups if o.task == group.task and o.config.optimizer == group.config.optimizer]
        differing = {name for rival in rivals for name, _, _ in differences(group.config, rival.config, set())}
        said = [f"{f.name} {getattr(group.config, f.name)}" for f in fields(Config) if f.name in differing]
        found.append(", ".join([TITLES[group.config.optimizer], *said]))
    return found


# ---------------------------------------------------------------------- tables
def paper_table(groups: list[RunGroup], last: int = LAST) -> Table:
    """Return a table with a row for each data set and method, and a column for each model.

    The best result of each data set and model is bold.
    """
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


def score_text(group: RunGroup, last: int = LAST) -> str:
    """Return the mean over seeds, with its interval if there are several seeds."""
    scores = group.scores(last)
    digits = 3 if group.in_loss else 2
    half = half_interval(scores)
    return f"{mean(scores):.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def run_table(groups: list[RunGroup]) -> Table:
    """Return a table with the learning rate, the length, the best result and the time of each group."""
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
def charts(groups: list[RunGroup], clock: Clock = "wall") -> list[tuple[Chart, Chart]]:
    """Return two charts for each data set and model: against epochs, and against time.

    Lines are means over seeds. Bands reach from the least value to the greatest. Groups of one optimizer have its
    colour and differ in their dashes.
    """
    named = list(zip(groups, labels(groups), strict=True))
    found = []
    for task in dict.fromkeys(group.task for group in groups):
        chosen = [(group, name) for group, name in named if group.task == task]
        longest = max(_seconds(group, clock)[-1] for group, _ in chosen)
        unit = next((name for name, seconds in UNITS.items() if longest >= seconds), "seconds")
        drawn: Counter[str] = Counter()
        by_epoch, by_time = [], []
        for group, name in chosen:
            dashes = DASHES[drawn[group.config.optimizer] % len(DASHES)]
            drawn[group.config.optimizer] += 1
            by_epoch.append(_line(group, [float(n + 1) for n in range(group.epochs)], name, dashes))
            by_time.append(_line(group, [s / UNITS[unit] for s in _seconds(group, clock)], name, dashes))
        data, model = task
        measure = "test loss" if chosen[0][0].in_loss else "test error in %"
        where = f"{models.MODELS[model].title} on {data}"
        time = f"{unit} of training{', CPU time' if clock == 'cpu' else ''}"
        found.append((Chart(where, by_epoch, "epoch", measure, whole=True), Chart(where, by_time, time, measure)))
    return found


def draw(groups: list[RunGroup], path: Path, clock: Clock = "wall") -> None:
    """Draw a row of two panels for each data set and model, see :func:`charts`."""
    rows = charts(groups, clock)
    figure = Figure(figsize=(11, 4.2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
    for pair, row in zip(rows, panels, strict=True):
        for chart, panel in zip(pair, row, strict=True):
            for line in chart.lines:
                plot(panel, line)
            style_panel(panel, chart.x, chart.y, whole=chart.whole)
        row[0].set_title(pair[0].title, fontsize=11, loc="left")
    save_png(figure, path)


def _line(group: RunGroup, x: list[float], name: str, dashes: Sequence[float]) -> Line:
    """Return the mean of a group as a line, and its range as a band."""
    values = group.over_runs(group.measure)
    color, width = palette.of_optimizer(group.config.optimizer), 2.2 if group.config.optimizer == "ingd" else 1.4
    low, high = list(map(min, values)), list(map(max, values))
    return Line(name, color, x, [mean(v) for v in values], low, high, width, dashes)


def _seconds(group: RunGroup, clock: Clock) -> list[float]:
    """Return the mean time at the end of each epoch."""
    values = group.over_runs(lambda epoch: epoch.cpu_seconds if clock == "cpu" else epoch.seconds)
    return [mean(v) for v in values]
