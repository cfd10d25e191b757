"""Points at any learning rate: 300 steps of each optimizer on each structure and form, at the defaults.

    python benchmarks/safety.py [--quick] [--processes 2] [--runs FILE] [--limit 1000] [--write]

The runs are in float32. A run is safe if nothing is raised, every frame is finite, and the matrix is positive
definite to the end. The script ends with an error if a run is not safe, or if a loss has not fallen at a sensible rate.

The whole grid takes about 45 minutes of CPU time. With ``--runs`` each run is kept in a file of JSON lines, and a
second call does only those that are missing. ``--limit`` ends a grid early: with a random part of it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import math
import multiprocessing
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor, optim

import gnomon
from gnomon import groups as g

torch.set_num_threads(1)

K, SAMPLES, STEPS, LOOK_EVERY = 8, 20, 300, 25
RATES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
SENSIBLE = 0.1
"""Up to this rate every loss must fall."""
STRUCTURES: tuple[g.Group, ...] = (
    g.Dense(K),
    g.Triangular(K),
    g.Triangular(K, upper=True),
    g.Diagonal(K),
    g.BlockDiagonal(K, 3),
    g.BlockTriangular((g.Dense(3), g.Toeplitz(3), g.Diagonal(2))),
    g.Arrow(K, rank=2),
    g.Heisenberg(K, 2, 2),
    g.Toeplitz(K),
    g.Kronecker(g.Dense(2), g.Dense(4)),
    g.LowRank(K, 2),
)


class Velocity(optim.Optimizer):
    """An optimizer of a third party: it writes through ``.data`` and names its state in its own way."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(0.5).add_(p.grad)
                p.data.add_(velocity, alpha=-group["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any, float], optim.Optimizer]] = {
    "SGD": lambda p, lr: optim.SGD(p, lr),
    "SGD, momentum": lambda p, lr: optim.SGD(p, lr, momentum=0.9),
    "SGD, Nesterov": lambda p, lr: optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "Adam": lambda p, lr: optim.Adam(p, lr),
    "Adam, AMSGrad": lambda p, lr: optim.Adam(p, lr, amsgrad=True),
    "AdamW": lambda p, lr: optim.AdamW(p, lr),
    "RMSprop": lambda p, lr: optim.RMSprop(p, lr, momentum=0.5, centered=True),
    "Adagrad": lambda p, lr: optim.Adagrad(p, lr),
    "NAdam": lambda p, lr: optim.NAdam(p, lr),
    "Rprop": lambda p, lr: optim.Rprop(p, lr),
    "L-BFGS, line search": lambda p, lr: optim.LBFGS(p, lr, max_iter=2, line_search_fn="strong_wolfe"),
    "L-BFGS, one iteration": lambda p, lr: optim.LBFGS(p, lr, max_iter=1, max_eval=30, line_search_fn="strong_wolfe"),
    "L-BFGS, no search": lambda p, lr: optim.LBFGS(p, lr, max_iter=2),
    "third party": lambda p, lr: Velocity(p, lr),
}


# ---------------------------------------------------------------------- objectives
def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


ROWS = torch.randn(SAMPLES, K, generator=_generator(0)) @ torch.randn(K, K, generator=_generator(1)) + 1
LABELS = (ROWS @ torch.randn(K, generator=_generator(2)) > 0).float()


def likelihood(point: gnomon.SPD | gnomon.Gaussian) -> Tensor:
    """Minus the log-likelihood of more samples than features: it has one minimum."""
    if isinstance(point, gnomon.Gaussian):
        return -point.log_prob(ROWS).mean()
    return point.inv_quad(ROWS).mean() + point.logdet()


def elbo(q: gnomon.Gaussian, draws: int = 8) -> Tensor:
    """Minus the evidence lower bound of a logistic regression, by draws from the global generator."""
    weights = q.rsample((draws,))
    logits = weights @ ROWS.T
    errors = torch.nn.functional.binary_cross_entropy_with_logits(logits, LABELS.expand_as(logits), reduction="none")
    return (errors.sum(-1) + 0.5 * weights.square().sum(-1)).mean() - q.entropy()


def cases(structures: Iterable[g.Group]) -> Iterator[tuple[str, g.Group, str]]:
    """Objective, structure and form."""
    for group in structures:
        for form in ("outer", "inverse") if isinstance(group, g.LowRank) else ("outer", "inner", "inverse"):
            yield "likelihood", group, form
        if not isinstance(group, g.Kronecker):  # Gaussians need a factor that an affine map can hold
            for objective, form in itertools.product(("likelihood", "ELBO"), ("covariance", "precision")):
                yield objective, group, form


# ---------------------------------------------------------------------- runs
def build(group: g.Group, form: str) -> gnomon.SPD | gnomon.Gaussian:
    if form in ("covariance", "precision"):
        return gnomon.Gaussian(group, form=form, dtype=torch.float32)  # type: ignore[arg-type]
    return gnomon.SPD(group, factor=form, dtype=torch.float32)  # type: ignore[arg-type]


def is_positive_definite(point: gnomon.SPD | gnomon.Gaussian) -> bool:
    factor = point.factor_matrix().detach().double()
    return bool(factor.isfinite().all()) and torch.linalg.cholesky_ex(factor @ factor.mT).info.item() == 0


def run(objective: str, group: g.Group, form: str, name: str, lr: float) -> dict[str, Any]:
    """300 steps; what went wrong, if anything, and whether the loss fell."""
    point = build(group, form)
    optimizer = gnomon.moving_frame(OPTIMIZERS[name](point.parameters(), lr))
    step = 0

    def loss() -> Tensor:
        if isinstance(point, gnomon.Gaussian) and objective == "ELBO":
            torch.manual_seed(step)  # the same draws in each evaluation of a line search
            return elbo(point, 8 if step else 1000)
        return likelihood(point)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    wrong, first, last = "", loss().item(), math.nan
    try:
        for step in range(1, STEPS + 1):
            optimizer.step(closure)
            if not bool(point.frame.isfinite().all()):
                wrong = f"not finite at step {step}"
            elif step % LOOK_EVERY == 0 and not is_positive_definite(point):
                wrong = f"not positive definite at step {step}"
            if wrong:
                break
        step = 0
        last = loss().item()
        if not wrong and not math.isfinite(last):
            wrong = f"the loss is {last}"
    except Exception as error:  # any exception is what the run looks for
        wrong = f"{type(error).__name__} at step {step}: {error}"
    return {
        "objective": objective,
        "structure": repr(group),
        "form": form,
        "optimizer": name,
        "lr": lr,
        "wrong": wrong,
        "first": first,
        "last": last,
        "skipped": optimizer.skipped_steps,  # type: ignore[attr-defined]
    }


def run_quietly(task: tuple[str, g.Group, str, str, float]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "a point would be too near", RuntimeWarning)
    warnings.filterwarnings("ignore", "a gradient or step of a manifold parameter", RuntimeWarning)
    return run(*task)


def grid(quick: bool, processes: int, path: Path | None, limit: int | None) -> tuple[list[dict[str, Any]], int]:
    """Runs of the grid, and how many it has."""
    structures = (STRUCTURES[0], STRUCTURES[6]) if quick else STRUCTURES
    tasks = [
        (*case, name, lr)
        for case, name, lr in itertools.product(cases(structures), OPTIMIZERS, (1e-2, 1e3) if quick else RATES)
    ]
    random.Random(0).shuffle(tasks)  # so that what is done of a grid is a sample of the whole
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    done = {_key(one) for one in runs}
    missing = [task for task in tasks if (task[0], repr(task[1]), *task[2:]) not in done]
    if limit is not None:
        missing = missing[: max(0, limit - len(runs))]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for one in pool.imap_unordered(run_quietly, missing):
            runs.append(one)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(one) + "\n")
            if len(runs) % 100 == 0 or one["wrong"]:
                print(f"{len(runs)} of {len(tasks)} runs {one['wrong']}", file=sys.stderr, flush=True)
    return runs, len(tasks)


