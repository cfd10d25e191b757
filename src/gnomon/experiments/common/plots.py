"""What plots of matplotlib share: the style of a panel, and the file."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .files import atomic_file
from .svg import whole_ticks


def style_panel(panel: Axes, x: str, y: str, *, whole: bool = False) -> None:
    """Label the axes of a panel with curves, and add a grid and a legend.

    With ``whole`` the x axis has whole numbers only.
    """
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_xlim(left=0)
    if whole:
        whole_ticks(panel)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file."""
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=110, format="png")
