"""``gnomon compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .endings import one_line_errors, stop


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    output: Annotated[Path, typer.Option(metavar="PNG", help="File for the curves.")] = Path("compare.png"),
    last: Annotated[int, typer.Option(min=1, help="A result is the mean over this many last epochs.")] = 10,
    clock: Annotated[
        Literal["wall", "cpu"],
        typer.Option(help="Time for the curves: elapsed time or CPU time, both without evaluation."),
    ] = "wall",
) -> None:
    """Draw runs together, against epochs and against time, and print the table of the paper.

    A result is the mean over the last epochs of a run. Runs that differ only in the seed are one line of the table.

    The table shows their mean and its 95% interval (Student's t). The picture shows their mean and their range.

    The measure is the test error in % for images, and the test loss for text.
    """
    from rich.console import Console

    with one_line_errors():
        from ..training.compare import draw, paper_table, read_runs, run_table

        groups = read_runs(runs, tell=lambda reason: typer.echo(f"Left out: {reason}.", err=True))
        console = Console()
        console.print(paper_table(groups, last))
        console.print(run_table(groups))
        try:
            draw(groups, output, clock)
        except OSError as error:
            stop(f"Error: cannot write --output {output}: {error.strerror or error}; choose another file")
        shorter = " (all of a run that has fewer)" if any(g.epochs < last for g in groups) else ""
        note = f"Means over the last {last} epochs{shorter}"
        note += ", ± half the 95% interval over seeds" if any(len(g.runs) > 1 for g in groups) else ""
        console.print(f"{note}. Curves: {output}", soft_wrap=True, highlight=False)
