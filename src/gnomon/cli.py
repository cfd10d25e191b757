"""The command line: ``gnomon demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

main = typer.Typer(
    help="Optimization on symmetric positive-definite matrices and structured submanifolds.",
    no_args_is_help=True,
    add_completion=False,
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


@main.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of each method, at most.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the random problems.")] = 0,
) -> None:
    """Fit a full SPD matrix, a structured one and a Gaussian with stock torch optimizers.

    Prints a table of how close each method came to the known optimum, and saves the curves as a picture.
    """
    from .experiments.demo import demo as run

    run(output, iterations, seed)
