"""Points at any learning rate: 300 steps of each optimizer on each structure and form, at the defaults.

    python benchmarks/safety.py [--quick] [--processes 2] [--limit 1000] [--write]

The runs are in float32. A run is safe if nothing is raised, every frame is finite, and the matrix is positive
definite to the end. The script ends with an error if a run is not safe, or if a loss has not fallen at a sensible rate.

The whole grid takes about four hours of CPU time. With ``--write`` the outcome of each run is kept in safety.json, and
the next call does only those that are missing. ``--limit`` ends a call after so many of them. They are in a random
order, so that what is done is a sample of the whole. To begin anew, remove safety.json.
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


class Outcomes:
    """What became of each run: ``fell`` and ``rose`` tell of its loss, all else what went wrong."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.of: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
        """By objective, structure with form, optimizer and rate."""
        if path and path.exists():
            self.of = json.loads(path.read_text())["outcomes"]

    def add(self, one: dict[str, Any]) -> None:
        outcome = one["wrong"] or ("fell" if one["last"] < one["first"] else "rose")
        objective, case, name, rate = _place(
            one["objective"], one["structure"], one["form"], one["optimizer"], one["lr"]
        )
        self.of.setdefault(objective, {}).setdefault(case, {}).setdefault(name, {})[rate] = outcome

    def save(self) -> None:
        if self.path:
            self.path.write_text(json.dumps({"runs": len(self), "outcomes": self.of}, indent=1, sort_keys=True) + "\n")

    def __iter__(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Objective, structure with form, optimizer, rate and outcome of each run."""
        for objective, cases in self.of.items():
            for case, names in cases.items():
                for name, rates in names.items():
                    for rate, outcome in rates.items():
                        yield objective, case, name, rate, outcome

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def that_fell(self, objective: str) -> dict[str, dict[str, tuple[int, int]]]:
        """For each optimizer and rate, in how many runs the loss is lower at the end, and the number of runs."""
        counts: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in OPTIMIZERS}
        for name, lr in itertools.product(OPTIMIZERS, RATES):
            own = [one[-1] for one in self if one[:1] + one[2:4] == (objective, name, f"{lr:g}")]
            counts[name][f"{lr:g}"] = own.count("fell"), len(own)
        return counts


def _place(objective: str, structure: str, form: str, optimizer: str, lr: float) -> tuple[str, str, str, str]:
    return objective, f"{structure}, {form}", optimizer, f"{lr:g}"


def fill(outcomes: Outcomes, quick: bool, processes: int, limit: int | None) -> int:
    """Do the runs that are missing; the size of the grid is returned."""
    structures = (STRUCTURES[0], STRUCTURES[6]) if quick else STRUCTURES
    tasks = [
        (*case, name, lr)
        for case, name, lr in itertools.product(cases(structures), OPTIMIZERS, (1e-2, 1e3) if quick else RATES)
    ]
    random.Random(0).shuffle(tasks)
    done = {one[:-1] for one in outcomes}
    missing = [task for task in tasks if _place(task[0], repr(task[1]), *task[2:]) not in done][:limit]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for count, one in enumerate(pool.imap_unordered(run_quietly, missing), 1):
            outcomes.add(one)
            outcomes.save()
            if count % 20 == 0 or one["wrong"]:
                print(f"{count} of {len(missing)} runs {one['wrong']}", file=sys.stderr, flush=True)
    return len(tasks)


# ---------------------------------------------------------------------- the report
def table(counts: dict[str, dict[str, tuple[int, int]]]) -> str:
    rates = [f"lr = {rate}" for rate in next(iter(counts.values()))]
    return report.table(
        ["optimizer", *rates],
        [[name, *(f"{fell} of {n}" for fell, n in own.values())] for name, own in counts.items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two structures and two rates")
    parser.add_argument("--write", action="store_true", help="go on with safety.json, and write benchmarks/RESULTS.md")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=int, help="at most so many new runs")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick is not the grid that --write is for; leave one of them out")

    outcomes = Outcomes(report.HERE / "safety.json" if options.write else None)
    total = fill(outcomes, options.quick, options.processes, options.limit)
    unsafe = [one for one in outcomes if one[-1] not in ("fell", "rose")]
    risen = [one for one in outcomes if one[-1] == "rose" and float(one[3]) <= SENSIBLE]
    text = f"""## Points at any learning rate

`python benchmarks/safety.py --write`, in calls that go on with each other; the last one on {report.machine()}.

{len(outcomes)} of the {total} runs of a grid: {len(STRUCTURES)} structures of {K} features, `SPD` and `Gaussian` in
each form, {len(OPTIMIZERS)} optimizers, rates from {min(RATES):g} to {max(RATES):g}. A run has {STEPS} steps in
float32, at the defaults. In a safe run nothing is raised, every frame is finite, and the matrix is positive definite to
the end. Unsafe runs: {len(unsafe)}. Runs with a rate of {SENSIBLE:g} or less in which the loss has not fallen:
{len(risen)}.

The tables tell in how many runs the loss is lower at the end than at the start. The first is for the likelihood of
{SAMPLES} samples, the second for the evidence lower bound of a logistic regression by 8 draws a step.

{table(outcomes.that_fell("likelihood"))}

{table(outcomes.that_fell("ELBO"))}
"""
    print(text)
    for one in unsafe + risen:
        print(one)
    if options.write:
        report.write_section("safety", text)
    if unsafe or risen:
        sys.exit(f"{len(unsafe)} unsafe runs, {len(risen)} losses that have not fallen at a sensible rate")


if __name__ == "__main__":
    main()
