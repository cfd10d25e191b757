"""The command line: ``gnomon demo | train | compare | tune | reproduce | bench | plan``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

try:
    import matplotlib  # noqa: F401
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:  # the library itself needs torch alone
    raise SystemExit(
        f"{error.name} is not installed: the gnomon command needs the 'experiments' extra; "
        "pip install 'gnomon[experiments]'"
    ) from None

from . import __version__
from .experiments.training import commands

main = typer.Typer(
    help="Optimization on symmetric positive-definite matrices and structured submanifolds.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gnomon {__version__}")
        raise typer.Exit


@main.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What all commands share."""


@contextmanager
def _one_line_endings(output: Path, interrupted: str) -> Iterator[None]:
    """Ctrl-C and a folder that cannot be written end a command with one line."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        typer.echo(f"cannot write to --output {output}: {error}; choose another folder", err=True)
        raise typer.Exit(1) from None


@main.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Of the matrix, and the first of the networks' seeds.")] = 0,
) -> None:
    """See what this is about, in about a minute: train a network, and find a matrix.

    Trains one network with SGD, AdamW, KFAC and INGD on handwritten digits that come with scikit-learn.

    Finds a positive-definite matrix by descent with momentum, among all of them and on a structured submanifold.

    Prints two tables and writes the curves, with what they show, into OUTPUT/report.html.
    """
    with commands.one_line_errors(), _one_line_endings(output, "Interrupted: no report was written."):
        import torch

        from .experiments.demo import demo as run

        torch.set_num_threads(1)  # methods are compared by the work of one thread
        run(output, seed)


main.command()(commands.train)
main.command()(commands.compare)
main.command()(commands.tune)


class Reproducible(str, Enum):
    """What can be reproduced: the paper's figures, and its tables of trained networks."""

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


