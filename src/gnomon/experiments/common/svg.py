"""Line charts and small pictures of matrices as inline SVG. Their colours are those of the page."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

# Matplotlib does not accept CSS variables. It draws with these colours, which are then replaced by the variables.
INK, GRID = "#010203", "#040506"
VARIABLES = {INK: "var(--ink)", GRID: "var(--line)"}


@dataclass(frozen=True)
class Line:
    """A curve of a chart. ``low`` and ``high`` are the bounds of a band around it."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    width: float = 1.8
    dashed: bool = False


def chart(lines: list[Line], title: str, x: str, y: str, *, log: bool = False, whole: bool = False) -> str:
    """Return a chart as an SVG that is as wide as its container.

    With ``log`` the y axis is logarithmic. With ``whole`` the x axis has whole numbers only.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "text.color": INK, "font.size": 10}):
        figure = Figure(figsize=(5.2, 3.5), layout="constrained", facecolor="none")
        panel = figure.subplots()
        panel.set_facecolor("none")
        for line in lines:
            _plot(panel, line)
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=10)
        panel.set_xlabel(x, color=INK)
        panel.set_ylabel(y, color=INK)
        _scale_y(panel, lines, log)
        panel.set_xlim(left=min(line.x[0] for line in lines))
        if whole:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(color=GRID, linewidth=0.8)
        panel.tick_params(which="both", color=GRID, labelcolor=INK, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color(GRID)
        stream = io.StringIO()
        figure.savefig(stream, format="svg")
    return _inline(stream.getvalue(), title)


def _plot(panel: Axes, line: Line) -> None:
    style: dict[str, Any] = {
        "color": line.color,
        "linewidth": line.width,
        "linestyle": (0, (4, 2)) if line.dashed else "-",
    }
    panel.plot(line.x, line.y, **style, solid_capstyle="round", marker="o" if len(line.x) == 1 else None)
    if line.low:
        panel.fill_between(line.x, line.low, line.high, color=line.color, alpha=0.14, linewidth=0)


def _scale_y(panel: Axes, lines: list[Line], log: bool) -> None:
    if not log:
        panel.set_ylim(bottom=0)
        return
    panel.set_yscale("log")
    if _decades(lines) < 3:  # ticks at powers of ten alone would be too few
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())


def _decades(lines: list[Line]) -> float:
    """Return how many powers of ten the values of the lines span."""
    values = [value for line in lines for value in line.y]
    return math.log10(max(values) / min(values))


def _inline(svg: str, title: str) -> str:
    """Convert a file of matplotlib to an element of a page.

    The element has no header, no fixed size, and no identifiers that another chart may have too.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return svg.replace("<svg", f'<svg class="chart" role="img" aria-label="{html.escape(title)}"', 1)


def cells(matrix: Tensor) -> str:
    """Return a picture of a matrix. A cell is the darker, the larger the absolute value of its entry."""
    shades = (matrix.abs() / matrix.abs().max().clamp_min(1e-12)).tolist()
    squares = "".join(
        f'<rect x="{j}" y="{i}" width="1" height="1" fill-opacity="{shade:.2f}"/>'
        for i, row in enumerate(shades)
        for j, shade in enumerate(row)
        if shade > 0
    )
    height, width = matrix.shape
    style = 'fill="currentColor" shape-rendering="crispEdges" aria-hidden="true"'
    return f'<svg class="cells" viewBox="0 0 {width} {height}" {style}>{squares}</svg>'


def legend(lines: list[Line]) -> str:
    """Return the names of the lines as an HTML list, each with a sample of its line."""
    items = "".join(
        f'<li><svg viewBox="0 0 26 6" aria-hidden="true"><line x1="1" x2="25" y1="3" y2="3" stroke="{line.color}" '
        f'stroke-width="{1.4 * line.width:.1f}"{_dashes(line)}/></svg>{html.escape(line.name)}</li>'
        for line in lines
    )
    return f'<ul class="legend">{items}</ul>'


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="6 3"' if line.dashed else ""
