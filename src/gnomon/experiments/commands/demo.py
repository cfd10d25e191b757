"""``gnomon demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .endings import one_line_endings, one_line_errors


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the matrix, and first seed of the networks.")] = 0,
) -> None:
    """Show what gnomon does, in about a minute: train a network, find a matrix, approximate a posterior.

    It trains one network with SGD, AdamW, KFAC and INGD on the handwritten digits of scikit-learn.

    It finds a positive-definite matrix by descent with momentum, among all matrices and on a structured submanifold.

    It fits a Gaussian to the posterior of a hierarchical model, with two structures, and compares the exact values.

    It prints three tables, and writes the curves with explanations into OUTPUT/report.html.
    """
    with one_line_errors(), one_line_endings(output, "Interrupted: no report was written."):
        import torch

        from ..demo.run import demo as run

        torch.set_num_threads(1)  # methods are compared by the work of one thread
        run(output, seed)
