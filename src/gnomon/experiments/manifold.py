"""Figures a to c of the paper: momentum methods on SPD manifolds and on the Gaussian submanifold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import baselines
from ..manifolds import SPD, Gaussian
from ..optim import moving_frame
from ..problems import LogDet, MetricNearness, Mixture, MixtureLikelihood
from .trials import Recorder, Trial

Maker = Callable[[Iterable[Tensor], float, float], Optimizer]
"""An optimizer from parameters, step size and momentum."""

OURS = "ours"
OURS_BOUNDED = "ours, max_step = 1"
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
    """The library's update: heavy ball in local coordinates, with the quadratic truncation."""
    return moving_frame(SGD(parameters, lr=lr, momentum=momentum))


@dataclass(frozen=True)
class Scale:
    """Sizes of a run."""

    k: int
    iterations: int
    rates: tuple[float, ...]
    """The step sizes of the grid; the first one is that which all methods share."""
    momentum: float
    condition: float = 10.0
    seeds: int = 1

    @property
    def sizes(self) -> dict[str, Any]:
        """All but the grid and the seeds."""
        return {key: value for key, value in asdict(self).items() if key not in ("rates", "seeds")}


def descend(
    loss: Callable[[], Tensor], optimizers: list[Optimizer], iterations: int, record: Recorder, watch: Callable[[], Any]
) -> None:
    """A plain training loop; ``watch`` looks at each iterate while the clock stands still."""
    for _ in range(iterations):
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss()
        value.backward()
        record(value.item())
        for optimizer in optimizers:
            optimizer.step()
        record.pause()
        watch()
        record.resume()
    with torch.no_grad():
        record(loss().item())


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
    """Every method at every step size of the grid."""
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
            optimizer = moving_frame(optimizer, max_step=1.0)
    descend(lambda: problem(point), [optimizer], scale.iterations, record, lambda: None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- Gaussian mixtures (Fig. c)
@dataclass(frozen=True)
class MixtureScale(Scale):
    """``k`` is the number of components."""

    d: int = 10
    samples: int = 1000


MIXTURE_SCALES = (
    MixtureScale(k=5, iterations=600, rates=(1.0, 0.2, 0.5, 2.0), momentum=0.8, seeds=3),
    MixtureScale(k=3, d=4, samples=300, iterations=60, rates=(1.0, 0.5), momentum=0.8, seeds=3),
)
SUB = (OURS_SUB, "structured NGD, sub")
"""Methods on the Gaussian submanifold."""


def mixture_trials(quick: bool) -> Iterator[Trial]:
    """Every method at every step size of the grid, on three data sets."""
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
    """The weights are an ordinary parameter: every method moves them with its own step and momentum."""
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
    """How far the last diagonal entry of an augmented matrix is from 1, at worst; an error where one is not valid."""
    if isinstance(components, Gaussian):
        torch.linalg.cholesky(components.covariance())  # of d dimensions, and positive definite
        return 0.0
    assert isinstance(components, (SPD, baselines.Ambient))
    return float((components.matrix()[..., -1, -1] - 1).abs().max())
