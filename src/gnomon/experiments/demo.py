"""The demonstration: one network with four optimizers, and one matrix on two structures."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.optim import SGD

from ..groups import Dense, Element, Group, Heisenberg
from ..manifolds import SPD
from ..optim import moving_frame
from .demo_report import report_page
from .files import write_atomically
from .manifold import descend
from .training.compare import Group as Runs
from .training.compare import score_text
from .training.config import Config, TrainingError, completed
from .training.optimizers import TITLES
from .training.run import train
from .training.trainer import Epoch, seed_of
from .trials import SOLVED, Curve, Recorder, Trial

RATES = {"sgd": 0.1, "adamw": 0.01, "kfac": 0.01, "ingd": 0.01}
"""Each optimizer's best of five: half powers of ten from 0.01 to 1 (SGD), 0.0003 to 0.03 (AdamW) and 0.001 to 0.1
(KFAC, INGD), by the mean loss of seeds 100 to 102 on a fifth of the training set that was held out, after as many
epochs as here. None is at an end of its range."""

RATE = 0.1
"""For the matrices: the best of 0.03, 0.1 and 0.3 on the full manifold, with and without momentum."""

MOMENTA = (0.0, 0.7)

GOAL = 5.0
"""The test error in % whose price the table tells."""

Step = Callable[[str], None]
Cells = tuple[list[str], list[list[str]]]
"""The header and the rows of a table."""


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    epochs: int = 10
    seeds: int = 5
    k: int = 400
    iterations: int = 200


def demo(output: Path, seed: int = 0, scale: Scale | None = None, console: Console | None = None) -> Path:
    """Run everything, print two tables and write the report, whose path is returned."""
    console, scale = console or Console(), scale or Scale()
    _check_writable(output)
    with _progress(console, total=len(RATES) * scale.seeds + 2 * len(MOMENTA)) as step:
        networks = train_networks(scale, seed, step)
        matrices = fit_matrices(scale, seed, step)
    tables = network_table(networks), matrix_table(matrices)
    titles = (
        "One network, four optimizers (digits, test error in %)",
        f"One matrix, two structures (until the gap is {SOLVED:g} of the first)",
    )
    for title, table in zip(titles, tables, strict=True):
        console.print(_terminal_table(title, *table))
    report = output / "report.html"
    write_atomically(report, report_page(networks, matrices, *tables))
    console.print(f"Curves, and what they show, for your browser: {report}", soft_wrap=True, highlight=False)
    return report


def _check_writable(folder: Path) -> None:
    """Before the work, not after it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Step]:
    """A bar; what it gives is called with a name before each piece of work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total, completed=-1)
        yield lambda what: progress.update(bar, advance=1, description=what)


# ---------------------------------------------------------------------- the network
def train_networks(scale: Scale, seed: int, step: Step) -> list[Runs]:
    """Optimizers take turns, seed by seed: what slows the machine for a while slows all of them."""
    base = Config(epochs=scale.epochs, schedule="cosine", device="cpu")
    configs = [completed(replace(base, optimizer=name, lr=lr)) for name, lr in RATES.items()]
    _train(Config(epochs=1, device="cpu"))  # torch's first steps take long, and no optimizer should pay for that
    runs: list[list[list[Epoch]]] = [[] for _ in configs]
    for number in range(seed, seed + scale.seeds):
        for config, done in zip(configs, runs, strict=True):
            step(f"{TITLES[config.optimizer]}, seed {number}")
            done.append(_train(replace(config, seed=number)))
    return [Runs(config, done) for config, done in zip(configs, runs, strict=True)]


def _train(config: Config) -> list[Epoch]:
    outcome = train(config)
    if outcome.signal is not None:
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise TrainingError(f"{TITLES[config.optimizer]}: {outcome.failure}; choose another --seed")
    return outcome.epochs


def network_table(networks: list[Runs]) -> Cells:
    header = ["optimizer", "rate", f"epochs to {GOAL:g} %", f"CPU s to {GOAL:g} %", "CPU s/epoch", "final error"]
    return header, [
        [
            TITLES[runs.config.optimizer],
            f"{runs.config.lr:g}",
            _number(_mean_until_goal(runs, lambda epoch: epoch.epoch), 1),
            _number(_mean_until_goal(runs, lambda epoch: epoch.cpu_seconds), 2),
            _number(mean(run[-1].cpu_seconds / len(run) for run in runs.runs), 3),
            score_text(runs, last=1),
        ]
        for runs in networks
    ]


def _mean_until_goal(runs: Runs, what: Callable[[Epoch], float]) -> float:
    """A quantity at the first epoch whose error is at the goal; infinite where a run does not come there."""
    return mean(next((what(epoch) for epoch in run if epoch.test_error <= GOAL), math.inf) for run in runs.runs)


# ---------------------------------------------------------------------- the matrix
def fit_matrices(scale: Scale, seed: int, step: Step) -> list[Curve]:
    """Find S from pairs ``y_i = S*^-1 x_i``, with ``S*`` on a submanifold: there, and on the full manifold."""
    generator = torch.Generator().manual_seed(seed_of(seed, "matrix"))
    structure = Heisenberg(scale.k, head=5, tail=5)
    x, y = _pairs(structure, generator)
    curves = []
    for name, group in {"full": Dense(scale.k), "Heisenberg": structure}.items():
        for momentum in MOMENTA:
            step(f"{name} matrix, momentum {momentum:g}")
            trial = Trial(
                panel=name,
                method=f"{name}, {f'momentum {momentum:g}' if momentum else 'no momentum'}",
                settings={"lr": RATE, "momentum": momentum},
                seed=seed,
                sizes={"k": scale.k, "iterations": scale.iterations},
                run=_descent(group, x, y, momentum, scale.iterations),
                minimum=0.0,
            )
            curve = trial()
            curve.notes["dimension"] = group.dim
            curves.append(curve)
    return curves


def _pairs(group: Group, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Vectors x, and what the inverse of a matrix of this structure makes of them.

    There are 4 k random ones, given by k that have the same second moment: the loss, and so the curves, are the same.
    """
    k = group.k
    blocks = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in group.shapes]
    element: Element = tuple(0.27 * (b / max(b.shape) ** 0.5 if b.ndim == 2 else b) for b in blocks)
    factor = group.exp(element)
    samples = torch.randn(4 * k, k, dtype=torch.float64, generator=generator)
    x = torch.linalg.qr(samples, mode="r").R / len(samples) ** 0.5
    return x, group.rsolve(factor, group.solve(factor, x))


