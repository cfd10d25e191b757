"""``gnomon bench``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .endings import one_line_endings


class BenchModel(str, Enum):
    """The models on which optimizers can be timed."""

    mlp = "mlp"
    cnn = "cnn"
    convmixer = "convmixer"
    transformer = "transformer"


Models = Annotated[
    list[BenchModel] | None, typer.Argument(metavar="MODEL", help="Models to train; all if none is given.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Only optimizers of such a name, as in 'INGD dense*'; may be repeated."),
]
Limit = Annotated[bool, typer.Option("--limit", help="Show the least time that dense INGD could take on this machine.")]
Rounds = Annotated[int, typer.Option(min=2, help="Timed turns of each optimizer, of ten steps each.")]
Output = Annotated[Path, typer.Option(help="Folder for the results.")]
List = Annotated[bool, typer.Option("--list", help="List the optimizers of each model, and run nothing.")]


def bench(
    models: Models = None,
    only: Only = None,
    limit: Limit = False,
    rounds: Rounds = 7,
    output: Output = Path("bench"),
    show: List = False,
) -> None:
    """Time training steps of INGD, KFAC and other optimizers, and measure their memory.

    All optimizers of a model take turns in one process, with one BLAS thread. Times are CPU time.

    singd, SOAP and Muon take part if they are installed: they come with the extra 'bench'.

    Writes results.json, table.md and a bar chart of each model into OUTPUT.

    All models with all optimizers take about an hour; the MLP takes ten minutes.

    'gnomon bench quality' compares what optimizers reach on unlike tasks; it has a --help of its own.
    """
    import torch
    from threadpoolctl import threadpool_limits

    from ..bench import run

    torch.set_num_threads(1)
    names = [model.value for model in models or BenchModel]
    try:
        run.check_patterns(names, only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--only'") from None
    if show:
        typer.echo(run.listing(names, only or []))
        return
    interrupted = f"Interrupted. Models that are finished are in {output}."
    with one_line_endings(output, interrupted), threadpool_limits(1):
        run.bench(names, only or [], rounds=rounds, with_limit=limit, output=output)
