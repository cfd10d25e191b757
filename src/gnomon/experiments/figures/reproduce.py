"""The paper's figures as named runs that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common import page
from ..common.files import write_atomically
from ..common.machine import versions, versions_text
from ..common.progress import counting_progress
from ..common.tables import terminal_table
from ..common.trials import SOLVED, Curve, Store, Trial, run_trials
from .manifold import MIXTURE_SCALES, SPD_SCALES, mixture_trials, spd_trials
from .plots import AXES, plot
from .results import Results
from .rosenbrock import FULL, QUICK, rosenbrock_trials

LEGEND = (
    f"iterations, gradients, CPU s: spent until the gap is {SOLVED:g} of the first one, or in all where it is not; a "
    "Hessian-vector product counts as two gradients. off by: the largest distance from the Gaussian submanifold."
)


@dataclass(frozen=True)
class Experiment:
    """A figure of the paper. ``trials`` and ``scale`` take whether the run is the quick one."""

    title: str
    trials: Callable[[bool], Iterator[Trial]]
    scale: Callable[[bool], Any]
    """The sizes and grids, which are written to the results."""
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
    """Run the missing trials of an experiment and write its results. Return the path of the page."""
    console = console or Console()
    experiment = EXPERIMENTS[name]
    folder = output / name
    configuration = {"name": name, "quick": quick, "scale": asdict(experiment.scale(quick))}
    results = Results(_curves(experiment, Store(folder / "trials"), quick, console))
    _write_json(folder / "results.json", configuration, results)
    sections = _draw(experiment, results, folder)
    console.print(experiment.title, style="bold")
    for title in results.panels():
        header, rows = results.table(title)
        sections.append((title, page.table(header, rows)))
        console.print(terminal_table(title, header, rows, console.width))
    index = folder / "index.html"
    console.print(LEGEND, soft_wrap=True)
    write_atomically(index, page.page(experiment.title, sections, f"{LEGEND} {_footer(quick)}"))
    console.print(f"Results: {index}\n", soft_wrap=True)
    return index


def _curves(experiment: Experiment, store: Store, quick: bool, console: Console) -> list[Curve]:
    trials = list(experiment.trials(quick))
    curves = []
    with counting_progress(console) as progress:
        bar = progress.add_task(experiment.title, total=len(trials))
        for trial, curve in zip(trials, run_trials(trials, store), strict=True):
            progress.update(bar, advance=1, description=f"{trial.panel}: {trial.method}")
            curves.append(curve)
    return curves


def _draw(experiment: Experiment, results: Results, folder: Path) -> list[tuple[str, str]]:
    """Draw a picture for each axis. Return the sections of the page that show them."""
    sections = []
    for axis in experiment.axes:
        picture = folder / f"{axis}.png"
        # The costs of methods with and without Hessian-vector products differ by orders of magnitude.
        log_axis = "evaluations" in experiment.axes and axis != "iterations"
        plot(results.panels(), results.shares, axis, picture, log_axis)
        sections.append((f"Against {AXES[axis][0]}", page.image(picture)))
    return sections


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
    small = " Small sizes (--quick): they show that everything runs, not the figures." if quick else ""
    return f"{versions_text()}; CPU time of the process, one BLAS thread.{small}"
