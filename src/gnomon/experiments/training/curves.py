"""Pictures of runs: one alone, or several together."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..files import atomic_file
from .config import Config
from .optimizers import TITLES
from .trainer import Epoch


def draw_run(epochs: list[Epoch], config: Config, path: Path) -> None:
    """Loss and error of one run against its epochs, on training batches and on the test set."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    x = [epoch.epoch for epoch in epochs]
    held_out = "validation" if config.validation else "test"
    for panel, title, training, testing in (
        (panels[0], "loss", [e.loss for e in epochs], [e.test_loss for e in epochs]),
        (panels[1], "error in %", [e.train_error for e in epochs], [e.test_error for e in epochs]),
    ):
        panel.plot(x, training, color="C0", linestyle="--", label="training batches", **_marks(x))
        panel.plot(x, testing, color="C3", label=f"{held_out} set", **_marks(x))
        style(panel, "epoch", title)
    figure.suptitle(f"{config.model} on {config.data}, {TITLES[config.optimizer]}, lr {config.lr:g}", fontsize=11)
    save(figure, path)


def style(panel: Axes, x: str, y: str) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_xlim(left=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=110, format="png")


def _marks(x: list[int]) -> dict[str, str]:
    """A run of one epoch is a point."""
    return {"marker": "o"} if len(x) == 1 else {}
