"""Figures a to c of the paper: methods with momentum on SPD manifolds and on the Gaussian submanifold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ... import baselines
from ...manifolds import SPD, Gaussian
from ...optim import moving_frame
from ...problems import LogDet, MetricNearness, Mixture, MixtureLikelihood
from ..common.trials import Recorder, Trial, descend

Maker = Callable[[Iterable[Tensor], float, float], Optimizer]
"""Makes an optimizer from parameters, step size and momentum."""

OURS = "ours"
OURS_BOUNDED = "ours, bounded steps"
OURS_SUB = "ours, sub"

WITHOUT_MOMENTUM = ("structured NGD", "structured NGD, sub", "RGD")

BASELINES: dict[str, Maker] = {
    "structured NGD": lambda p, lr, momentum: baselines.StructuredNGD(p, lr),
    "RGD": lambda p, lr, momentum: baselines.RGD(p, lr),
    "Alimisis 2020": baselines.Alimisis2020,
    "Alimisis 2021": baselines.Alimisis2021,
    "Ahn & Sra 2020": baselines.AhnSra2020,
}


def _settings(method: str, lr: float, momentum: float) -> dict[str, float]:
    return {"lr": lr} if method in WITHOUT_MOMENTUM else {"lr": lr, "momentum": momentum}


def framed_sgd(parameters: Iterable[Tensor], lr: float, momentum: float) -> Optimizer:
    """Return the library's method: heavy-ball momentum in local coordinates, with the quadratic truncation."""
    return moving_frame(SGD(parameters, lr=lr, momentum=momentum), max_step=None)


@dataclass(frozen=True)
class Scale:
    """The sizes of a run."""

    k: int
    iterations: int
    rates: tuple[float, ...]
    """The step sizes of the grid. The first is the step size that all methods share."""
    momentum: float
    condition: float = 10.0
    seeds: int = 1

    @property
    def sizes(self) -> dict[str, Any]:
        """The settings without the grid and the seeds."""
        return {key: value for key, value in asdict(self).items() if key not in ("rates", "seeds")}


# ---------------------------------------------------------------------- one full SPD matrix (Fig. a and b)
SPD_SCALES = {
    "metric-nearness": (
        Scale(k=100, iterations=400, rates=(0.005, 0.002, 0.01, 0.02, 0.05), momentum=0.8),
        Scale(k=30, iterations=60, rates=(0.005, 0.02), momentum=0.8),
    ),
    "log-det": (
        Scale(k=100, iterations=150, rates=(0.1, 0.02, 0.05, 0.2, 0.5), momentum=0.6),
        Scale(k=30, iterations=60, rates=(0.1, 0.2), momentum=0.6),
    ),
}


def spd_trials(name: str, quick: bool) -> Iterator[Trial]:
    """Yield every method at every step size of the grid."""
    scale = SPD_SCALES[name][quick]
    for seed in range(scale.seeds):
        generator = torch.Generator().manual_seed(seed)
        kind = MetricNearness if name == "metric-nearness" else LogDet
        problem = kind.random(scale.k, scale.condition, generator=generator)
        for method in (OURS, OURS_BOUNDED, *BASELINES):
            for lr in scale.rates:
                settings = _settings(method, lr, scale.momentum)
                run = partial(_run_spd, problem, method, lr, scale)
                yield Trial(
                    name, method, settings, seed, scale.sizes, run, problem.minimum, shared=lr == scale.rates[0]
                )


def _run_spd(problem: MetricNearness | LogDet, method: str, lr: float, scale: Scale, record: Recorder) -> None:
    if method in BASELINES:
        point: nn.Module = baselines.Ambient(problem.k, dtype=problem.dtype, device=problem.device)
        optimizer = BASELINES[method](point.parameters(), lr, scale.momentum)
    else:
        point = problem.start()
        optimizer = framed_sgd(point.parameters(), lr, scale.momentum)
        if method == OURS_BOUNDED:
            optimizer = moving_frame(optimizer)
    descend(lambda: problem(point), [optimizer], scale.iterations, record, lambda: None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- Gaussian mixtures (Fig. c)
@dataclass(frozen=True)
class MixtureScale(Scale):
    """The sizes of a run on a mixture. ``k`` is the number of components."""

    d: int = 10
    samples: int = 1000


MIXTURE_SCALES = (
    MixtureScale(k=5, iterations=600, rates=(1.0, 0.2, 0.5, 2.0), momentum=0.8, seeds=3),
    MixtureScale(k=3, d=4, samples=300, iterations=60, rates=(1.0, 0.5), momentum=0.8, seeds=3),
)
SUB = (OURS_SUB, "structured NGD, sub")
"""The methods on the Gaussian submanifold."""


def mixture_trials(quick: bool) -> Iterator[Trial]:
    """Yield every method at every step size of the grid, on one data set for each seed."""
    scale = MIXTURE_SCALES[quick]
    for seed in range(scale.seeds):
        generator = torch.Generator().manual_seed(seed)
        problem = MixtureLikelihood.random(scale.d, scale.k, samples=scale.samples, generator=generator)
        for method in (*SUB, OURS, *BASELINES):
            for lr in scale.rates:
                settings = _settings(method, lr, scale.momentum)
                run = partial(_run_mixture, problem, method, lr, scale)
                yield Trial("gmm", method, settings, seed, scale.sizes, run, shared=lr == scale.rates[0])


def _run_mixture(problem: MixtureLikelihood, method: str, lr: float, scale: Scale, record: Recorder) -> None:
    """Fit a mixture. The weights are an ordinary parameter with the step and the momentum of the method."""
    point = problem.start() if method in SUB else problem.ambient()
    momentum = 0.0 if method in WITHOUT_MOMENTUM else scale.momentum
    if method in BASELINES:
        point = Mixture(baselines.Ambient(problem.embedded_start()), point.logits.detach())
        components: Optimizer = BASELINES[method](point.components.parameters(), lr, momentum)
    else:
        components = framed_sgd(point.components.parameters(), lr, momentum)
    weights = SGD([point.logits], lr=lr, momentum=momentum)
    notes = record.curve.notes

    def watch() -> None:
        away = distance_to_submanifold(point.components)
        notes["largest distance to the submanifold"] = max(notes.get("largest distance to the submanifold", 0.0), away)

    descend(lambda: problem(point), [components, weights], scale.iterations, record, watch)


@torch.no_grad()
def distance_to_submanifold(components: nn.Module) -> float:
    """Return the largest distance of the last diagonal entry of an augmented matrix from 1.

    On the submanifold the distance is 0. A covariance that is not positive definite raises an error.
    """
    if isinstance(components, Gaussian):
        torch.linalg.cholesky(components.covariance())
        return 0.0
    assert isinstance(components, (SPD, baselines.Ambient))
    return float((components.matrix()[..., -1, -1] - 1).abs().max())
