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
    list[BenchModel] | None, typer.Argument(metavar="MODEL", help="Models to train. All, if you give none.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="Run only optimizers whose names match, such as 'INGD dense*'. You may repeat it."
    ),
]
Limit = Annotated[
    bool, typer.Option("--limit", help="Also show the least time that dense INGD could take on this machine.")
]
Rounds = Annotated[int, typer.Option(min=2, help="Number of timed turns of each optimizer. A turn has ten steps.")]
Output = Annotated[Path, typer.Option(help="Folder for the results.")]
List = Annotated[bool, typer.Option("--list", help="List the optimizers of each model, and do not run them.")]


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

    singd, SOAP and Muon take part if they are installed. The extra 'bench' installs them.

    The command writes results.json, table.md and a bar chart of each model into OUTPUT.

    All models with all optimizers take about an hour. The MLP takes ten minutes.

    'gnomon bench quality' compares the results of optimizers on different tasks. It has a --help of its own.
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
    interrupted = f"Interrupted. The results of finished models are in {output}."
    with one_line_endings(output, interrupted), threadpool_limits(1):
        run.bench(names, only or [], rounds=rounds, with_limit=limit, output=output)
