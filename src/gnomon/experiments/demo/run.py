"""The run of the demonstration: three experiments, three tables on the terminal, and the report."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..common.files import write_atomically
from ..common.progress import counting_progress
from ..common.tables import titled_table
from ..common.trials import SOLVED
from .matrix import MOMENTA, fit_matrices, matrix_table
from .network import CONTESTANTS, network_table, train_networks
from .posterior import STRUCTURES, fit_posteriors, posterior_table
from .report import report_page
from .scale import Scale, Step


def demo(output: Path, seed: int = 0, scale: Scale | None = None, console: Console | None = None) -> Path:
    """Run the experiments, print their tables and write the report. Return the path of the report."""
    console, scale = console or Console(), scale or Scale()
    _check_writable(output)
    with _progress(console, total=len(CONTESTANTS) * scale.seeds + 2 * len(MOMENTA) + 1 + len(STRUCTURES)) as step:
        networks = train_networks(scale, seed, step)
        matrices = fit_matrices(scale, seed, step)
        posteriors = fit_posteriors(seed, step)
    tables = network_table(networks), matrix_table(matrices), posterior_table(posteriors)
    titles = (
        "One network, four optimizers (squared error of a drawn digit)",
        f"One matrix, two structures (until the gap is {SOLVED:g} of the first)",
        "One posterior, two structures (eight schools)",
    )
    for title, table in zip(titles, tables, strict=True):
        console.print(_terminal_table(title, *table))
    report = output / "report.html"
    write_atomically(report, report_page(networks, matrices, posteriors, *tables))
    console.print(f"Curves, and what they show, for your browser: {report}", soft_wrap=True, highlight=False)
    return report


def _check_writable(folder: Path) -> None:
    """Raise an error before the work if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Step]:
    """Show a progress bar. The function that is given starts the next piece of work."""
    with counting_progress(console) as progress:
        bar = progress.add_task("", total=total, completed=-1)
        yield lambda what: progress.update(bar, advance=1, description=what)


def _terminal_table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    table = titled_table(title)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
