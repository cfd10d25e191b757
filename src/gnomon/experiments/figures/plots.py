"""Plots of curves in the style of the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..common.plots import save_png
from ..common.trials import Curve

FLOOR = 1e-13
"""Smaller shares of the initial gap are rounding errors. They are drawn at this value."""

Shares = Callable[[Curve], list[float]]
"""Gives the gaps of a curve as shares of its first gap."""

Axis = Callable[[Curve], list[float]]
AXES: dict[str, tuple[str, Axis]] = {
    "iterations": ("iteration", lambda curve: [float(i) for i in range(len(curve.loss))]),
    "evaluations": ("gradient-equivalent evaluations", lambda curve: curve.evaluations),
    "time": ("CPU seconds", lambda curve: curve.seconds),
}


def plot(panels: dict[str, list[Curve]], shares: Shares, axis: str, path: Path, log_axis: bool = False) -> None:
    """Draw the gap, as a share of the first gap, against one axis. Each title has a panel, each method a colour."""
    label, along = AXES[axis]
    methods = list(dict.fromkeys(curve.method for curves in panels.values() for curve in curves))
    colors = dict(zip(methods, colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    figure = Figure(figsize=(5.5 * len(panels), 4.2))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for panel, (title, curves) in zip(axes[0], panels.items(), strict=True):
        _plot_curves(panel, curves, shares, along, colors)
        panel.set_title(title, fontsize=11)
        panel.set_xlabel(label)
        panel.set_ylim(top=10)
        if log_axis:
            panel.set_xscale("log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    axes[0][0].set_ylabel("gap, relative to the start")
    figure.tight_layout()
    save_png(figure, path)


def _plot_curves(
    panel: Axes, curves: list[Curve], shares: Shares, along: Axis, colors: Mapping[str, tuple[float, float, float]]
) -> None:
    for curve in curves:
        gaps = [max(share, FLOOR) for share in shares(curve)]
        ours = curve.method.startswith("ours")
        first = curve.seed == min(other.seed for other in curves if other.method == curve.method)
        panel.semilogy(
            along(curve),
            gaps,
            color=colors[curve.method],
            linewidth=2.2 if ours else 1.3,
            linestyle="-" if ours else "--",
            zorder=3 if ours else 2,
            label=curve.method if first else None,
        )
