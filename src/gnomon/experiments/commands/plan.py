"""``gnomon plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .endings import one_line_errors

if TYPE_CHECKING:
    from ..plan.forecast import Forecast


def names_of_plans() -> list[str]:
    from ..plan.models import PLANNED

    return list(PLANNED)


def _positive(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value} is not a rate: a rate must be greater than 0")
    return value


def _rate(unit: str, help: str, default: str) -> Any:
    panel = "Rates of a rank"
    return typer.Option(metavar=unit, help=help, show_default=default, callback=_positive, rich_help_panel=panel)


Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="resnet-50, vit-b, gpt-1.3b, or a model of gnomon train.",
        autocompletion=names_of_plans,
    ),
]
Ranks = Annotated[list[int], typer.Option(min=1, metavar="N", help="Number of ranks. You may repeat it.")]
Shard = Annotated[
    Literal["none", "update", "full"] | None,
    typer.Option(help="How the ranks share INGD's work.", show_default="a line for each mode"),
]
Structure = Annotated[
    str, typer.Option(metavar="NAME", help="Structure of the factors: dense, triangular, diagonal, ...")
]
MaxDim = Annotated[int, typer.Option(min=1, metavar="K", help="Factors larger than this are diagonal.")]
PrecondDtype = Annotated[
    Literal["bfloat16", "float16"] | None,
    typer.Option(help="Type of the stored factors.", show_default="float32"),
]
Memory = Annotated[Literal["default", "low"], typer.Option(help="low stores only one half of each symmetric matrix.")]
Batch = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Samples in the batch of each rank.", show_default="32 images, 8 sequences"),
]
UpdateEvery = Annotated[int, typer.Option(min=1, metavar="STEPS", help="Steps between updates of the factors.")]
Flops = Annotated[float | None, _rate("TFLOP/S", "Rate of matrix products.", "measured on one core")]
Bandwidth = Annotated[float | None, _rate("GB/S", "Rate at which a rank sends.", "measured between two processes")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]


def plan(
    model: Model,
    ranks: Ranks,
    shard: Shard = None,
    structure: Structure = "auto",
    max_dim: MaxDim = 8192,
    precond_dtype: PrecondDtype = None,
    memory: Memory = "default",
    batch: Batch = None,
    update_every: UpdateEvery = 10,
    flops: Flops = None,
    bandwidth: Bandwidth = None,
    markdown: Markdown = False,
) -> None:
    """Count what INGD would store, compute and send on many ranks. Nothing is run.

    For example: gnomon plan --model gpt-1.3b --ranks 8 --ranks 64 --flops 100 --bandwidth 25

    Memory and messages are exact. Times are computed from the rates, as if nothing overlapped.
    """
    with one_line_errors():
        import torch

        from ...optim.distributed.strategies import MODES
        from ..plan.forecast import check_model, forecasts
        from ..plan.rates import rates
        from ..plan.report import explanation

        torch.set_num_threads(1)  # the rate of one core is measured
        check_model(model)
        chosen = rates(flops and 1e12 * flops, bandwidth and 1e9 * bandwidth)
        modes = MODES if shard is None else (shard,)
        dtype = precond_dtype and getattr(torch, precond_dtype)
        settings = {"structure": structure, "max_dim": max_dim, "precond_dtype": dtype, "memory": memory}
        found = forecasts(model, ranks, modes, chosen, batch, update_every, **settings)
        _show(model, found, explanation(model, found, chosen, batch, update_every), markdown)


def _show(model: str, found: list[Forecast], explanation: str, markdown: bool) -> None:
    from rich.console import Console

    from ..plan import report

    if markdown:
        typer.echo(f"{report.markdown(found)}\n\n{explanation}")
        return
    console = Console()
    console.print(report.terminal_table(model, found, console.width))
    console.print(f"{report.LEGEND}\n\n{explanation}", highlight=False)
