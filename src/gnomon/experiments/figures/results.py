"""The curves of an experiment, grouped and summarized in tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from ..common.trials import Curve

Group = list[Curve]
"""The curves of one method with one setting, one curve for each seed."""


class Results:
    """The curves of an experiment, grouped by panel, method and settings."""

    def __init__(self, curves: list[Curve]) -> None:
        self.curves = curves
        self.minima = _minima(curves)
        """The least known loss, by panel and seed."""
        self._groups: dict[str, list[Group]] = {}
        for panel in dict.fromkeys(curve.panel for curve in curves):
            groups = self.groups(panel)
            shared = [group for group in groups if group[0].shared]
            best = [min(of_method, key=_rank) for of_method in _by_method(groups)]
            if shared:
                self._groups[f"{panel}: the same step for all, {_words(shared[0][0].settings)}"] = shared
            self._groups[f"{panel}: each method with its own best settings"] = best

    def groups(self, panel: str) -> list[Group]:
        """Return the curves of a problem, in a group for each method and setting."""
        groups: dict[tuple[str, str], Group] = {}
        for curve in self.curves:
            if curve.panel == panel:
                groups.setdefault((curve.method, _words(curve.settings)), []).append(curve)
        return list(groups.values())

    def panels(self) -> dict[str, list[Group]]:
        """Return the groups that are drawn together, by title: one group of each method."""
        return self._groups

    def shares(self, curve: Curve) -> list[float]:
        """Return the gaps of a curve as shares of its first gap."""
        minimum = self.minima[curve.panel, curve.seed]
        first = curve.loss[0] - minimum or 1.0  # of a lone curve that ends above its start
        return [(loss - minimum) / first for loss in curve.loss]

    def table(self, title: str) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of a panel's table. Each method has a row."""
        columns = self._columns(self._groups[title][0][0])
        rows = [[show(group) for show in columns.values()] for group in self._groups[title]]
        return list(columns), rows

    def _columns(self, example: Curve) -> dict[str, Callable[[Group], str]]:
        """Return the columns that make sense for curves like the example."""
        columns: dict[str, Callable[[Group], str]] = {
            "method": lambda group: group[0].method,
            "settings": lambda group: _words(group[0].settings),
            "CPU ms/it.": lambda group: f"{1e3 * _median(group, lambda c: c.seconds_per_iteration):.2f}",
        }
        if example.minimum is not None:
            columns["final gap"] = lambda group: _number(
                average(group, lambda c: c.final - self.minima[c.panel, c.seed]), "e"
            )
            columns["iterations"] = lambda group: _number(average(group, Curve.iterations_to_solve), "f")
        else:
            columns["final loss"] = lambda group: _number(average(group, lambda c: c.final), "g")
            columns["off by"] = lambda group: f"{max(max(c.notes.values(), default=0.0) for c in group):.2g}"
        if example.evaluations:
            columns["gradients"] = lambda group: _number(average(group, lambda c: _spent(c, c.evaluations)), "f")
            columns["CPU s"] = lambda group: f"{average(group, lambda c: _spent(c, c.seconds)):.2f}"
        return columns


def _minima(curves: list[Curve]) -> dict[tuple[str, int], float]:
    minima: dict[tuple[str, int], float] = {}
    for curve in curves:
        key = curve.panel, curve.seed
        minima[key] = min(minima.get(key, math.inf), _least(curve))
    return minima


def _least(curve: Curve) -> float:
    return curve.minimum if curve.minimum is not None else min(curve.loss, default=math.inf)


def _by_method(groups: list[Group]) -> list[list[Group]]:
    methods: dict[str, list[Group]] = {}
    for group in groups:
        methods.setdefault(group[0].method, []).append(group)
    return list(methods.values())


def _rank(group: Group) -> tuple[float, float]:
    """Order groups by the iterations that solve the problem, then by the final loss."""
    return average(group, Curve.iterations_to_solve), average(group, lambda curve: curve.final)


def _spent(curve: Curve, along: list[float]) -> float:
    """Return what was spent until the problem was solved, or in all if it was not solved."""
    iterations = curve.iterations_to_solve()
    return along[int(iterations) if math.isfinite(iterations) else -1] if along else math.nan


def average(group: Group, quantity: Callable[[Curve], float]) -> float:
    """Return the mean of a quantity over the curves of a group."""
    return sum(map(quantity, group)) / len(group)


def _median(group: Group, quantity: Callable[[Curve], float]) -> float:
    return statistics.median(map(quantity, group))


def _number(value: float, style: str) -> str:
    return {"e": f"{value:.1e}", "f": f"{value:.0f}", "g": f"{value:.5f}"}[style] if math.isfinite(value) else "-"


def _words(settings: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())
