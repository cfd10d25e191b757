"""Deterministic problems solved to 1e-8: gnomon.problems.solve beside pymanopt's solvers.

    python benchmarks/solve.py [--quick] [--write]

Log-det and metric nearness at k = 100, condition 10 and 1000, from the identity, in float64. Process CPU time, one BLAS
thread, all solvers in one process and taking turns; medians. Every solver stops at a Riemannian gradient of length
1e-5, and the gap that it ends with is shown. pymanopt's cost, gradient and Hessian are written by hand in NumPy, as its
fastest use; ours is the loss and automatic differentiation.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pymanopt
import report
import torch
from pymanopt.manifolds import SymmetricPositiveDefinite
from pymanopt.optimizers import ConjugateGradient, SteepestDescent, TrustRegions

from gnomon.problems import LogDet, MetricNearness, solve

torch.set_num_threads(1)

TOLERANCE = 1e-5  # of the gradient
WANTED = 1e-8  # of the gap
SOLVERS = {"steepest descent": SteepestDescent, "conjugate gradient": ConjugateGradient, "trust regions": TrustRegions}
LIMITS = {"max_iterations": 3000, "max_time": 60, "verbosity": 0}
Outcome = dict[str, float]
Array = np.ndarray[Any, Any]


def ours(problem: LogDet | MetricNearness) -> Outcome:
    start = time.process_time()
    solution = solve(problem, tolerance=TOLERANCE)
    seconds = time.process_time() - start
    assert solution.gap is not None
    return {"seconds": seconds, "iterations": solution.iterations, "gap": solution.gap}


def theirs(problem: LogDet | MetricNearness, solver: str) -> Outcome:
    manifold = SymmetricPositiveDefinite(problem.k)
    cost, gradient, hessian = log_det(problem) if isinstance(problem, LogDet) else nearness(problem)
    wrap = pymanopt.function.numpy(manifold)
    task = pymanopt.Problem(manifold, wrap(cost), euclidean_gradient=wrap(gradient), euclidean_hessian=wrap(hessian))
    optimizer = SOLVERS[solver](min_gradient_norm=TOLERANCE, **LIMITS)
    start = time.process_time()
    result = optimizer.run(task, initial_point=np.eye(problem.k))
    seconds = time.process_time() - start
    return {"seconds": seconds, "iterations": result.iterations, "gap": float(result.cost) - (problem.minimum or 0.0)}


Functions = tuple[Callable[[Array], Any], Callable[[Array], Any], Callable[[Array, Array], Any]]


def log_det(problem: LogDet) -> Functions:
    C = problem.C.numpy()

    def hessian(S: Array, V: Array) -> Array:
        inverse = np.linalg.inv(S)
        return inverse @ V @ inverse

    return (lambda S: (C * S).sum() - np.linalg.slogdet(S)[1]), (lambda S: C - np.linalg.inv(S)), hessian


def nearness(problem: MetricNearness) -> Functions:
    Q, X, identity = problem.Q.numpy(), problem.X.numpy(), np.eye(problem.k)
    M = X.T @ X / len(X)
    MQ = M @ Q

    def cost(S: Array) -> float:
        residual = S @ Q - identity
        return float(0.5 * ((residual @ M) * residual).sum())

    def symmetric(half: Array) -> Array:
        return 0.5 * (half + half.T)

    return cost, (lambda S: symmetric((S @ Q - identity) @ MQ)), (lambda S, V: symmetric((V @ Q) @ MQ))


def measure(k: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for kind in (LogDet, MetricNearness):
        for condition in (10.0, 1000.0):
            problem = kind.random(k, condition, generator=torch.Generator().manual_seed(0))
            runs: dict[str, Callable[[], Outcome]] = {"ours": lambda p=problem: ours(p)}  # type: ignore[misc]
            runs |= {name: lambda p=problem, s=name: theirs(p, s) for name in SOLVERS}  # type: ignore[misc]
            outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
            for _ in range(rounds + 1):
                for name, run in runs.items():
                    outcomes[name].append(run())
            measured = {name: outcomes[name][1:] for name in runs}  # the first round warms up
            summary = {
                name: {
                    "seconds": statistics.median(o["seconds"] for o in of),
                    "iterations": of[-1]["iterations"],
                    "gap": of[-1]["gap"],
                }
                for name, of in measured.items()
            }
            solved = {name: s for name, s in summary.items() if s["gap"] <= WANTED and name != "ours"}
            fastest = min(solved, key=lambda name: solved[name]["seconds"])
            ratio = solved[fastest]["seconds"] / summary["ours"]["seconds"]
            rows.append(
                {
                    "problem": kind.__name__,
                    "condition": condition,
                    "solvers": summary,
                    "fastest": fastest,
                    "ratio": ratio,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    header = ["problem, condition", "ours", *SOLVERS, "times faster than the best"]

    def cell(s: Outcome) -> str:
        return f"{1e3 * s['seconds']:.0f} ms, {s['iterations']:.0f} it., {s['gap']:.0e}"

    lines = [
        [
            f"{row['problem']}, {row['condition']:g}",
            *[cell(row["solvers"][name]) for name in ("ours", *SOLVERS)],
            f"{row['ratio']:.1f} ({row['fastest']})",
        ]
        for row in rows
    ]
    return report.table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and few: only to see that it runs")
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    rows = measure(20 if arguments.quick else 100, 1 if arguments.quick else 7)
    text = table(rows)
    print(text)
    for row in rows:
        holds = row["solvers"]["ours"]["gap"] <= WANTED and row["ratio"] >= 1
        print(f"{row['problem']}, {row['condition']:g}: {'ok' if holds else 'MISSED'}")
    if arguments.write:
        machine = report.machine("pymanopt", "numpy")
        section = (
            "## Deterministic problems, solved to 1e-8\n\n"
            f"`python benchmarks/solve.py --write`, on {machine}.\n\n"
            "Each solver starts at the identity and ends at a Riemannian gradient of length 1e-5. The size is k = 100, "
            "in float64. The cells have CPU time, iterations, and the gap at the end. They are medians of 7 runs that "
            "take turns. `ours` is `gnomon.problems.solve`, with the loss and automatic differentiation. The other "
            "columns are solvers of pymanopt, with cost, gradient and Hessian written by hand in NumPy.\n\n"
            f"{text}"
        )
        report.write("solve", section, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
