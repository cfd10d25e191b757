"""The command line: ``gnomon demo | train | compare | tune | reproduce | bench | plan``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

try:
    import typer

    for package in ("matplotlib", "rich"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
except ModuleNotFoundError as error:  # the library itself needs torch alone
    raise SystemExit(
        f"{error.name} is not installed: the gnomon command needs the 'experiments' extra; "
        "pip install 'gnomon[experiments]'"
    ) from None

from . import __version__
from .experiments.commands.bench import bench
from .experiments.commands.compare import compare
from .experiments.commands.demo import demo
from .experiments.commands.plan import plan
from .experiments.commands.reproduce import reproduce
from .experiments.commands.train import train
from .experiments.commands.tune import tune

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
    """Define the options that come before the name of a command."""


for command in (demo, train, compare, tune, reproduce, bench, plan):
    main.command()(command)
