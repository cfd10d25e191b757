"""The demonstration's second experiment: one matrix found on two structures."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD

from ...groups import Dense, Element, Group, Heisenberg
from ...manifolds import SPD
from ...optim import moving_frame
from ..common.trials import Curve, Recorder, Trial, descend
from ..training.trainer import seed_of
from .scale import Cells, Scale, Step

RATE = 0.1
"""The step size: the best of 0.03, 0.1 and 0.3 on the full manifold, with and without momentum."""

MOMENTA = (0.0, 0.7)


def fit_matrices(scale: Scale, seed: int, step: Step) -> list[Curve]:
    """Find S from pairs ``y_i = S*^-1 x_i``, with ``S*`` on a submanifold.

    S is searched on the full manifold and on the submanifold, with and without momentum.
    """
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
    """Return vectors x, and their products with the inverse of a matrix of this structure.

    The problem has 4 k random vectors. They are replaced by k vectors with the same second moment, which give the same
    loss and the same curves.
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
        optimizer = moving_frame(SGD(point.parameters(), lr=RATE, momentum=momentum))
        descend(lambda: 0.5 * (point.matvec(y) - x).square().sum(), [optimizer], iterations, record, lambda: None)

    return run


def matrix_table(curves: list[Curve]) -> Cells:
    """Return a table with a row for each structure and momentum."""
    header = ["structure", "unknowns", "momentum", "iterations", "CPU s", "ms/it."]
    return header, [_matrix_row(curve) for curve in curves]


def _matrix_row(curve: Curve) -> list[str]:
    """Return what it took to reduce the gap to ``SOLVED`` of the first gap, or that all iterations did not suffice."""
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
