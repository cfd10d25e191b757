"""Line charts, heat maps and small pictures of matrices as SVG, for pages and as files.

A drawing in a page has the colours of the page, which change with its scheme. A file has a white ground.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from . import palette
from .palette import Color

INK, GRID = palette.INK.light, palette.LINE.light
MOST_POINTS = 200
"""The even points of a longer line that are drawn, and as many at even ratios, which the start of a line needs."""


DASHES: tuple[Sequence[float], ...] = ((), (4, 2), (1, 1.5), (6, 2, 1, 2))
"""The dashes of lines of one colour: solid, dashed, dotted, and both."""


class Drawing(Protocol):
    """What a document shows beside text."""

    @property
    def title(self) -> str: ...

    def inline(self) -> str:
        """Return an element of a page, which is as wide as its container."""
        ...

    def file(self) -> str:
        """Return the content of an SVG file."""
        ...


@dataclass(frozen=True)
class Line:
    """A curve of a chart. ``low`` and ``high`` are the bounds of a band around it."""

    name: str
    color: Color
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    width: float = 1.8
    dashes: Sequence[float] = ()
    """The lengths of strokes and gaps in widths of the line, see :data:`DASHES`. A solid line has none."""

    def thinned(self) -> Line:
        """Return the line with as many points as a chart can show."""
        count = len(self.x)
        if count <= 2 * MOST_POINTS:
            return self
        places = {*np.linspace(0, count - 1, MOST_POINTS).round(), *np.geomspace(1, count, MOST_POINTS).round() - 1}
        kept = sorted(map(int, places))
        x, y, low, high = ([each[i] for i in kept] if each else () for each in (self.x, self.y, self.low, self.high))
        return replace(self, x=x, y=y, low=low, high=high)


@dataclass(frozen=True)
class Chart:
    """Lines against one axis.

    With ``log`` the y axis is logarithmic, with ``log_x`` the x axis. With ``from_zero`` the y axis begins at zero.
    With ``whole`` the x axis has whole numbers only.
    """

    title: str
    lines: Sequence[Line]
    x: str
    y: str
    log: bool = False
    log_x: bool = False
    from_zero: bool = False
    whole: bool = False

    def inline(self) -> str:
        """Return the chart without a legend. The page has one for all charts, see :func:`legend`."""
        return _inlined(self._drawn(), self.title)

    def file(self) -> str:
        """Return the chart with a legend below it."""
        return self._drawn(as_file=True)

    def _drawn(self, as_file: bool = False) -> str:
        with canvas(self.title, (5.2, 4.3 if as_file else 3.5), as_file) as (figure, panel, text):
            for line in self.lines:
                plot(panel, line.thinned())
            panel.set_xlabel(self.x, color=INK)
            panel.set_ylabel(self.y, color=INK)
            if self.lines:
                self._scale(panel)
            panel.grid(color=GRID, linewidth=0.8)
            panel.spines[["top", "right", "left"]].set_visible(False)
            if as_file:
                figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        return with_short_numbers(text.getvalue())

    def _scale(self, panel: Axes) -> None:
        if self.log:
            _scale_y(panel, self.lines)
        elif self.from_zero:
            panel.set_ylim(bottom=0)
        if self.log_x:
            panel.set_xscale("log")
        else:
            panel.set_xlim(left=min(line.x[0] for line in self.lines))
        if self.whole:
            whole_ticks(panel)


@dataclass(frozen=True)
class HeatMap:
    """Numbers by row and column. A cell is the darker, the larger its number. A cell without a number has a word."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    x: str
    y: str
    low: float
    """The number of the lightest cell. Several maps with the same ends can be compared."""
    high: float
    absent: str = "diverged"

    def inline(self) -> str:
        return _inlined(self._drawn(), self.title)

    def file(self) -> str:
        return self._drawn(as_file=True)

    def _drawn(self, as_file: bool = False) -> str:
        with canvas(self.title, (5.2, 1.5 + 0.5 * len(self.rows)), as_file) as (_, panel, text):
            numbers = np.array([[np.nan if value is None else value for value in row] for row in self.values])
            ground = palette.PAGE.light
            panel.pcolormesh(numbers, cmap="viridis_r", vmin=self.low, vmax=self.high, edgecolors=ground, linewidth=2)
            for (i, j), value in np.ndenumerate(numbers):
                shown = self.absent if np.isnan(value) else f"{value:.1f}"
                panel.text(j + 0.5, i + 0.5, shown, ha="center", va="center", color=self._text_color(value))
            panel.set_xticks([j + 0.5 for j in range(len(self.columns))], self.columns)
            panel.set_yticks([i + 0.5 for i in range(len(self.rows))], self.rows)
            panel.invert_yaxis()
            panel.set_xlabel(self.x, color=INK)
            panel.set_ylabel(self.y, color=INK)
            panel.spines[:].set_visible(False)
        return with_short_numbers(text.getvalue())

    def _text_color(self, value: float) -> str:
        if np.isnan(value):
            return palette.RED.light
        return palette.ON_DARK if value > (self.low + self.high) / 2 else palette.ON_LIGHT


