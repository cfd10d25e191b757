"""``gnomon bench quality``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from .endings import KEPT, one_line_errors, stop


def names_of_tasks() -> list[str]:
    from ..quality.suite import TASKS

    return list(TASKS)


def names_of_contestants() -> list[str]:
    from ..quality.contestants import CONTESTANTS

    return list(CONTESTANTS)


Tasks = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Tasks, separated by commas, such as 'magic,gpt'.",
        show_default="all",
        autocompletion=names_of_tasks,
    ),
]
Optimizers = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="adamw, soap, muon, kfac, ingd-paper, ingd-before or ingd, separated by commas.",
        show_default="all",
        autocompletion=names_of_contestants,
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Short runs, two rates and one further seed. Takes about ten minutes.")
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Number of seeds for the best rate.", show_default="3, quick 1")]
Steps = Annotated[int | None, typer.Option(min=1, help="Number of steps of every run.", show_default="by task")]
Workers = Annotated[int, typer.Option(min=1, metavar="N", help="Runs at a time. Each is a process with one thread.")]
Output = Annotated[Path, typer.Option(help="Folder for the runs and the results.")]
Write = Annotated[
    bool,
    typer.Option("--write", help="Also write benchmarks/quality.json and docs/results/quality.md with its picture."),
]


def quality(
    tasks: Tasks = "",
    optimizers: Optimizers = "",
    quick: Quick = False,
    seeds: Seeds = None,
    steps: Steps = None,
    workers: Workers = 2,
    output: Output = Path("bench/quality"),
    write: Write = False,
) -> None:
    """Compare the results of optimizers on thirteen different training tasks, at equal steps and at equal time.

    Each optimizer has four learning rates. The best one on validation data is trained with three further seeds.

    A task is left out if its data are missing. GNOMON_DATA is the folder of the data.

    The command writes a file for each run, quality.md with its pictures and quality.json into OUTPUT/full or
    OUTPUT/quick.

    All tasks with all optimizers take several hours. The same command continues after an interruption.

    Ctrl-C shows and writes the results of the runs that have ended.
    """
    with one_line_errors():
        from ..training.ranks import check_alone

        check_alone("gnomon bench quality")
        from ..quality.run import bench_quality

        try:
            bench_quality(
                output,
                tasks=_names(tasks),
                optimizers=_names(optimizers),
                quick=quick,
                seeds=seeds,
                steps=steps,
                workers=workers,
                write=write,
            )
        except KeyboardInterrupt as interrupt:
            typer.echo(KEPT, err=True)
            raise typer.Exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)) from None
        except OSError as error:
            stop(f"Error: cannot write to --output {output}: {error.strerror or error}; choose another folder")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
