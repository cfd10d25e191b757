"""A picture of the suite's results: each optimizer's measure on each task as a multiple of AdamW's."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ..common import palette
from ..common.plots import save_png
from .contestants import ADAMW, CONTESTANTS
from .report import Outcomes, Report
from .statistics import Score
from .suite import DEVELOPMENT

MARKERS = {ADAMW: "|", "soap": "s", "muon": "^", "kfac": "v", "ingd-paper": "x", "ingd-before": "o", "ingd": "D"}
"""The marker of each optimizer. The variants of INGD differ by it alone."""


def draw(report: Report, path: Path) -> None:
    """Draw the measures at equal steps, and those in AdamW's time if there are any."""
    panels: dict[str, Outcomes] = {"At equal steps": report.study.final_outcomes}
    if ADAMW in report.study.references:
        panels["In AdamW's CPU time"] = report.outcomes_in_time_of(ADAMW)
    tasks = report.sets["all"]
    canvas = Figure(figsize=(6.5 * len(panels), 1.6 + 0.36 * len(tasks)), layout="constrained")
    axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, (title, outcomes) in zip(axes, panels.items(), strict=True):
        for optimizer in report.optimizers:
            _dots(panel, report, tasks, optimizer, outcomes)
        _style(panel, title, tasks)
    axes[0].legend(frameon=False, fontsize=8, loc="best")
    save_png(canvas, path)


def _dots(panel: Axes, report: Report, tasks: list[str], optimizer: str, outcomes: Outcomes) -> None:
    """Draw the ratios of an optimizer that are finite."""
    places, ratios = [], []
    for place, task in enumerate(tasks):
        own, base = outcomes(task, optimizer), report.study.final_outcomes(task, ADAMW)
        if own is None or base is None:
            continue
        ratio = Score.of(own).mean / Score.of(base).mean
        if math.isfinite(ratio):
            places.append(place)
            ratios.append(ratio)
    style = {"linestyle": "", "marker": MARKERS[optimizer], "markersize": 6}
    color = palette.of_optimizer(optimizer).light
    panel.plot(ratios, places, color=color, label=CONTESTANTS[optimizer].title, **style)  # type: ignore[arg-type]


def _style(panel: Axes, title: str, tasks: list[str]) -> None:
    panel.axvline(1, color=palette.SOFT.light, linewidth=0.8)
    developed = sum(task in DEVELOPMENT for task in tasks)
    if 0 < developed < len(tasks):
        panel.axhline(developed - 0.5, color=palette.SOFT.light, linewidth=0.8, linestyle=":")
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter() if _spans_a_decade(panel) else "{x:g}")
    panel.tick_params(axis="x", which="both", labelsize=8)
    panel.set_yticks(range(len(tasks)), tasks)
    panel.set_ylim(len(tasks) - 0.5, -0.5)
    panel.set_xlabel("test measure as a multiple of AdamW's")
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3, which="both", axis="x")
    panel.spines[["top", "right"]].set_visible(False)


def _spans_a_decade(panel: Axes) -> bool:
    low, high = panel.get_xlim()
    return high / low > 10
