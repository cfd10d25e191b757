"""Charts of the gap in the style of the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from ..common import palette
from ..common.svg import DASHES, Chart, Line
from ..common.trials import Curve
from .results import Group, Results

FLOOR, FLOOR_OF_GUESSES = 1e-13, 1e-4
"""Smaller shares of the initial gap are drawn at this value.

They are rounding errors. Where the minimum is not known, the least loss that was found takes its place: the best run
ends there by definition, and the second value is drawn.
"""
CEILING = 10.0
"""Larger shares are those of methods that diverge. They are drawn at this value."""

Axis = Callable[[Curve], Sequence[float]]
AXES: dict[str, tuple[str, str, Axis]] = {
    "iterations": ("By iteration", "iteration", lambda curve: range(len(curve.loss))),
    "evaluations": ("By work", "gradients (a Hessian-vector product: 2)", lambda curve: curve.evaluations),
    "time": ("By time", "CPU seconds", lambda curve: curve.seconds),
}


def gap_chart(results: Results, groups: list[Group], axis: str, log_axis: bool) -> Chart:
    """Return a chart of the gap, as a share of the first gap, against one axis. Each method has a line."""
    title, label, along = AXES[axis]
    # Where lines coincide, the thinner one is on top.
    widths = [max(3.2 - 0.35 * place, 1.2) for place in range(len(groups))]
    found = [_line(results, *pair, along, log_axis) for pair in zip(groups, widths, strict=True)]
    lines = [line for line in found if line is not None]
    y = "gap, as a share of the first"
    return Chart(title, lines, label, y, log=True, log_x=log_axis, whole=axis == "iterations")


def _line(results: Results, group: Group, width: float, along: Axis, log_axis: bool) -> Line | None:
    """Return the median over data sets, and the range as a band. A group that failed at once has no line."""
    points = min(len(curve.loss) for curve in group)
    start = 1 if log_axis else 0  # nothing is spent at the first point, which a logarithmic axis does not show
    if points <= start:
        return None
    floor = FLOOR if group[0].minimum is not None else FLOOR_OF_GUESSES
    shares = [[min(max(share, floor), CEILING) for share in results.shares(curve)[start:points]] for curve in group]
    x = _across([along(curve)[start:points] for curve in group], median)
    band = {"low": _across(shares, min), "high": _across(shares, max)} if len(group) > 1 else {}
    method = group[0].method
    # A variant of a method, named after a comma, has the same colour.
    color, dashes = palette.of_method(method), DASHES["," in method]
    return Line(method, color, x, _across(shares, median), width=width, dashes=dashes, **band)


def _across(rows: Sequence[Sequence[float]], summary: Callable[[Sequence[float]], float]) -> list[float]:
    """Return a summary of all rows at each place."""
    return [summary(values) for values in zip(*rows, strict=True)]
