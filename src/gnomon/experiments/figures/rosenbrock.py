"""Figure d of the paper: structured preconditioning of Rosenbrock's function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import minimize

from ...groups import Heisenberg
from ...optim import Banded, StructuredNewton
from ...problems import Rosenbrock
from ..common.trials import SOLVED, Recorder, Trial

HVP_COST = 2
"""The cost of a Hessian-vector product in gradients. It is a second backward pass, through the gradient."""
HEAD = TAIL = 5
SCIPY = {"L-BFGS": "L-BFGS-B", "BFGS": "BFGS"}

OURS = "ours"
OURS_SELDOM = "ours, update_every = 10"
NGD = "structured NGD"
Form = Literal["mild", "chained"]
Grid = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Scale:
    """The sizes and grids of a run. BFGS stores a dense matrix, so it has its own limit of iterations."""

    d: int
    iterations: dict[Form, int]
    bfgs_iterations: int
    grids: dict[str, dict[Form, Grid]]


FULL = Scale(
    d=1000,
    iterations={"mild": 2000, "chained": 8000},
    bfgs_iterations=1000,
    grids={
        OURS: {
            "mild": {
                "lr": (1.0, 1.5, 1.8),
                "momentum": (0.8, 0.85, 0.9),
                "precond_lr": (0.1,),
                "precond_momentum": (0.0, 0.5),
            },
            "chained": {
                "lr": (0.4, 0.6, 0.8),
                "momentum": (0.95,),
                "precond_lr": (0.02, 0.04),
                "precond_momentum": (0.0, 0.5),
            },
        },
        OURS_SELDOM: {
            "mild": {
                "lr": (1.0, 1.5, 1.8),
                "momentum": (0.8, 0.85, 0.9),
                "precond_lr": (0.3,),
                "precond_momentum": (0.0, 0.5),
                "update_every": (10,),
            },
            "chained": {
                "lr": (0.4, 0.6),
                "momentum": (0.95,),
                "precond_lr": (0.1, 0.2),
                "precond_momentum": (0.0, 0.5),
                "update_every": (10,),
            },
        },
        NGD: {
            "mild": {"lr": (0.8, 0.9, 0.95, 0.98), "precond_lr": (0.1, 0.5)},
            "chained": {"lr": (0.25, 0.5, 1.0), "precond_lr": (0.05, 0.1)},
        },
        "Adam": {
            "mild": {"lr": (0.1, 0.3, 1.0, 2.0, 4.0)},
            "chained": {"lr": (0.01, 0.03, 0.1, 0.2, 0.3)},
        },
    },
)
QUICK = Scale(
    d=200,
    iterations={"mild": 600, "chained": 300},
    bfgs_iterations=150,
    grids={
        OURS: {
            "mild": {"lr": (1.5,), "momentum": (0.8,), "precond_lr": (0.1,), "precond_momentum": (0.5,)},
            "chained": {"lr": (0.4,), "momentum": (0.95,), "precond_lr": (0.04,), "precond_momentum": (0.0,)},
        },
        OURS_SELDOM: {
            "mild": {"lr": (1.5,), "momentum": (0.8,), "precond_lr": (0.3,), "update_every": (10,)},
            "chained": {"lr": (0.4,), "momentum": (0.95,), "precond_lr": (0.1,), "update_every": (10,)},
        },
        NGD: {"mild": {"lr": (0.9,), "precond_lr": (0.1,)}, "chained": {"lr": (0.5,), "precond_lr": (0.1,)}},
        "Adam": {"mild": {"lr": (0.3, 2.0)}, "chained": {"lr": (0.1, 0.3)}},
    },
)


def points(grid: Grid) -> Iterator[dict[str, float]]:
    """Yield every combination of a grid's values."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def rosenbrock_trials(quick: bool) -> Iterator[Trial]:
    """Yield every method with every setting of its grid, on both forms of the function."""
    scale = QUICK if quick else FULL
    for form in ("mild", "chained"):
        runs: list[tuple[str, dict[str, float], Callable[..., None]]] = [
            (method, settings, _adam if method == "Adam" else _newton)
            for method, grids in scale.grids.items()
            for settings in points(grids[form])
        ]
        runs += [(f"{name} (SciPy)", {}, partial(_scipy, method)) for name, method in SCIPY.items()]
        for method, settings, run in runs:
            problem = Rosenbrock(scale.d, form)
            limit = scale.bfgs_iterations if method.startswith("BFGS") else scale.iterations[form]
            sizes = {"d": scale.d, "iterations": limit}
            yield Trial(form, method, settings, 0, sizes, partial(run, problem, settings, limit), problem.minimum)


def _solved(record: Recorder) -> bool:
    """Return whether the run is at its end."""
    return record.curve.loss[-1] <= SOLVED * record.curve.loss[0]


def _newton(problem: Rosenbrock, settings: dict[str, float], iterations: int, record: Recorder) -> None:
    x = problem.start()
    optimizer = StructuredNewton([x], Heisenberg(problem.d, HEAD, TAIL), hessian=Banded(1), **settings)  # type: ignore[arg-type]
    for iteration in range(iterations):
        before = optimizer.hessian_products
        loss = optimizer.step(lambda: problem(x))
        record(loss.item(), iteration + HVP_COST * before)
        if _solved(record):
            break


def _adam(problem: Rosenbrock, settings: dict[str, float], iterations: int, record: Recorder) -> None:
    x = problem.start()
    optimizer = torch.optim.Adam([x], **settings)  # type: ignore[arg-type]
    for iteration in range(iterations):
        optimizer.zero_grad()
        loss = problem(x)
        loss.backward()
        record(loss.item(), iteration)
        if _solved(record):
            break
        optimizer.step()


class _SolvedError(Exception):
    """Ends SciPy's loop."""


def _scipy(method: str, problem: Rosenbrock, settings: dict[str, float], iterations: int, record: Recorder) -> None:
    evaluations = 0
    last: dict[bytes, float] = {}

    def value_and_gradient(x: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        nonlocal evaluations
        evaluations += 1
        point = torch.from_numpy(x.copy()).requires_grad_()
        loss = problem(point)
        loss.backward()
        assert point.grad is not None
        last[x.tobytes()] = loss.item()
        return loss.item(), point.grad.numpy()

    def callback(x: np.ndarray[Any, Any]) -> None:
        loss = last[x.tobytes()]
        last.clear()
        record(loss, evaluations)
        if _solved(record):
            raise _SolvedError

    start = problem.start().detach().numpy()
    record(problem(torch.from_numpy(start)).item(), 0)
    options: dict[str, Any] = {"maxiter": iterations, "gtol": 1e-12}
    if method == "L-BFGS-B":
        options |= {"maxfun": 10 * iterations, "ftol": 0.0}
    with suppress(_SolvedError):
        minimize(value_and_gradient, start, jac=True, method=method, callback=callback, options=options)
