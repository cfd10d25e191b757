"""The run of ``gnomon bench``: models one after the other, each with the optimizers that were asked for."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..common.machine import multiplication_rate
from .limit import limit
from .measure import measure
from .models import MODELS, Model
from .optimizers import Contestant, contestants
from .report import LEGEND, Report, terminal_table, write


def selected(model: Model, patterns: list[str]) -> list[Contestant]:
    """Return the contestants whose names match one of the patterns, or all if there are no patterns."""
    found = contestants(model)
    if not patterns:
        return found
    return [c for c in found if any(fnmatchcase(c.name.lower(), pattern.lower()) for pattern in patterns)]


def check_patterns(names: list[str], patterns: list[str]) -> None:
    """Raise for a pattern that no contestant of these models matches."""
    for pattern in patterns:
        if not any(selected(MODELS[name], [pattern]) for name in names):
            raise ValueError(
                f"{pattern!r} matches no optimizer of {', '.join(names)}; --list shows their names, and * stands for "
                "any characters, as in 'INGD*'"
            )


def listing(names: list[str], patterns: list[str]) -> str:
    """Return the names of the contestants of each model, as text."""
    parts = []
    for name in names:
        lines = [
            f"  {c.name}" + ("" if c.installed else f" ({c.package} is not installed)")
            for c in selected(MODELS[name], patterns)
        ]
        parts.append("\n".join([f"{name}: {MODELS[name].title}", *lines]))
    return "\n\n".join(parts)


# ---------------------------------------------------------------------- running
def bench(
    names: list[str],
    patterns: list[str],
    rounds: int,
    with_limit: bool,
    output: Path,
    console: Console | None = None,
) -> list[Report]:
    """Measure the models one after the other. The results of each are printed and written when it is finished."""
    console = console or Console()
    output.mkdir(parents=True, exist_ok=True)
    reports: list[Report] = []
    for name in names:
        reports.append(measured_model(MODELS[name], selected(MODELS[name], patterns), rounds, with_limit, console))
        console.print(terminal_table(reports[-1].page, console.width))
        for who, why in reports[-1].page.failures.items():
            console.print(f"not measured: {who}: {why}", soft_wrap=True, highlight=False, markup=False)
        write(reports, output)
    console.print(f"\n{LEGEND}", highlight=False)
    console.print(f"Results: {output / 'results.json'}, table.md and a chart of each model", soft_wrap=True)
    return reports


def measured_model(
    model: Model, chosen: list[Contestant], rounds: int, with_limit: bool, console: Console | None = None
) -> Report:
    """Measure one model. Limits are added if they are asked for and known."""
    with warnings.catch_warnings(), Progress(console=console, transient=True) as progress:
        warnings.simplefilter("ignore")  # other packages warn that parts of them are slow
        bar = progress.add_task(model.name, total=(len(chosen) + 2) * (rounds + 1))

        def show(what: str) -> None:
            progress.update(bar, advance=1, description=f"{model.name}: {what}")

        report = Report(model, measure(model, chosen, rounds, show))
    if with_limit:
        rate = multiplication_rate()
        for contestant in chosen:
            if contestant.has_limit:
                report.find(contestant).limit = limit(model, contestant.settings, rate)
    return report
