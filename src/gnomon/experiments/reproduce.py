"""The paper's figures as named, resumable runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import figures, page
from .files import write_atomically
from .manifold import MIXTURE_SCALES, SPD_SCALES, mixture_trials, spd_trials
from .rosenbrock import FULL, QUICK, rosenbrock_trials
from .trials import SOLVED, Curve, Store, Trial, run_trials, versions

LEGEND = (
    f"iterations, gradients, CPU s: spent until the gap is {SOLVED:g} of the first one, or in all where it is not; a "
    "Hessian-vector product counts as two gradients. off by: the largest distance from the Gaussian submanifold."
)


@dataclass(frozen=True)
class Experiment:
    """A figure of the paper."""

    title: str
    trials: Callable[[bool], Iterator[Trial]]
    scale: Callable[[bool], Any]
    """Sizes and grids, for the record."""
    axes: tuple[str, ...] = ("iterations", "time")


EXPERIMENTS = {
    "metric-nearness": Experiment(
        "Metric nearness (Fig. a)",
        lambda quick: spd_trials("metric-nearness", quick),
        lambda quick: SPD_SCALES["metric-nearness"][quick],
    ),
    "log-det": Experiment(
        "Log-determinant optimization (Fig. b)",
        lambda quick: spd_trials("log-det", quick),
        lambda quick: SPD_SCALES["log-det"][quick],
    ),
    "gmm": Experiment(
        "Maximum likelihood of Gaussian mixtures (Fig. c)", mixture_trials, lambda quick: MIXTURE_SCALES[quick]
    ),
    "rosenbrock": Experiment(
        "Rosenbrock's function with a structured preconditioner (Fig. d)",
        rosenbrock_trials,
        lambda quick: QUICK if quick else FULL,
        axes=("iterations", "evaluations", "time"),
    ),
}


def reproduce(name: str, output: Path, *, quick: bool = False, console: Console | None = None) -> Path:
    """Run what is missing of an experiment and write its results; returns the path of the page."""
    console = console or Console()
    experiment = EXPERIMENTS[name]
    folder = output / name
    configuration = {"name": name, "quick": quick, "scale": asdict(experiment.scale(quick))}
    curves = _run(experiment, Store(folder / "trials"), quick, console)
    results = Results(curves)
    _write_json(folder / "results.json", configuration, results)
    pictures = [folder / f"{axis}.png" for axis in experiment.axes]
    panels = results.panels()
    for axis, picture in zip(experiment.axes, pictures, strict=True):
        # Where a Hessian-vector product meets a plain gradient, costs span orders of magnitude.
        figures.plot(panels, results.shares, axis, picture, "evaluations" in experiment.axes and axis != "iterations")
    sections = [(f"Against {figures.AXES[p.stem][0]}", page.image(p)) for p in pictures]
    console.print(experiment.title, style="bold")
    for title in panels:
        header, rows = results.table(title)
        sections.append((title, page.table(header, rows)))
        console.print(terminal_table(title, header, rows, console.width))
    index = folder / "index.html"
    console.print(LEGEND, soft_wrap=True)
    write_atomically(index, page.page(experiment.title, sections, f"{LEGEND} {_footer(quick)}"))
    console.print(f"Results: {index}\n", soft_wrap=True)
    return index


def _run(experiment: Experiment, store: Store, quick: bool, console: Console) -> list[Curve]:
    trials = list(experiment.trials(quick))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    curves = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(experiment.title, total=len(trials))
        for trial, curve in zip(trials, run_trials(trials, store), strict=True):
            progress.update(bar, advance=1, description=f"{trial.panel}: {trial.method}")
            curves.append(curve)
    return curves


# ---------------------------------------------------------------------- what the curves say
class Results:
    """The curves of an experiment, gathered by panel, method and settings; a group holds one curve a seed."""

    def __init__(self, curves: list[Curve]) -> None:
        self.curves = curves
        panels = list(dict.fromkeys(curve.panel for curve in curves))
        self.minima: dict[tuple[str, int], float] = {}  # of a panel's problem with a seed's data
        for curve in curves:
            key = curve.panel, curve.seed
            self.minima[key] = min(self.minima.get(key, math.inf), _least(curve))
        self._groups: dict[str, list[list[Curve]]] = {}
        for panel in panels:
            groups = self._by_settings(panel)
            shared = [group for group in groups if group[0].shared]
            best = [min(of_method, key=self._rank) for of_method in self._by_method(groups)]
            if shared:
                self._groups[f"{panel}: the same step for all, {_words(shared[0][0].settings)}"] = shared
            self._groups[f"{panel}: each method with its own best settings"] = best

    def _by_settings(self, panel: str) -> list[list[Curve]]:
        groups: dict[tuple[str, str], list[Curve]] = {}
        for curve in self.curves:
            if curve.panel == panel:
                groups.setdefault((curve.method, _words(curve.settings)), []).append(curve)
        return list(groups.values())

    def _by_method(self, groups: list[list[Curve]]) -> list[list[list[Curve]]]:
        methods: dict[str, list[list[Curve]]] = {}
        for group in groups:
            methods.setdefault(group[0].method, []).append(group)
        return list(methods.values())

    def _rank(self, group: list[Curve]) -> tuple[float, float]:
        """The iterations to solve the problem; where that is not reached, the final loss."""
        return _average(group, Curve.iterations_to_solve), _average(group, lambda curve: curve.final)

    def panels(self) -> dict[str, list[Curve]]:
        """Titles to curves."""
        return {title: [curve for group in groups for curve in group] for title, groups in self._groups.items()}

    def shares(self, curve: Curve) -> list[float]:
        """The gaps of a curve as shares of its first one."""
        minimum = self.minima[curve.panel, curve.seed]
        return [(loss - minimum) / (curve.loss[0] - minimum) for loss in curve.loss]

    def table(self, title: str) -> tuple[list[str], list[list[str]]]:
        """A row a method."""
        columns = self._columns(self._groups[title][0][0])
        rows = [[show(group) for show in columns.values()] for group in self._groups[title]]
        return list(columns), rows

    def _columns(self, example: Curve) -> dict[str, Callable[[list[Curve]], str]]:
        """What is worth showing of curves such as this one."""
        columns: dict[str, Callable[[list[Curve]], str]] = {
            "method": lambda group: group[0].method,
            "settings": lambda group: _words(group[0].settings),
            "CPU ms/it.": lambda group: f"{1e3 * _median(group, lambda c: c.seconds_per_iteration):.2f}",
        }
        if example.minimum is not None:
            columns["final gap"] = lambda group: _number(
                _average(group, lambda c: c.final - self.minima[c.panel, c.seed]), "e"
            )
            columns["iterations"] = lambda group: _number(_average(group, Curve.iterations_to_solve), "f")
        else:
            columns["final loss"] = lambda group: _number(_average(group, lambda c: c.final), "g")
            columns["off by"] = lambda group: f"{max(max(c.notes.values(), default=0.0) for c in group):.2g}"
        if example.evaluations:
            columns["gradients"] = lambda group: _number(_average(group, lambda c: self._spent(c, c.evaluations)), "f")
            columns["CPU s"] = lambda group: f"{_average(group, lambda c: self._spent(c, c.seconds)):.2f}"
        return columns

    def _spent(self, curve: Curve, along: list[float]) -> float:
        """What it took to solve the problem, or all that was spent where it was not solved."""
        iterations = curve.iterations_to_solve()
        return along[int(iterations) if math.isfinite(iterations) else -1] if along else math.nan


def _least(curve: Curve) -> float:
    return curve.minimum if curve.minimum is not None else min(curve.loss, default=math.inf)


def _average(group: list[Curve], quantity: Callable[[Curve], float]) -> float:
    return sum(map(quantity, group)) / len(group)


def _median(group: list[Curve], quantity: Callable[[Curve], float]) -> float:
    return statistics.median(map(quantity, group))


def _number(value: float, style: str) -> str:
    return {"e": f"{value:.1e}", "f": f"{value:.0f}", "g": f"{value:.5f}"}[style] if math.isfinite(value) else "-"


def _words(settings: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


# ---------------------------------------------------------------------- output
def _write_json(path: Path, configuration: dict[str, Any], results: Results) -> None:
    data = {
        "configuration": configuration,
        "versions": versions(),
        "minima": [[*key, minimum] for key, minimum in results.minima.items()],
        "tables": {title: results.table(title) for title in results.panels()},
        "curves": [asdict(curve) for curve in results.curves],
    }
    write_atomically(path, json.dumps(data) + "\n")


def _footer(quick: bool) -> str:
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    small = " Small sizes (--quick): they show that everything runs, not the figures." if quick else ""
    return f"{used}; CPU time of the process, one BLAS thread.{small}"


NARROW = 100


WORDS = ("method", "settings")
"""Columns of words, which may break between them."""


def terminal_table(title: str, header: list[str], rows: list[list[str]], width: int) -> Table:
    """On a narrow terminal settings, and columns for which there is no room, are left to the page.

    Half a number is worse than none: headers break between words, numbers do not.
    """
    shown = [i for i, name in enumerate(header) if name != "settings" or width >= NARROW]
    widths = [_least_width(name, [row[i] for row in rows]) for i, name in enumerate(header)]
    while len(shown) > 2 and sum(widths[i] + 3 for i in shown) > width:
        shown.pop()
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for i in shown:
        words = header[i] in WORDS
        table.add_column(fill(header[i], widths[i]), justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        table.add_row(*[row[i] for i in shown], style="bold" if row[0].startswith("ours") else "")
    return table


def _least_width(name: str, cells: list[str]) -> int:
    """Of a column: its longest number or word."""
    return max(map(len, [*name.split(), *(" ".join(cells).split() if name in WORDS else cells)]))
