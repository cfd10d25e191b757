"""The results of ``gnomon bench`` as tables, charts and JSON."""

from __future__ import annotations

import json
import math
import platform
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.table import Table

from ... import __version__
from ..common import palette
from ..common.files import write_atomically
from ..common.plots import save_png
from ..common.tables import markdown_table, titled_table
from .measure import Figures
from .models import Model
from .optimizers import GRADIENT_ONLY, UNIT, Contestant

PACKAGES = ("torch", "singd", "pytorch_optimizer")
NARROW = 100
"""A terminal with fewer columns does not show the quartiles."""
LEGEND = (
    "x SGD: the CPU time of a step, divided by that of a step of SGD just before it; the median over the turns, with "
    "quartiles. ms: this ratio times the median of SGD. work: the share of the time that is not for the gradient. "
    "state: the memory of the optimizer between steps. peak: the memory that a step needs in addition to the state and "
    "the gradient. limit: the least time that INGD's multiplications could take. work / limit: the measured time of "
    "that work, divided by the limit."
)


@dataclass(frozen=True)
class Page:
    """The part of a report that is shown and stored."""

    title: str
    measured: list[dict[str, Any]]
    """The summaries of the contestants that did not fail."""
    failures: dict[str, str]
    """The errors of the contestants that failed, by name."""


@dataclass
class Report:
    """All figures of one model."""

    model: Model
    figures: list[Figures]

    def find(self, contestant: Contestant) -> Figures:
        """Return the figures of a contestant."""
        return next(f for f in self.figures if f.name == contestant.name)

    @property
    def page(self) -> Page:
        """The summaries and the failures of all contestants."""
        measured = [self._summary(figures) for figures in self.figures if figures.failure is None]
        failures = {figures.name: figures.failure for figures in self.figures if figures.failure is not None}
        return Page(self.model.title, measured, failures)

    def _summary(self, figures: Figures) -> dict[str, Any]:
        gradient, least = self.find(GRADIENT_ONLY), figures.limit
        unit = statistics.median(self.find(UNIT).seconds)
        work = (figures.multiple - gradient.multiple) * unit
        return {
            "name": figures.name,
            "seconds": figures.multiple * unit,
            "turns": len(figures.seconds),
            "multiple": figures.multiple,
            "quartiles": [figures.quartiles[0], figures.quartiles[2]],
            "work": work,
            "part of work": work / (figures.multiple * unit),
            "state bytes": figures.state_bytes,
            "peak bytes": figures.peak_bytes - gradient.peak_bytes,
            "limit": least,
            "multiple at the limit": None if least is None else gradient.multiple + least / unit,
            "work over limit": None if least is None else work / least,
        }


def write(reports: list[Report], output: Path) -> None:
    """Write the JSON file, the tables and the charts."""
    write_atomically(output / "results.json", json.dumps(as_data(reports), indent=1) + "\n")
    tables = "\n\n".join(markdown(report.page) for report in reports)
    write_atomically(output / "table.md", f"{tables}\n\n{LEGEND}\n\n{machine()}\n")
    for report in reports:
        chart([report.page], output / f"{report.model.name}.png")


def as_data(reports: list[Report]) -> dict[str, Any]:
    """Return all measurements for the JSON file. Seconds are those of one step."""
    return {
        "machine": machine(),
        "models": {
            report.model.name: {
                **asdict(report.page),
                "seconds": {figures.name: figures.seconds for figures in report.figures if figures.seconds},
            }
            for report in reports
        },
    }


def machine() -> str:
    """Describe the machine and the versions of the packages."""
    versions = [f"gnomon {__version__}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    cpu = platform.processor() or platform.machine()
    return f"{cpu}; Python {platform.python_version()}, {', '.join(versions)}; {torch.get_num_threads()} BLAS thread"


def cells(page: Page) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table. The columns of limits are there only if a limit is known."""
    header = ["optimizer", "ms", "x SGD", "quartiles", "work", "state MB", "peak MB"]
    with_limit = any(row["limit"] is not None for row in page.measured)
    rows = []
    for row in page.measured:
        low, high = row["quartiles"]
        line = [row["name"], f"{1e3 * row['seconds']:.1f}", f"{row['multiple']:.2f}", f"{low:.2f}-{high:.2f}"]
        line += [
            f"{100 * row['part of work']:.0f}%",
            f"{row['state bytes'] / 1e6:.1f}",
            f"{row['peak bytes'] / 1e6:.1f}",
        ]
        if with_limit and row["limit"] is not None:
            line += [f"{1e3 * row['limit']:.1f}", f"{row['work over limit']:.1f}"]
        elif with_limit:
            line += ["", ""]
        rows.append(line)
    return [*header, "limit ms", "work / limit"] if with_limit else header, rows


def markdown(page: Page) -> str:
    """Return the table of a model as Markdown, and the failures."""
    header, rows = cells(page)
    table = markdown_table(header, rows, left=header[:1])
    failures = "".join(f"\n- not measured: {who}: {why}" for who, why in page.failures.items())
    return f"### {page.title}\n\n{table}" + (f"\n{failures}" if failures else "")


def terminal_table(page: Page, width: int) -> Table:
    """Return the table of a model for a terminal."""
    header, rows = cells(page)
    shown = [i for i, name in enumerate(header) if name != "quartiles" or width >= NARROW]
    table = titled_table(page.title, padding=(0, 1, 0, 0))
    for i in shown:
        words = header[i] == "optimizer"
        table.add_column(header[i], justify="left" if words else "right", no_wrap=words)
    for row in rows:
        table.add_row(*[row[i] for i in shown])
    return table


def chart(pages: list[Page], path: Path) -> None:
    """Draw bars of the time of a step as a multiple of SGD's. Each model has a panel, and two panels fit in a row."""
    longest = max(len(page.measured) for page in pages)
    columns = min(len(pages), 2)
    lines = math.ceil(len(pages) / columns)
    canvas = Figure(figsize=(6.5 * columns, lines * (1.5 + 0.24 * longest)), layout="constrained")
    for place, page in enumerate(pages, start=1):
        _bars(canvas.add_subplot(lines, columns, place), page)
    save_png(canvas, path)


def _bars(axes: Axes, page: Page) -> None:
    """Draw the bars of a model. They begin at SGD's time.

    The axis is logarithmic, because some times are hundreds of times as long as others.
    """
    rows = page.measured
    for place, row in enumerate(rows):
        low, high = row["quartiles"]
        color = palette.of_optimizer(row["name"])
        axes.barh(place, row["multiple"] - 1, left=1, color=color.light, height=0.7)
        axes.plot([low, high], [place, place], color="black", linewidth=1)
        text = f"{row['multiple']:.2f}" if row["multiple"] < 10 else f"{row['multiple']:.0f}"
        axes.annotate(text, (max(high, 1), place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    limits = [(row["multiple at the limit"], place) for place, row in enumerate(rows) if row["limit"] is not None]
    if limits:
        axes.plot(*zip(*limits, strict=True), "k|", markersize=11, markeredgewidth=2, label="limit of this machine")
        axes.legend(frameon=False, fontsize=8)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    longest = max(row["quartiles"][1] for row in rows)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if longest > 10 else (1, 1.5, 2, 3, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(right=1.4 * longest)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("CPU time of a step, as a multiple of SGD's")
    axes.set_title(page.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
