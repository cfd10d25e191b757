"""The paper's figures as named runs that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common.document import Block, Claim, Document, Drawings, Rows
from ..common.files import write_atomically
from ..common.machine import versions, versions_text
from ..common.progress import Pace, counting_progress
from ..common.tables import terminal_table
from ..common.trials import SOLVED, Store, Trial, run_trials
from . import claims
from .manifold import MIXTURE_SCALES, SPD_SCALES, mixture_trials, spd_trials
from .plots import gap_chart
from .results import Group, Results
from .rosenbrock import FULL, QUICK, rosenbrock_trials

LEGENDS = {
    "iterations": f'Iterations count until the gap is {SOLVED:g} of the first one. A "-" says that it never is.',
    "gradients": "Gradients and CPU s count until then too, or to the end. A Hessian-vector product counts as two "
    "gradients.",
    "off by": '"Off by" is the largest distance from the Gaussian submanifold.',
}
"""What a table's columns mean, by the title of the column."""


@dataclass(frozen=True)
class Experiment:
    """A figure of the paper. ``trials`` and ``scale`` take whether the run is the quick one."""

    title: str
    about: str
    """What is minimized, with the names of sizes in braces."""
    trials: Callable[[bool], Iterator[Trial]]
    scale: Callable[[bool], Any]
    """The sizes and grids, which are written to the results."""
    claim: Callable[[Results], Claim]
    axes: tuple[str, ...] = ("iterations", "time")


EXPERIMENTS = {
    "metric-nearness": Experiment(
        "Metric nearness (Fig. a)",
        "The unknown is a positive-definite matrix of size {k}. The optimum is the inverse of a given matrix, whose "
        "condition number is {condition:g}. Each run has {iterations} iterations.",
        lambda quick: spd_trials("metric-nearness", quick),
        lambda quick: SPD_SCALES["metric-nearness"][quick],
        claims.on_the_manifold,
    ),
    "log-det": Experiment(
        "Log-determinant optimization (Fig. b)",
        "The loss is the trace of the product with a given matrix minus the log-determinant. The optimum is the "
        "inverse of the given matrix, which has size {k} and condition number {condition:g}. Each run has {iterations} "
        "iterations.",
        lambda quick: spd_trials("log-det", quick),
        lambda quick: SPD_SCALES["log-det"][quick],
        claims.on_the_manifold,
    ),
    "gmm": Experiment(
        "Maximum likelihood of Gaussian mixtures (Fig. c)",
        "A mixture of {k} components is fitted to each of {seeds} data sets of {samples:,} points in {d} dimensions, "
        "on the Gaussian submanifold (sub) and on the ambient manifold of augmented matrices. Each run has "
        "{iterations} iterations. Lines are medians over the data sets. Bands reach from the least to the greatest.",
        mixture_trials,
        lambda quick: MIXTURE_SCALES[quick],
        claims.on_the_submanifold,
    ),
    "rosenbrock": Experiment(
        "Rosenbrock's function with a structured preconditioner (Fig. d)",
        "The function of {d} unknowns has two forms: mild, which is quadratic, and chained, the classical one. The "
        "structured preconditioners have a head and a tail of five.",
        rosenbrock_trials,
        lambda quick: QUICK if quick else FULL,
        claims.of_the_preconditioner,
        axes=("iterations", "evaluations", "time"),
    ),
}


def reproduce(name: str, output: Path, *, quick: bool = False, console: Console | None = None) -> Path:
    """Run the missing trials of an experiment and write its results. Return the path of the page.

    The page is also written while trials go on.
    """
    console, folder = console or Console(), output / name
    results = _run(name, folder, quick, console)
    configuration = {"name": name, "quick": quick, "scale": asdict(EXPERIMENTS[name].scale(quick))}
    _write_json(folder / "results.json", configuration, results)
    index = _document(name, results, quick).write(folder, name)
    console.print(EXPERIMENTS[name].title, style="bold")
    for title in results.panels():
        console.print(terminal_table(title, *results.table(title), console.width))
    console.print(_legend(results), soft_wrap=True)
    console.print(f"Results: {index}\n", soft_wrap=True)
    return index


def _run(name: str, folder: Path, quick: bool, console: Console) -> Results:
    """Run the missing trials. Pages of what is finished are written on the way."""
    trials, pace = list(EXPERIMENTS[name].trials(quick)), Pace()
    curves = []
    with counting_progress(console) as progress:
        bar = progress.add_task(EXPERIMENTS[name].title, total=len(trials))
        for trial, curve in zip(trials, run_trials(trials, Store(folder / "trials")), strict=True):
            progress.update(bar, advance=1, description=f"{trial.panel}: {trial.method}")
            curves.append(curve)
            if len(curves) < len(trials) and pace.allows():
                _document(name, Results(curves), quick, of=len(trials)).write(folder, name)
    return Results(curves)


def _document(name: str, results: Results, quick: bool, of: int | None = None) -> Document:
    """Return the page of the results. If these are not all, ``of`` is the number of all runs."""
    experiment = EXPERIMENTS[name]
    small = " With these small sizes (`--quick`) the page shows that everything runs. Its numbers say little."
    document = Document(
        experiment.title,
        experiment.about.format(**asdict(experiment.scale(quick))) + (small if quick else ""),
        footer=f"{_legend(results)} {versions_text()}; CPU time of the process, one BLAS thread.",
        runs=None if of is None else (len(results.curves), of),
    )
    if of is None:
        document.sections.append(("The claim and the runs", [experiment.claim(results)]))
    for title, groups in results.panels().items():
        document.sections.append((_heading(title, name), _blocks(name, results, title, groups)))
    return document


def _legend(results: Results) -> str:
    """Return what the columns of the tables mean."""
    columns = {column for title in results.panels() for column in results.table(title)[0]}
    return " ".join(text for column, text in LEGENDS.items() if column in columns)


def _heading(title: str, name: str) -> str:
    """Return the title of a panel without the name of the page."""
    text = title.removeprefix(f"{name}: ")
    return text[0].upper() + text[1:]


def _blocks(name: str, results: Results, title: str, groups: list[Group]) -> list[Block]:
    """Return the charts of a panel and its table."""
    axes, panel = EXPERIMENTS[name].axes, groups[0][0].panel
    part = panel if panel != name else "same-step" if "same step" in title else "own-best"
    # The costs of methods with and without Hessian-vector products differ by orders of magnitude.
    wide = [axis for axis in axes if "evaluations" in axes and axis != "iterations"]
    charts = {f"{name}-{part}-{axis}": gap_chart(results, groups, axis, axis in wide) for axis in axes}
    optimum = "optimum" if groups[0][0].minimum is not None else "least loss that was found"
    caption = (
        f"The gap to the {optimum}, as a share of the first gap. Where lines coincide, the thinner one is on top. A "
        "dashed line is a variant of the method of that colour."
    )
    lines = next(iter(charts.values())).lines
    return [Drawings(charts, caption, lines), Rows(*results.table(title))]


def _write_json(path: Path, configuration: dict[str, Any], results: Results) -> None:
    data = {
        "configuration": configuration,
        "versions": versions(),
        "minima": [[*key, minimum] for key, minimum in results.minima.items()],
        "tables": {title: results.table(title) for title in results.panels()},
        "curves": [asdict(curve) for curve in results.curves],
    }
    write_atomically(path, json.dumps(data) + "\n")
