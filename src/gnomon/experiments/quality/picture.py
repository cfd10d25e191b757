"""Pictures of the suite's results: each optimizer's measure on each task as a multiple of the task's best one."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..common import palette, svg
from ..common.files import write_atomically
from ..common.plots import save_png
from .contestants import ADAMW, CONTESTANTS
from .report import Outcomes, Panel, Report
from .runs import Outcome
from .statistics import Score
from .suite import DEVELOPMENT

MARKERS = {ADAMW: "o", "soap": "s", "muon": "^", "kfac": "v", "ingd-paper": "x", "ingd-before": "d", "ingd": "D"}
"""The marker of each optimizer. The variants of INGD have one colour and other markers."""
OURS = "ingd"
HOLLOW = ("ingd-before",)
LIMIT = 2.0
"""The largest ratio that is drawn at its place. Larger ones and runs that diverged are drawn at the right border."""


def draw(report: Report, folder: Path) -> None:
    """Write ``quality.png`` with all panels side by side, and an SVG file of each panel, which fit small screens."""
    tasks = report.sets["all"]
    canvas = Figure(figsize=(1.4 + 4.3 * len(report.panels), 2.0 + 0.3 * len(tasks)), layout="constrained")
    axes = canvas.subplots(1, len(report.panels), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, report.panels, strict=True):
        _fill(axis, report, panel)
        axis.set_title(panel.title, fontsize=11)
    _add_legend(canvas, axes[0], len(report.optimizers))
    save_png(canvas, folder / "quality.png")
    for panel in report.panels:
        write_atomically(folder / f"{panel.name}.svg", _alone(report, panel))


def _alone(report: Report, panel: Panel) -> str:
    """Return a panel as an SVG file."""
    height = 2.4 + 0.3 * len(report.sets["all"])
    with svg.canvas(panel.title, (5.2, height), as_file=True) as (figure, axis, text):
        _fill(axis, report, panel)
        _add_legend(figure, axis, 4)
    return svg.with_short_numbers(text.getvalue())


def _add_legend(figure: Figure, axis: Axes, columns: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _fill(axis: Axes, report: Report, panel: Panel) -> None:
    tasks = report.sets["all"]
    _style(axis, tasks)
    _dots(axis, report, tasks, panel.outcomes)


def _dots(panel: Axes, report: Report, tasks: list[str], outcomes: Outcomes) -> None:
    """Draw each optimizer's measures as multiples of the best one of the task."""
    measured = [{name: _measure(outcomes(task, name)) for name in report.optimizers} for task in tasks]
    best = [min((value for value in row.values() if value is not None), default=math.nan) for row in measured]
    for optimizer in report.optimizers:
        found = [(row[optimizer], least) for row, least in zip(measured, best, strict=True)]
        places = [place for place, (value, _) in enumerate(found) if value is not None]
        ratios = [min(value / least, LIMIT) for value, least in found if value is not None]
        color = palette.of_optimizer(optimizer).light
        panel.plot(
            ratios,
            places,
            linestyle="",
            marker=MARKERS[optimizer],
            markersize=8 if optimizer == OURS else 6,
            color=color,
            markerfacecolor="none" if optimizer in HOLLOW else color,
            label=CONTESTANTS[optimizer].title,
            clip_on=False,
        )


def _measure(outcomes: list[Outcome] | None) -> float | None:
    return None if outcomes is None else Score.of(outcomes).mean


def _style(panel: Axes, tasks: list[str]) -> None:
    developed = sum(task in DEVELOPMENT for task in tasks)
    if 0 < developed < len(tasks):
        panel.axhline(developed - 0.5, color=palette.SOFT.light, linewidth=0.8, linestyle=":")
    panel.set_xscale("log")
    panel.set_xlim(1, LIMIT)
    panel.set_xticks([1, 1.1, 1.25, 1.5, LIMIT], ["best", "1.1", "1.25", "1.5", f"{LIMIT:g} or more"])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_yticks(range(len(tasks)), tasks)
    panel.tick_params(axis="y", pad=9)  # room for the markers at the border
    panel.set_ylim(len(tasks) - 0.5, -0.5)
    panel.set_xlabel("test measure as a multiple of the best")
    panel.grid(alpha=0.3, axis="both")
    panel.spines[["top", "right"]].set_visible(False)