def _descent(group: Group, x: Tensor, y: Tensor, momentum: float, iterations: int) -> Callable[[Recorder], None]:
    def run(record: Recorder) -> None:
        point = SPD(group, dtype=torch.float64)
        optimizer = moving_frame(SGD(point.parameters(), lr=RATE, momentum=momentum), max_step=1.0)
        descend(lambda: 0.5 * (point.matvec(y) - x).square().sum(), [optimizer], iterations, record, lambda: None)

    return run


def matrix_table(curves: list[Curve]) -> Cells:
    header = ["structure", "unknowns", "momentum", "iterations", "CPU s", "ms/it."]
    return header, [_matrix_row(curve) for curve in curves]


def _matrix_row(curve: Curve) -> list[str]:
    """What it took to bring the gap to ``SOLVED`` of the first one, or that all of it was not enough."""
    solved = curve.iterations_to_solve()
    spent, more = (int(solved), "") if math.isfinite(solved) else (-1, "> ")
    return [
        curve.panel,
        f"{curve.notes['dimension']:,.0f}",
        f"{curve.settings['momentum']:g}",
        f"{more}{len(curve.loss[1:]) if more else spent}",
        f"{more}{curve.seconds[spent]:.1f}",
        f"{1e3 * curve.seconds_per_iteration:.1f}",
    ]


# ---------------------------------------------------------------------- the terminal
def _number(value: float, digits: int) -> str:
    """A dash for what was not reached."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _terminal_table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
