"""What is shown while a fit runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .psis import pareto_smooth
from .schedule import GLANCE, WINDOW, History

Progress = Callable[[int, float, float, float], None]
"""Called every few steps with the number of steps, the bound, k-hat so far and the seconds."""


class Report(AbstractContextManager["Report"]):
    """Tells somebody how the fit goes; this one tells nobody."""

    def step(self, history: History, log_ratios: list[Tensor]) -> None:
        """Receive, after each step, the history and the log ratios of the last steps' draws."""

    def __exit__(self, *exception: object) -> None:
        return None


class Calls(Report):
    """Calls a function every few steps."""

    def __init__(self, function: Progress) -> None:
        self._function = function

    def step(self, history: History, log_ratios: list[Tensor]) -> None:
        if len(history) % GLANCE == 0:
            elbo = torch.tensor(history.elbo[-WINDOW:]).mean()
            self._function(len(history), float(elbo), pareto_smooth(torch.cat(log_ratios)).khat, history.seconds[-1])


class Bar(Calls):
    """A bar of the package rich, on the error stream."""

    def __init__(self, max_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}")]
        self._bar = RichProgress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
        self._task = self._bar.add_task("fit", total=max_steps)
        super().__init__(self._show)

    def _show(self, steps: int, elbo: float, khat: float, seconds: float) -> None:
        self._bar.update(self._task, completed=steps, description=f"elbo {elbo:.2f}, k-hat {khat:.2f}")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


class Lines(Calls):
    """The same without rich: one line that is written anew."""

    def __init__(self) -> None:
        super().__init__(self._show)

    def _show(self, steps: int, elbo: float, khat: float, seconds: float) -> None:
        print(f"\rstep {steps}: elbo {elbo:.2f}, k-hat {khat:.2f}, {seconds:.1f} s", end="", file=sys.stderr)

    def __exit__(self, *exception: object) -> None:
        print(file=sys.stderr)


def reporter(progress: bool | Progress, max_steps: int) -> Report:
    """Return the report that the argument ``progress`` asks for."""
    if callable(progress):
        return Calls(progress)
    if not progress:
        return Report()
    return Bar(max_steps) if importlib.util.find_spec("rich") else Lines()
