"""The demonstration: a full matrix, a structured matrix and a Gaussian, each with a known optimum."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, Optimizer

from .. import groups
from ..manifolds import SPD, Gaussian, Point
from ..optim import moving_frame
from ..problems import MetricNearness

Methods = dict[str, Callable[[Iterator[Tensor]], Optimizer]]

HEISENBERG = groups.Heisenberg(2000, head=5, tail=5)


@dataclass(frozen=True)
class Task:
    """A point to start from, a loss with a known minimum, and the methods to try."""

    title: str
    structure: str
    start: Callable[[], Point]
    loss: Callable[[Point], Tensor]
    minimum: float
    methods: Methods
    max_step: float | None = None


@dataclass
class Outcome:
    """How one method went: the gap to the optimum before each iteration and after the last."""

    task: Task
    method: str
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0


def lbfgs(parameters: Iterator[Tensor]) -> LBFGS:
    """One iteration a step, so that curves compare; max_eval leaves room for the line search."""
    return LBFGS(
        list(parameters),
        max_iter=1,
        max_eval=30,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )


def methods(lr: float, momentum: float) -> Methods:
    """Stock optimizers; SGD with and without momentum at one learning rate."""
    return {
        "SGD": lambda p: SGD(p, lr=lr),
        "SGD, momentum": lambda p: SGD(p, lr=lr, momentum=momentum),
        "Adam": lambda p: Adam(p, lr=0.1),
        "L-BFGS": lbfgs,
    }


def full_matrix(generator: torch.Generator) -> Task:
    k = 50
    problem = MetricNearness.random(k, generator=generator)

    def loss(point: Point) -> Tensor:
        assert isinstance(point, SPD)
        return problem(point)

    return Task(
        title="nearness",
        structure=f"full, k = {k}",
        start=lambda: SPD(k, dtype=torch.float64),
        loss=loss,
        minimum=problem.minimum,
        methods=methods(lr=0.1, momentum=0.6),
        max_step=1.0,
    )


def structured_matrix(generator: torch.Generator) -> Task:
    """Log-det with the optimum on the submanifold: ``<S*^-1, S> = ||A*^-1 A||^2``, all at the cost of the structure."""
    group, k = HEISENBERG, HEISENBERG.k
    blocks = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in group.shapes]
    target = group.exp(tuple(block / max(block.shape) ** 0.5 if block.ndim == 2 else 0.5 * block for block in blocks))

    def loss(point: Point) -> Tensor:
        assert isinstance(point, SPD)
        return group.squared_norm(group.ldiv(target, point.element())) - point.logdet()

    return Task(
        title="log-det",
        structure=f"Heisenberg {k}",
        start=lambda: SPD(group, dtype=torch.float64),
        loss=loss,
        minimum=k - 2 * group.logabsdet(target).item(),
        methods=methods(lr=0.2, momentum=0.5),
        max_step=5.0,
    )


def gaussian(generator: torch.Generator) -> Task:
    """Maximum likelihood: the optimum is the sample mean and covariance."""
    d, samples = 10, 2000
    mixing = torch.randn(d, d, dtype=torch.float64, generator=generator)
    x = torch.randn(samples, d, dtype=torch.float64, generator=generator) @ mixing + 3
    best = Gaussian(d, loc=x.mean(0), init=x.T.cov(correction=0))

    def loss(point: Point) -> Tensor:
        assert isinstance(point, Gaussian)
        return -point.log_prob(x).mean()

    return Task(
        title="Gaussian",
        structure=f"full, d = {d}",
        start=lambda: Gaussian(d, form="precision", init=10.0, dtype=torch.float64),
        loss=loss,
        minimum=-best.log_prob(x).mean().item(),
        methods=methods(lr=0.2, momentum=0.6),
        max_step=1.0,
    )


def run(task: Task, method: str, iterations: int, advance: Callable[[], None], tolerance: float = 1e-10) -> Outcome:
    """Minimize until the gap falls below ``tolerance`` or the iterations are used up."""
    outcome = Outcome(task, method)
    point = task.start()
    optimizer = moving_frame(task.methods[method](point.parameters()), max_step=task.max_step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(point)
        loss.backward()
        return loss

    def gap() -> float:
        with torch.no_grad():
            return max(task.loss(point).item() - task.minimum, 0.0)

    outcome.gaps.append(gap())
    for _ in range(iterations):
        start = time.perf_counter()
        optimizer.step(closure)  # type: ignore[arg-type]
        outcome.seconds += time.perf_counter() - start
        outcome.gaps.append(gap())
        advance()
        if outcome.gaps[-1] < tolerance:
            break
    return outcome


def results_table(outcomes: list[Outcome]) -> Table:
    table = Table(
        title="How close each method came to the known optimum (gap: loss minus its minimum)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    for name in ("problem", "structure", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("iterations", "final gap", "seconds"):
        table.add_column(name, justify="right")
    previous: Task | None = None
    for outcome in outcomes:
        first = outcome.task is not previous
        if first and previous is not None:
            table.add_section()
        previous = outcome.task
        table.add_row(
            outcome.task.title if first else "",
            outcome.task.structure if first else "",
            outcome.method,
            str(len(outcome.gaps) - 1),
            f"{outcome.gaps[-1]:.1e}",
            f"{outcome.seconds:.2f}",
        )
    return table


def plot(outcomes: list[Outcome], path: Path) -> None:
    """Gap against iterations, one panel a problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(outcome.task.title for outcome in outcomes))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4), squeeze=False)
    for axis, title in zip(axes[0], tasks, strict=True):
        for outcome in outcomes:
            if outcome.task.title == title:
                axis.semilogy([max(gap, 1e-16) for gap in outcome.gaps], label=outcome.method)
        structure = next(outcome.task.structure for outcome in outcomes if outcome.task.title == title)
        axis.set_title(f"{title}, {structure}", fontsize=10)
        axis.set_xlabel("iteration")
        axis.set_ylim(bottom=1e-11)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("gap to the optimum")
    axes[0][0].legend(fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def demo(output: Path, iterations: int = 200, seed: int = 0, console: Console | None = None) -> list[Outcome]:
    """Run everything, print the table, save the picture."""
    console = console or Console()
    generator = torch.Generator().manual_seed(seed)
    tasks = [build(generator) for build in (full_matrix, structured_matrix, gaussian)]
    outcomes = []
    with Progress(console=console, transient=True) as progress:
        for task in tasks:
            for method in task.methods:
                bar = progress.add_task(f"{task.title}: {method}", total=iterations)
                outcomes.append(run(task, method, iterations, functools.partial(progress.advance, bar)))
                progress.remove_task(bar)
    console.print(results_table(outcomes))
    console.print(
        f"Every method is a stock torch.optim optimizer behind gnomon.moving_frame.\n"
        f"Heisenberg: a structured {HEISENBERG.k} x {HEISENBERG.k} matrix in {HEISENBERG.numel:,} numbers.",
        soft_wrap=True,
    )
    picture = output / "demo.png"
    plot(outcomes, picture)
    console.print(f"Curves: {picture}", soft_wrap=True)
    return outcomes
