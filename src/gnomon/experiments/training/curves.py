"""The curves of one run as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ..common import palette
from ..common.plots import save_png, style_panel
from ..common.svg import DASHES, Line, plot
from .config import Config
from .optimizers import TITLES
from .trainer import Epoch


def draw_run(epochs: list[Epoch], config: Config, path: Path) -> None:
    """Draw loss and error of a run against its epochs, on training batches and on the test set."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    x = [epoch.epoch for epoch in epochs]
    color = palette.of_optimizer(config.optimizer)
    held_out = "validation" if config.validation else "test"
    for panel, title, training, testing in (
        (panels[0], "loss", [e.loss for e in epochs], [e.test_loss for e in epochs]),
        (panels[1], "error in %", [e.train_error for e in epochs], [e.test_error for e in epochs]),
    ):
        plot(panel, Line("training batches", color, x, training, dashes=DASHES[1]))
        plot(panel, Line(f"{held_out} set", color, x, testing))
        style_panel(panel, "epoch", title, whole=True)
    figure.suptitle(f"{config.model} on {config.data}, {TITLES[config.optimizer]}, lr {config.lr:g}", fontsize=11)
    save_png(figure, path)
