"""A picture of the suite's results: each optimizer's measure on each task as a multiple of the task's best one."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..common import palette
from ..common.plots import save_png
from .contestants import ADAMW, CONTESTANTS
from .report import Outcomes, Report
from .runs import Outcome
from .statistics import Score
from .suite import DEVELOPMENT

MARKERS = {ADAMW: "o", "soap": "s", "muon": "^", "kfac": "v", "ingd-paper": "x", "ingd-before": "d", "ingd": "D"}
"""The marker of each optimizer. The variants of INGD have one colour and other markers."""
OURS = "ingd"
HOLLOW = ("ingd-before",)
LIMIT = 2.0
"""The largest ratio that is drawn at its place. Larger ones and runs that diverged are drawn at the right border."""


def draw(report: Report, path: Path) -> None:
    """Draw the measures at equal steps, and those in AdamW's time if there are any."""
    panels: dict[str, Outcomes] = {"At equal steps": report.study.final_outcomes}
    if ADAMW in report.study.references:
        panels["In AdamW's CPU time"] = report.outcomes_in_time_of(ADAMW)
    tasks = report.sets["all"]
    canvas = Figure(figsize=(1.4 + 4.3 * len(panels), 2.0 + 0.3 * len(tasks)), layout="constrained")
    axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, (title, outcomes) in zip(axes, panels.items(), strict=True):
        _style(panel, title, tasks)
        _dots(panel, report, tasks, outcomes)
    handles, labels = axes[0].get_legend_handles_labels()
    canvas.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    save_png(canvas, path)


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


def _style(panel: Axes, title: str, tasks: list[str]) -> None:
    developed = sum(task in DEVELOPMENT for task in tasks)
    if 0 < developed < len(tasks):
        panel.axhline(developed - 0.5, color=palette.SOFT.light, linewidth=0.8, linestyle=":")
    panel.set_xscale("log")
    panel.set_xlim(1, LIMIT)
    panel.set_xticks([1, 1.1, 1.25, 1.5, LIMIT], ["best", "1.1", "1.25", "1.5", f"{LIMIT:g} or more"])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_yticks(range(len(tasks)), tasks)
    panel.set_ylim(len(tasks) - 0.5, -0.5)
    panel.set_xlabel("test measure as a multiple of the best")
    panel.set_title(title, fontsize=11)
    panel.grid(alpha=0.3, axis="both")
    panel.spines[["top", "right"]].set_visible(False)
