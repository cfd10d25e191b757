"""``gnomon demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .endings import one_line_endings, one_line_errors


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the matrix, and the first seed of the networks.")] = 0,
) -> None:
    """See what this is about, in about a minute: train a network, find a matrix, approximate a posterior.

    Trains one network with SGD, AdamW, KFAC and INGD on handwritten digits that come with scikit-learn.

    Finds a positive-definite matrix by descent with momentum, among all of them and on a structured submanifold.

    Finds a Gaussian near the posterior of a hierarchical model, with two structures, beside the exact values.

    Prints three tables and writes the curves, with what they show, into OUTPUT/report.html.
    """
    with one_line_errors(), one_line_endings(output, "Interrupted: no report was written."):
        import torch

        from ..demo.run import demo as run

        torch.set_num_threads(1)  # methods are compared by the work of one thread
        run(output, seed)
