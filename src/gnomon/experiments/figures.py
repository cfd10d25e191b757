"""Plots of curves, in the style of the paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .trials import Curve

FLOOR = 1e-13  # of the initial gap: below it is rounding

Axis = Callable[[Curve], list[float]]
AXES: dict[str, tuple[str, Axis]] = {
    "iterations": ("iteration", lambda curve: [float(i) for i in range(len(curve.loss))]),
    "evaluations": ("gradient-equivalent evaluations", lambda curve: curve.evaluations),
    "time": ("CPU seconds", lambda curve: curve.seconds),
}


def plot(
    panels: dict[str, list[Curve]],
    shares: Callable[[Curve], list[float]],
    axis: str,
    path: Path,
    log_axis: bool = False,
) -> None:
    """The gap, as a share of the first one, against one axis: a panel a title, a line a method."""
    label, along = AXES[axis]
    methods = list(dict.fromkeys(curve.method for curves in panels.values() for curve in curves))
    colors = dict(zip(methods, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.2), squeeze=False, sharey=True)
    for panel, (title, curves) in zip(axes[0], panels.items(), strict=True):
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
        panel.set_title(title, fontsize=11)
        panel.set_xlabel(label)
        panel.set_ylim(top=10)
        if log_axis:
            panel.set_xscale("log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    axes[0][0].set_ylabel("gap, relative to the start")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
