"""``gnomon reproduce``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
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
SYNTHETIC = (Reproducible.metric_nearness, Reproducible.log_det, Reproducible.gmm, Reproducible.rosenbrock)
FIRST_TABLE, SECOND_TABLE = (Reproducible.cifar100, Reproducible.tiny_imagenet), (Reproducible.imagenet_100,)
PAPER_NAMES: dict[str, Sequence[Reproducible]] = {
    **{f"fig-{letter}": (name,) for letter, name in zip("abcd", SYNTHETIC, strict=True)},
    "table-1": FIRST_TABLE,
    "table-2": SECOND_TABLE,
    "fig-3": SYNTHETIC,
    "fig-4": SECOND_TABLE,
    "fig-5": FIRST_TABLE,
    "table-3": FIRST_TABLE,
    "table-4": SECOND_TABLE,
}
"""What the paper's figures and tables of results are here.

``fig-a`` to ``fig-d``, ``table-1`` and ``table-2`` are the paper's labels ``fig:a``, ``table:results1`` and so on. The
other names have the numbers that are printed in the paper.
"""

TABLES, FIGURES = "Options of tables: cifar100, tiny-imagenet, imagenet-100, gpt", "Options of figures: the other names"


def named(name: str) -> Sequence[Reproducible]:
    """Return the figures or tables that a name means, one of ours or of the paper's."""
    if name == Reproducible.all.value:
        return SYNTHETIC
    if name in PAPER_NAMES:
        return PAPER_NAMES[name]
    try:
        return (Reproducible(name),)
    except ValueError:
        known = ", ".join([*(known.value for known in Reproducible), *PAPER_NAMES])
        raise typer.BadParameter(f"{name!r} is unknown; there are {known}", param_hint="NAME") from None


def _completed(incomplete: str) -> list[str]:
    names = [*(name.value for name in Reproducible), *PAPER_NAMES]
    return [name for name in names if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A figure, a table, or one of the paper's names for them.", autocompletion=_completed
    ),
]
Output = Annotated[Path, typer.Option(help="Folder for the results. Each figure and table has a folder in it.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Small sizes. All four figures take less than two minutes.", rich_help_panel=FIGURES),
]
Scale = Annotated[
    Literal["full", "small", "tiny"] | None,
    typer.Option(
        help="full: the paper's protocol, for GPUs. small: less than 90 minutes on two cores. tiny: a few minutes.",
        show_default="full",
        rich_help_panel=TABLES,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the files of the data.", show_default="$GNOMON_DATA, else .data", rich_help_panel=TABLES
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Training runs at a time. Each is a process with one thread.",
        show_default="one for each core, or each GPU",
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

    Figures: metric-nearness, log-det, gmm and rosenbrock, or all. All take half an hour.

    Every method runs with the same step and momentum, and then with its own best step from a small grid.

    Tables: cifar100, tiny-imagenet, imagenet-100, and gpt, which is not in the paper.

    The command tries the same number of learning rates for each optimizer, on a held-out part of the training set.

    Then it trains with the best rate of each and three seeds. It first prints an estimate of the time.

    You may use the paper's names too. fig-a, fig-b, fig-c and fig-d are its labels of the four figures.

    table-1 (cifar100 and tiny-imagenet) and table-2 (imagenet-100) are its labels results1 and results2.

    Its printed numbers are fig-3 (all four figures), table-3 and fig-5 (table-1), table-4 and fig-4 (table-2).

    The command writes results.json, index.html and a Markdown page with its drawings into a folder of OUTPUT, such as
    runs/gmm.

    It also writes index.html while runs go on, with what is finished.

    The same command continues after an interruption, even after a kill.
    """
    names = named(name)
    if any(one in TABLE_NAMES for one in names):
        if quick:
            raise typer.BadParameter(f"{name} is a table and has no --quick; use --scale tiny")
        _reproduce_tables([one.value for one in names], output, scale or "full", data_dir, jobs)
    else:
        for option, value in (("--scale", scale), ("--data-dir", data_dir), ("--jobs", jobs)):
            if value is not None:
                raise typer.BadParameter(f"{name} is a figure and has no {option}; use --quick for small sizes")
        _reproduce_figures([one.value for one in names], output, quick)


def _reproduce_figures(names: Sequence[str], output: Path, quick: bool) -> None:
    import torch
    from threadpoolctl import threadpool_limits

    from ..figures.reproduce import reproduce as run

    torch.set_num_threads(1)  # methods are compared by the work of one thread, in SciPy too
    with one_line_endings(output, KEPT), threadpool_limits(1):
        for name in names:
            run(name, output, quick=quick)


def _check_data(names: Sequence[str], scale: str, data_dir: Path | None) -> None:
    """Raise an error if data of any table are missing, before the first run of the first table."""
    from ..data import load
    from ..tables import scales

    for name in names:
        for task in scales.TABLES[name][scale].tasks:
            load(task.data, data_dir, train_limit=task.train_limit, test_limit=task.test_limit)


def _reproduce_tables(names: Sequence[str], output: Path, scale: str, data_dir: Path | None, jobs: int | None) -> None:
    with one_line_errors():
        from ..data import DataError
        from ..training.ranks import check_alone

        check_alone("gnomon reproduce")
        try:
            from ..tables.reproduce import reproduce_table as run
        except ModuleNotFoundError as missing:
            stop(f"Error: gnomon reproduce needs {missing.name}; pip install 'gnomon[experiments]'")
        try:
            if len(names) > 1:
                _check_data(names, scale, data_dir)
            for name in names:
                run(name, output, scale, data_dir=data_dir, jobs=jobs)
        except DataError:  # missing data is an OSError too
            raise
        except KeyboardInterrupt as interrupt:
            typer.echo(KEPT, err=True)
            raise typer.Exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)) from None
        except OSError as error:
            stop(f"Error: cannot write to --output {output}: {error.strerror or error}; choose another folder")