def _key(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["objective"], one["structure"], one["form"], one["optimizer"], one["lr"]


# ---------------------------------------------------------------------- the report
def losses_that_fell(runs: list[dict[str, Any]], objective: str) -> dict[str, dict[float, tuple[int, int]]]:
    """For each optimizer and rate, in how many runs the loss is lower at the end, and the number of runs."""
    counts: dict[str, dict[float, tuple[int, int]]] = {name: {} for name in OPTIMIZERS}
    for name, lr in itertools.product(OPTIMIZERS, sorted({one["lr"] for one in runs})):
        own = [one for one in runs if (one["objective"], one["optimizer"], one["lr"]) == (objective, name, lr)]
        counts[name][lr] = sum(one["last"] < one["first"] for one in own), len(own)
    return counts


def table(counts: dict[str, dict[float, tuple[int, int]]]) -> str:
    rates = [f"lr = {lr:g}" for lr in next(iter(counts.values()))]
    return report.table(
        ["optimizer", *rates],
        [[name, *(f"{fell} of {n}" for fell, n in own.values())] for name, own in counts.items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two structures and two rates")
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="a file of runs that are done, to go on with")
    parser.add_argument("--limit", type=int, help="at most so many runs, those of the file included")
    options = parser.parse_args()

    runs, total = grid(options.quick, options.processes, options.runs, options.limit)
    unsafe = [one for one in runs if one["wrong"]]
    risen = [one for one in runs if one["lr"] <= SENSIBLE and not one["last"] < one["first"]]
    rates = {one["lr"] for one in runs}
    fell = {objective: losses_that_fell(runs, objective) for objective in ("likelihood", "ELBO")}
    text = f"""## Points at any learning rate

`python benchmarks/safety.py --write`, on {report.machine()}.

{len(runs)} of the {total} runs of a grid: {len(STRUCTURES)} structures of {K} features, `SPD` and `Gaussian` in each
form, {len(OPTIMIZERS)} optimizers, rates from {min(rates):g} to {max(rates):g}. A run has {STEPS} steps in float32, at
the defaults. In a safe run nothing is raised, every frame is finite, and the matrix is positive definite to the end.
Unsafe runs: {len(unsafe)}. Runs with a rate of {SENSIBLE:g} or less in which the loss has not fallen: {len(risen)}.

The tables tell in how many runs the loss is lower at the end than at the start. The first is for the likelihood of
{SAMPLES} samples, the second for the evidence lower bound of a logistic regression by 8 draws a step.

{table(fell["likelihood"])}

{table(fell["ELBO"])}
"""
    print(text)
    for one in unsafe + risen:
        print(one)
    if options.write:
        report.write("safety", text, {"runs": len(runs), "unsafe": unsafe, "risen": risen, "fell": fell})
    if unsafe or risen:
        sys.exit(f"{len(unsafe)} unsafe runs, {len(risen)} losses that have not fallen at a sensible rate")


if __name__ == "__main__":
    main()