@main.command()
def reproduce(
    name: Annotated[Reproducible, typer.Argument(help="A figure of the paper, all four of them, or a table.")],
    output: Annotated[Path, typer.Option(help="Folder for the results: each name gets one of its own.")] = Path("runs"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes; all four in under two minutes.", rich_help_panel=FIGURES)
    ] = False,
    scale: Annotated[
        Literal["full", "small"] | None,
        typer.Option(
            help="The paper's protocol, for GPUs; or one for two cores and under 90 minutes.",
            show_default="full",
            rich_help_panel=TABLES,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the data's files.", show_default="$GNOMON_DATA, else .data", rich_help_panel=TABLES
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Training runs at a time, each a process of one thread.",
            show_default="one a core, or one a GPU",
            rich_help_panel=TABLES,
        ),
    ] = None,
) -> None:
    """Run the paper's experiments again, and write a page of results.

    Figures: metric-nearness, log-det, gmm and rosenbrock, or all of them in half an hour.

    Every method with the same step and momentum, then each with its own best step from a small grid.

    Tables: cifar100, tiny-imagenet, imagenet-100, and gpt, which the paper does not have.

    As many learning rates of each optimizer are tried on a held-out part of the training set.

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
        commands.reproduce_table(name.value, output, scale or "full", data_dir, jobs)


def _reproduce_figures(name: str, output: Path, quick: bool) -> None:
    import torch
    from threadpoolctl import threadpool_limits

    from .experiments.reproduce import EXPERIMENTS
    from .experiments.reproduce import reproduce as run

    torch.set_num_threads(1)  # methods are compared by the work of one thread, SciPy's too
    interrupted = "Interrupted. What is finished is kept: run the same command again to go on."
    with _one_line_endings(output, interrupted), threadpool_limits(1):
        for experiment in EXPERIMENTS if name == "all" else [name]:
            run(experiment, output, quick=quick)


class BenchModel(str, Enum):
    """What optimizers can be timed on."""

    mlp = "mlp"
    cnn = "cnn"
    convmixer = "convmixer"
    transformer = "transformer"


@main.command()
def bench(
    models: Annotated[
        list[BenchModel] | None, typer.Argument(metavar="MODEL", help="Models to train; all if none is given.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only optimizers of such a name, as in 'INGD dense*'; may be repeated."),
    ] = None,
    limit: Annotated[
        bool, typer.Option("--limit", help="Show the least time that dense INGD could take on this machine.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=2, help="Timed turns of each optimizer, of ten steps each.")] = 7,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("bench"),
    show: Annotated[bool, typer.Option("--list", help="List the optimizers of each model, and run nothing.")] = False,
) -> None:
    """Time training steps of INGD, KFAC and other optimizers, and measure their memory.

    All optimizers of a model take turns in one process, with one BLAS thread. Times are CPU time.

    singd, SOAP and Muon take part if they are installed: they come with the extra 'bench'.

    Writes results.json, table.md and a bar chart of each model into OUTPUT.

    All models with all optimizers take about an hour; the MLP takes ten minutes.
    """
    import torch
    from threadpoolctl import threadpool_limits

    from .experiments import bench as benchmark

    torch.set_num_threads(1)
    names = [model.value for model in models or BenchModel]
    try:
        benchmark.check_patterns(names, only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--only'") from None
    if show:
        typer.echo(benchmark.listing(names, only or []))
        return
    interrupted = f"Interrupted. Models that are finished are in {output}."
    with _one_line_endings(output, interrupted), threadpool_limits(1):
        benchmark.bench(names, only or [], rounds=rounds, with_limit=limit, output=output)


def _names_of_plans() -> list[str]:
    from .experiments.plan_models import PLANNED

    return list(PLANNED)


def _positive(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value} is not a rate: it must be more than 0")
    return value


RATES = "Rates of a rank"


@main.command()
def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="resnet-50, vit-b, gpt-1.3b, or one that gnomon train knows.",
            autocompletion=_names_of_plans,
        ),
    ],
    ranks: Annotated[
        list[int], typer.Option(min=1, metavar="N", help="How many train the model together; may be repeated.")
    ],
    shard: Annotated[
        Literal["none", "update", "full"] | None,
        typer.Option(help="How they share INGD's work.", show_default="a line for each"),
    ] = None,
    structure: Annotated[
        str, typer.Option(metavar="NAME", help="Of the factors: dense, triangular, diagonal, ...")
    ] = "dense",
    max_dim: Annotated[int, typer.Option(min=1, metavar="K", help="A factor of a larger size is diagonal.")] = 8192,
    precond_dtype: Annotated[
        Literal["bfloat16", "float16"] | None,
        typer.Option(help="In which factors are stored.", show_default="float32"),
    ] = None,
    memory: Annotated[
        Literal["default", "low"], typer.Option(help="Whether symmetric matrices are stored to one half.")
    ] = "default",
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Samples of each rank.", show_default="32 images, 8 sequences"),
    ] = None,
    update_every: Annotated[int, typer.Option(min=1, metavar="STEPS", help="Between updates of the factors.")] = 10,
    flops: Annotated[
        float | None,
        typer.Option(
            metavar="TFLOP/S",
            help="Of matrix products.",
            show_default="measured on one core",
            callback=_positive,
            rich_help_panel=RATES,
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="That a rank sends.",
            show_default="measured between two processes",
            callback=_positive,
            rich_help_panel=RATES,
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a page.")] = False,
) -> None:
    """Count what INGD would store, compute and send on many ranks, without running anything.

    For example: gnomon plan --model gpt-1.3b --ranks 8 --ranks 64 --flops 100 --bandwidth 25

    Memory and messages are exact; times are their sums at the given rates, with nothing overlapping.
    """
    with commands.one_line_errors():
        import torch
        from rich.console import Console

        from .experiments import plan as planning
        from .experiments.plan_rates import rates
        from .optim.sharing import MODES

        torch.set_num_threads(1)  # one core's rate is measured
        planning.check_model(model)
        chosen = rates(flops and 1e12 * flops, bandwidth and 1e9 * bandwidth)
        found = planning.forecasts(
            model,
            ranks,
            MODES if shard is None else (shard,),
            chosen,
            batch,
            update_every,
            structure=structure,
            max_dim=max_dim,
            precond_dtype=precond_dtype and getattr(torch, precond_dtype),
            memory=memory,
        )
        explanation = planning.explanation(model, found, chosen, batch, update_every)
        if markdown:
            typer.echo(f"{planning.markdown(found)}\n\n{explanation}")
            return
        console = Console()
        console.print(planning.terminal_table(model, found, console.width))
        console.print(f"{planning.LEGEND}\n\n{explanation}", highlight=False)
