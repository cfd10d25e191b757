"""Steps on SPD manifolds: against geoopt and pymanopt on the full manifold, and by size on structures.

    python benchmarks/spd.py [--quick] [--write]

Process CPU time, one BLAS thread, all methods in one process and interleaved; medians, with the
quartiles behind them in the JSON file. ``--write`` puts the result into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import geoopt
import numpy as np
import pymanopt
import report
import torch

import gnomon
from gnomon import groups as g
from gnomon.problems import LogDet

torch.set_num_threads(1)

FULL_SIZES = (20, 100, 500, 1000)
PYMANOPT_ITERATIONS = 5  # it starts from a point, not from a state: several a call, as in use
WANTED = {20: 4.0, 100: 6.0, 500: 6.0, 1000: 6.0}  # times faster than geoopt's step, at least
STRUCTURES: dict[str, Callable[[int], g.Group]] = {
    "Diagonal": g.Diagonal,
    "Arrow": g.Arrow,
    "Heisenberg": lambda k: g.Heisenberg(k, 2, 2),
    "BlockDiagonal": lambda k: g.BlockDiagonal(k, 4),
    "Toeplitz": g.Toeplitz,
}
STRUCTURED_SIZES = (10_000, 100_000, 1_000_000)


def seconds(function: Callable[[], object], repeat: int = 1) -> float:
    start = time.process_time()
    for _ in range(repeat):
        function()
    return (time.process_time() - start) / repeat


def interleaved(functions: dict[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, list[float]]:
    """Seconds a call: ``rounds`` samples of ``repeat`` calls each, taking turns."""
    for function in functions.values():
        seconds(function, 2)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            samples[name].append(seconds(function, repeat))
    return samples


def in_turn(*functions: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        for function in functions:
            function()

    return call


# ---------------------------------------------------------------------- the full manifold
def methods(k: int) -> dict[str, dict[str, Callable[[], object]]]:
    """``step`` and ``iteration`` (gradient included) of each library on one log-det problem, float64.

    All three differentiate the same loss by torch's automatic differentiation.
    """
    problem = LogDet.random(k, generator=torch.Generator().manual_seed(0))
    lr, momentum = 1e-4, 0.9

    point = gnomon.SPD(k, dtype=torch.float64)
    ours = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=lr, momentum=momentum))

    def our_gradient() -> None:
        ours.zero_grad()
        problem(point).backward()

    manifold = geoopt.SymmetricPositiveDefinite()
    x = geoopt.ManifoldParameter(torch.eye(k, dtype=torch.float64), manifold=manifold)
    theirs = geoopt.optim.RiemannianSGD([x], lr=lr, momentum=momentum)
    adam = geoopt.optim.RiemannianAdam([x], lr=lr)

    def geoopt_gradient() -> None:
        theirs.zero_grad()
        ((problem.C * x).sum() - torch.logdet(x)).backward()

    our_gradient()
    geoopt_gradient()
    space = pymanopt.manifolds.SymmetricPositiveDefinite(k)
    cost = pymanopt.function.pytorch(space)(lambda S: (problem.C * S).sum() - torch.logdet(S))
    descent = pymanopt.optimizers.SteepestDescent(
        max_iterations=PYMANOPT_ITERATIONS, min_gradient_norm=0, min_step_size=0, verbosity=0
    )
    pymanopt_problem = pymanopt.Problem(space, cost)

    return {
        "gnomon, SGD with momentum": {
            "step": ours.step,
            "iteration": in_turn(our_gradient, ours.step),
        },
        "geoopt RiemannianSGD with momentum": {
            "step": theirs.step,
            "iteration": in_turn(geoopt_gradient, theirs.step),
        },
        "geoopt RiemannianAdam": {
            "step": adam.step,
            "iteration": in_turn(geoopt_gradient, adam.step),
        },
        "pymanopt SteepestDescent": {
            "iterations": lambda: descent.run(pymanopt_problem, initial_point=np.eye(k)),
        },
    }


def full_manifold(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for k in sizes:
        calls = methods(k)
        rounds, repeat = (30, 20) if k <= 100 else (5, 1)
        for kind in ("step", "iteration", "iterations"):
            samples = interleaved({n: c[kind] for n, c in calls.items() if kind in c}, rounds, repeat)
            for name, values in samples.items():
                count = PYMANOPT_ITERATIONS if kind == "iterations" else 1
                quartiles = [q / count for q in statistics.quantiles(values, n=4)]
                what = "step" if kind == "step" else "iteration"
                results.append({"k": k, "method": name, "what": what, "seconds": quartiles[1], "quartiles": quartiles})
    return results


def full_table(results: list[dict[str, Any]]) -> str:
    def find(k: int, method: str, what: str) -> float | None:
        return next((r["seconds"] for r in results if (r["k"], r["method"], r["what"]) == (k, method, what)), None)

    names = list(dict.fromkeys(r["method"] for r in results))
    sizes = list(dict.fromkeys(r["k"] for r in results))
    rows = []
    for what in ("step", "iteration"):
        for name in names:
            cells = []
            for k in sizes:
                own, base = find(k, name, what), find(k, names[0], what)
                if own is None or base is None:
                    cells.append("-")
                elif name == names[0]:
                    cells.append(f"{1e3 * own:.3g} ms")
                else:
                    cells.append(f"{own / base:.1f}x")
            if any(cell != "-" for cell in cells):
                rows.append([what, name, *cells])
    verdicts = []
    for k in sizes:
        step = _ratio(find(k, names[1], "step"), find(k, names[0], "step"))
        iteration = min(_ratio(find(k, name, "iteration"), find(k, names[0], "iteration")) for name in names[1:])
        verdicts.append(
            f"- k = {k}: a step is {step:.1f} times as fast as geoopt's (goal: {WANTED[k]:.0f}). A whole iteration is "
            f"at least {iteration:.1f} times as fast as those of geoopt and pymanopt (goal: 1)."
        )
    return report.table(["", "method", *(f"k = {k}" for k in sizes)], rows) + "\n\n" + "\n".join(verdicts)


def _ratio(a: float | None, b: float | None) -> float:
    assert a is not None
    assert b is not None
    return a / b


# ---------------------------------------------------------------------- structures
def structured_iteration(group: g.Group) -> Callable[[], object]:
    """Gradient, momentum step and fold of a log-det-like loss at the cost of the structure, float32."""
    x = torch.randn(1, group.k)
    point = gnomon.SPD(group, dtype=torch.float32)
    optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=1e-3, momentum=0.9))

    def iteration() -> None:
        optimizer.zero_grad()
        (point.quad(x).mean() - point.logdet()).backward()
        optimizer.step()

    return iteration


def peak_floats(name: str, k: int) -> float | None:
    """Peak memory of an iteration in floats an entry of the diagonal, measured in a process of its own (Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_floats, (name, k))


