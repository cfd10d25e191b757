"""``gnomon reproduce``."""

from __future__ import annotations

import signal
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from .endings import KEPT, one_line_endings, one_line_errors, stop


class Reproducible(str, Enum):
    """The names of the paper's figures, and of its tables of trained networks."""

    metric_nearness = "metric-nearness"
    log_det = "log-det"
    gmm = "gmm"
    rosenbrock = "rosenbrock"
    all = "all"
    cifar100 = "cifar100"
    tiny_imagenet = "tiny-imagenet"
    imagenet_100 = "imagenet-100"
    gpt = "gpt"


TABLE_NAMES = (Reproducible.cifar100, Reproducible.tiny_imagenet, Reproducible.imagenet_100, Reproducible.gpt)
TABLES, FIGURES = "Tables of trained networks: cifar100, tiny-imagenet, imagenet-100, gpt", "Figures: the other names"

Name = Annotated[Reproducible, typer.Argument(help="A figure of the paper, all four of them, or a table.")]
Output = Annotated[Path, typer.Option(help="Folder for the results: each name gets one of its own.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes; all four in under two minutes.", rich_help_panel=FIGURES)
]
Scale = Annotated[
    Literal["full", "small"] | None,
    typer.Option(
        help="The paper's protocol, for GPUs; or one for two cores and under 90 minutes.",
        show_default="full",
        rich_help_panel=TABLES,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the data's files.", show_default="$GNOMON_DATA, else .data", rich_help_panel=TABLES),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Training runs at a time, each a process of one thread.",
        show_default="one a core, or one a GPU",
        rich_help_panel=TABLES,
    ),
]


def reproduce(
    name: Name,
    output: Output = Path("runs"),
    quick: Quick = False,
    scale: Scale = None,
    data_dir: DataDir = None,
    jobs: Jobs = None,
) -> None:
    """Run the paper's experiments again, and write a page of results.

    Figures: metric-nearness, log-det, gmm and rosenbrock, or all of them in half an hour.

    Every method runs with the same step and momentum, then with its own best step from a small grid.

    Tables: cifar100, tiny-imagenet, imagenet-100, and gpt, which the paper does not have.

    Equally many learning rates of each optimizer are tried on a held-out part of the training set.

    Then the best of each is trained with three seeds. An estimate of the time is shown first.

    Writes results.json, pictures and index.html into OUTPUT/NAME; of tables also NAME.md and each run.

    What was interrupted, even killed, goes on with the same command.
    """
    if name not in TABLE_NAMES:
        for option, value in (("--scale", scale), ("--data-dir", data_dir), ("--jobs", jobs)):
            if value is not None:
                raise typer.BadParameter(f"{name.value} is a figure and has no {option}; --quick makes it small")
        _reproduce_figures(name.value, output, quick)
    else:
        if quick:
            raise typer.BadParameter(f"{name.value} is a table and has no --quick; --scale small makes it small")
        _reproduce_table(name.value, output, scale or "full", data_dir, jobs)


def _reproduce_figures(name: str, output: Path, quick: bool) -> None:
    import torch
    from threadpoolctl import threadpool_limits

    from ..figures.reproduce import EXPERIMENTS
    from ..figures.reproduce import reproduce as run

    torch.set_num_threads(1)  # methods are compared by the work of one thread, in SciPy too
    with one_line_endings(output, KEPT), threadpool_limits(1):
        for experiment in EXPERIMENTS if name == "all" else [name]:
            run(experiment, output, quick=quick)


def _reproduce_table(name: str, output: Path, scale: str, data_dir: Path | None, jobs: int | None) -> None:
    with one_line_errors():
        from ..data import DataError
        from ..training.ranks import check_alone

        check_alone("gnomon reproduce")
        try:
            from ..tables.reproduce import reproduce_table as run
        except ModuleNotFoundError as missing:
            stop(f"Error: gnomon reproduce needs {missing.name}; pip install 'gnomon[experiments]'")
        try:
            run(name, output, scale, data_dir=data_dir, jobs=jobs)
        except DataError:  # missing data is an OSError too
            raise
        except KeyboardInterrupt as interrupt:
            typer.echo(KEPT, err=True)
            raise typer.Exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)) from None
        except OSError as error:
            stop(f"Error: cannot write to --output {output}: {error.strerror or error}; choose another folder")
