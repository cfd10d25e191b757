"""How commands end: errors that a user can correct, and Ctrl-C, print one line."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

KEPT = "Interrupted. Finished runs are kept. Run the same command again to continue."


def stop(message: str) -> NoReturn:
    """Print an error in one line, and end the command with exit code 1."""
    typer.echo(" ".join(message.split()), err=True)
    raise typer.Exit(1) from None


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors of training and of data into one line. Ctrl-C ends the command with one line too."""
    from ..common.workers import WorkInterruptedError
    from ..data import DataError
    from ..training.config import TrainingError

    try:
        yield
    except (TrainingError, DataError, WorkInterruptedError) as error:
        stop(f"Error: {error}")
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None


@contextmanager
def one_line_endings(output: Path, interrupted: str) -> Iterator[None]:
    """Turn Ctrl-C, and a folder that cannot be written, into one line."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        typer.echo(f"cannot write to --output {output}: {error}; choose another folder", err=True)
        raise typer.Exit(1) from None