def _resident(field: str) -> int:
    """Bytes resident now (VmRSS) or at most since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def _peak_floats(name: str, k: int) -> float:
    torch.manual_seed(0)
    structured_iteration(STRUCTURES[name](100))()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _resident("VmRSS")
    iteration = structured_iteration(STRUCTURES[name](k))
    for _ in range(3):
        iteration()
    return (_resident("VmHWM") - before) / 4 / k


def structured(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for name, build in STRUCTURES.items():
        samples = interleaved({str(k): structured_iteration(build(k)) for k in sizes}, 7, 1)
        results.extend(
            {
                "structure": name,
                "k": k,
                "nanoseconds an entry": 1e9 * statistics.median(samples[str(k)]) / k,
                "peak floats an entry": peak_floats(name, k) if k == sizes[-1] else None,
            }
            for k in sizes
        )
    return results


def structured_table(results: list[dict[str, Any]]) -> str:
    sizes = list(dict.fromkeys(r["k"] for r in results))
    rows = []
    for name in dict.fromkeys(r["structure"] for r in results):
        own = [r for r in results if r["structure"] == name]
        times = [r["nanoseconds an entry"] for r in own]
        rows.append(
            [
                name,
                *(f"{t:.1f}" for t in times),
                f"{times[-1] / times[0]:.2f}",
                "-" if own[-1]["peak floats an entry"] is None else f"{own[-1]['peak floats an entry']:.0f}",
            ]
        )
    header = [
        "structure",
        *(f"ns an entry, k = {k:,}" for k in sizes),
        "growth",
        f"peak floats an entry, k = {sizes[-1]:,}",
    ]
    return report.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only k = 20 and 100, and structures up to 100,000")
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    options = parser.parse_args()

    full = full_manifold(FULL_SIZES[:2] if options.quick else FULL_SIZES)
    sparse = structured(STRUCTURED_SIZES[:2] if options.quick else STRUCTURED_SIZES)
    text = f"""## Steps on SPD manifolds

`python benchmarks/spd.py --write`, on {report.machine("geoopt", "pymanopt", "numpy")}.

The first table is for the full manifold: a log-det problem in float64. It has the CPU time of gnomon, and that of the
other libraries as multiples of it.

{full_table(full)}

The second table is for structures, in float32. It has the CPU time of one iteration (gradient, momentum step, fold),
in nanoseconds for each entry of the diagonal. Growth is the ratio of the times at the largest and the smallest size
(goal for Arrow and Diagonal: below 3). The last column is the peak of memory (goal: below 40).

{structured_table(sparse)}
"""
    print(text)
    if options.write:
        report.write("spd", text, {"full": full, "structured": sparse})


if __name__ == "__main__":
    main()