@contextmanager
def canvas(title: str, size: tuple[float, float], as_file: bool) -> Iterator[tuple[Figure, Axes, io.StringIO]]:
    """Give a figure, its panel, and the stream to which the SVG is written at the end."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "text.color": INK, "font.size": 10}):
        figure = Figure(figsize=size, layout="constrained", facecolor=palette.PAGE.light if as_file else "none")
        panel = figure.subplots()
        panel.set_facecolor("none")
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=10)
        text = io.StringIO()
        yield figure, panel, text
        panel.tick_params(which="both", color=GRID, labelcolor=INK, length=0)
        panel.spines["bottom"].set_color(GRID)
        figure.savefig(text, format="svg", metadata={"Date": None})


def with_short_numbers(svg: str) -> str:
    """Return a drawing whose paths have two decimals: matplotlib writes six, which make files twice as large."""
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)


def whole_ticks(panel: Axes) -> None:
    """Put the ticks of the x axis at whole numbers."""
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def plot(panel: Axes, line: Line) -> None:
    """Draw a line and its band, in the colours for a light ground."""
    style: dict[str, Any] = {
        "color": line.color.light,
        "linewidth": line.width,
        "linestyle": (0, line.dashes) if line.dashes else "-",
        "label": line.name,
    }
    panel.plot(line.x, line.y, **style, solid_capstyle="round", marker="o" if len(line.x) == 1 else None)
    if line.low:
        panel.fill_between(line.x, line.low, line.high, color=line.color.light, alpha=0.14, linewidth=0)


def _scale_y(panel: Axes, lines: Sequence[Line]) -> None:
    """Make the y axis logarithmic."""
    panel.set_yscale("log")
    if _decades(lines) < 3:  # ticks at powers of ten alone would be too few
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())


def _decades(lines: Sequence[Line]) -> float:
    """Return how many powers of ten the values of the lines span."""
    values = [value for line in lines for value in line.y]
    return math.log10(max(values) / min(values))


def _inlined(svg: str, title: str) -> str:
    """Convert a file of matplotlib to an element of a page.

    The element has no header, no fixed size, and no identifiers that another chart may have too.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg)
    label = f'<svg class="chart" role="img" aria-label="{html.escape(title)}"'
    return palette.with_variables(svg).replace("<svg", label, 1)


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


def legend(lines: Sequence[Line]) -> str:
    """Return the names of the lines as an HTML list, each with a sample of its line."""
    items = "".join(
        f'<li><svg viewBox="0 0 26 6" aria-hidden="true"><line x1="1" x2="25" y1="3" y2="3" '
        f'style="stroke: {line.color.variable}" stroke-width="{1.4 * line.width:.1f}"{_dash_array(line)}/></svg>'
        f"{html.escape(line.name)}</li>"
        for line in lines
    )
    return f'<ul class="legend">{items}</ul>'


def _dash_array(line: Line) -> str:
    lengths = " ".join(f"{1.6 * part:.1f}" for part in line.dashes)
    return f' stroke-dasharray="{lengths}"' if lengths else ""
