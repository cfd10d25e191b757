"""The command line: ``gnomon demo | train | compare | tune | reproduce | bench | bench quality | plan``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

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

from typer.core import TyperCommand

from . import __version__
from .experiments.commands.bench import bench
from .experiments.commands.compare import compare
from .experiments.commands.demo import demo
from .experiments.commands.plan import plan
from .experiments.commands.quality import quality
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


class BenchCommand(TyperCommand):
    """``gnomon bench``, unless ``quality`` comes first: ``gnomon bench quality`` is a command with its own options."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] == ["quality"]:
            return _quality.make_context(f"{info_name} quality", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


_apart = typer.Typer(add_completion=False, rich_markup_mode="rich")
_apart.command()(quality)
_quality = typer.main.get_command(_apart)

for command in (demo, train, compare, tune, reproduce, bench, plan):
    main.command(cls=BenchCommand if command is bench else None)(command)
