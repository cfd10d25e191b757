"""The run of ``gnomon bench quality``: the runs that are missing, then the tables, the page and the picture."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common.files import write_atomically
from ..common.machine import versions
from ..data import DataError
from ..training.config import TrainingError, check_name
from .contestants import CONTESTANTS
from .picture import draw
from .report import Report
from .runs import Outcome, Run, settings_digest
from .study import FULL, QUICK, Scale, Study
from .suite import TASKS
from .timing import Times

REPOSITORY = {"json": Path("benchmarks/quality.json"), "page": Path("docs/results/quality.md")}
"""Where results that are to be cited are kept. The picture is beside the page."""


def bench_quality(
    output: Path,
    *,
    tasks: Collection[str] = (),
    optimizers: Collection[str] = (),
    quick: bool = False,
    seeds: int | None = None,
    steps: int | None = None,
    workers: int = 2,
    write: bool = False,
    console: Console | None = None,
) -> Report:
    """Do the missing runs of the suite, print the tables and write the results. Return the report.

    Ctrl-C ends the runs. The tables and results then show the runs that have ended.

    Args:
        output: The folder in which each scale has a folder of runs, ``quality.md`` with its pictures, and
            ``quality.json``.
        tasks: The names of tasks; all if there are none.
        optimizers: The names of optimizers; all if there are none.
        quick: Whether runs are short, with fewer rates and seeds.
        seeds: The number of further seeds, if it is not the scale's.
        steps: The number of steps of each run, if it is not the task's.
        workers: The number of parallel processes.
        write: Whether the results are also written to the repository in the working directory.
        console: The console that shows progress and tables.
    """
    console = console or Console()
    for what, names, known in (("task", tasks, TASKS), ("optimizer", optimizers, CONTESTANTS)):
        for name in names:
            check_name(what, name, known)
    if write:
        _check_repository()
    scale = scale_of(quick, seeds, steps)
    found, measures = _loaded([name for name in TASKS if not tasks or name in tasks], scale, console)
    chosen = _installed([name for name in CONTESTANTS if not optimizers or name in optimizers], console)
    study = Study(output / scale.name, found, chosen, scale)
    restore(study, REPOSITORY["json"])
    try:
        study.finish(workers, console)
    except KeyboardInterrupt:
        _publish(study, measures, write, console)
        raise
    return _publish(study, measures, write, console)


def _publish(study: Study, measures: dict[str, str], write: bool, console: Console) -> Report:
    """Print the tables of the runs that have ended, and write the results."""
    report = Report(study, measures)
    for section in report.sections:
        console.print(section.terminal())
    for line in report.failures:
        console.print(f"failed: {line}", highlight=False, markup=False, soft_wrap=True)
    _write(report, study.folder / "quality.json", study.folder / "quality.md")
    if write:
        _write(report, REPOSITORY["json"], REPOSITORY["page"])
    console.print(f"Results: {study.folder / 'quality.md'} with its pictures, and quality.json", soft_wrap=True)
    return report


def scale_of(quick: bool, seeds: int | None, steps: int | None) -> Scale:
    """Return the scale that options ask for. Runs with another number of steps have a folder of their own."""
    scale = QUICK if quick else FULL
    if steps is not None:
        scale = replace(scale, name=f"{scale.name}-{steps}-steps", steps=steps)
    return scale if seeds is None else replace(scale, seeds=seeds)


def _loaded(names: list[str], scale: Scale, console: Console) -> tuple[dict[str, int], dict[str, str]]:
    """Return the steps and the measures of the tasks whose data are on this machine."""
    steps, measures = {}, {}
    for name in names:
        try:
            task = TASKS[name]()
        except DataError as error:
            console.print(f"Left out: {name}: {error}", highlight=False, markup=False, soft_wrap=True)
            continue
        steps[name], measures[name] = scale.steps_of(task.steps), task.measure
    if not steps:
        raise TrainingError("no task is left, because their data are missing; choose others with --tasks")
    return steps, measures


def _installed(names: list[str], console: Console) -> list[str]:
    """Return the optimizers whose packages are installed."""
    missing = [name for name in names if not CONTESTANTS[name].installed]
    for name in missing:
        console.print(f"Left out: {CONTESTANTS[name].title} ({CONTESTANTS[name].package} is not installed).")
    if len(missing) == len(names):
        raise TrainingError("no optimizer is left; pip install pytorch-optimizer, or choose others with --optimizers")
    return [name for name in names if name not in missing]


# ---------------------------------------------------------------------- files
def _check_repository() -> None:
    """Raise before the work if the folders of results are not in the working directory."""
    for path in REPOSITORY.values():
        if not path.parent.is_dir():
            raise TrainingError(f"--write needs the folder {path.parent}; run the command in gnomon's repository")


def _write(report: Report, data: Path, page: Path) -> None:
    write_atomically(data, compact(report))
    draw(report, page.parent)
    write_atomically(page, report.markdown())


def compact(report: Report) -> str:
    """Return all runs that have ended as JSON with a line for each. Those at the best rate have a curve."""
    study = report.study
    drawn = {run for task in study.tasks for optimizer in study.optimizers for run in study.finals(task, optimizer)}
    pairs = [(run, study.outcome(run)) for run in study.known()]
    lines = ",\n".join(json.dumps(_entry(run, outcome, run in drawn)) for run, outcome in pairs if outcome is not None)
    about = {
        "scale": study.scale.name,
        "versions": versions(),
        "measures": report.measures,
        "steps": study.tasks,
        "times": [
            [task, optimizer, settings_digest(optimizer), times.steps, times.shares]
            for task in study.tasks
            for optimizer in study.optimizers
            if (times := study.times(task, optimizer)) is not None
        ],
    }
    return json.dumps(about)[:-1] + f',\n"runs": [\n{lines}\n]}}\n'


def restore(study: Study, kept: Path) -> None:
    """Take the results in a file of the repository as runs that have ended, where the folder of the study lacks them.

    Runs whose settings have changed since do not match and are done anew.
    """
    if not kept.is_file():
        return
    data = json.loads(kept.read_text())
    if data["scale"] != study.scale.name:
        return
    known = {json.dumps([entry[name] for name in Run.IDENTITY]): entry for entry in data["runs"]}
    for task, optimizer, settings, steps, shares in data["times"]:
        is_ours = task in study.tasks and optimizer in study.optimizers and settings == settings_digest(optimizer)
        if is_ours and study.times(task, optimizer) is None:
            study.timing(task, optimizer).keep(Times(steps, shares))
    count = -1
    while count != (count := len(known)):  # the settings of a stage are known when the stage before it has ended
        for run in list(study.known()):
            entry = known.pop(json.dumps([run.identity[name] for name in Run.IDENTITY]), None)
            if entry is not None and study.outcome(run) is None:
                run.keep(Outcome.from_data(entry))


def _entry(run: Run, outcome: Outcome, has_curve: bool) -> dict[str, Any]:
    curve = [[_rounded(number) for number in point] for point in outcome.curve] if has_curve else []
    return {**run.identity, **outcome.as_data(), "curve": curve}


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")
