"""The paper's tables as named runs that can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from ..common.files import write_atomically
from ..common.progress import Pace
from ..common.tables import terminal_table
from ..common.workers import default_jobs
from ..data import load
from ..training.config import TrainingError, check_name
from .report import Report
from .scales import TABLES
from .study import Study


def reproduce_table(
    name: str,
    output: Path,
    scale: str = "full",
    *,
    data_dir: Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
) -> Path:
    """Do the missing runs of a table and write its results. Return the path of the page.

    Args:
        name: The name of the table in :data:`~.scales.TABLES`.
        output: The folder in which a folder of that name is made. It contains the runs, ``results.json``,
            ``index.html``, and ``NAME.md`` with its drawings. ``index.html`` is also written while runs go on.
        scale: ``"full"``, ``"small"`` or ``"tiny"``.
        data_dir: The folder of the data's files.
        jobs: The number of parallel processes. The default is one for each core or GPU.
        console: The console that shows progress and tables.
    """
    check_name("table", name, TABLES)
    check_name("scale", scale, TABLES[name])
    if jobs is not None and jobs < 1:
        raise TrainingError(f"jobs must be at least 1, got {jobs}")
    console = console or Console()
    study = Study(TABLES[name][scale], output / name, data_dir)
    for what in study.absent:
        console.print(f"Left out: {what}.", highlight=False, soft_wrap=True)
    for task in study.tasks:
        # Missing data is an error before the first run.
        load(task.data, data_dir, train_limit=task.train_limit, test_limit=task.test_limit)
    pace = Pace()

    def tell() -> None:
        if pace.allows() and study.left():
            Report(name, scale, study).document(study.progress).write(study.folder, name)

    study.finish(jobs or default_jobs(), console, tell)
    return _write(Report(name, scale, study), console)


def _write(report: Report, console: Console) -> Path:
    write_atomically(report.folder / "results.json", json.dumps(report.as_data(), indent=1) + "\n")
    index = report.document().write(report.folder, report.name)
    for section in report.sections:
        for table in (section.table(), section.table_in_time()):
            console.print(terminal_table(report.title, table.header, table.rows, console.width))
        for line in section.findings():
            console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print(f"Results: {index} and {report.name}.md", highlight=False, soft_wrap=True)
    return index
