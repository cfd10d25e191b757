"""The demonstration's first experiment: one network trained with four optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from ..training.compare import RunGroup, score_text
from ..training.config import Config, TrainingError, completed
from ..training.optimizers import TITLES
from ..training.run import train
from ..training.trainer import Epoch
from .scale import Cells, Scale, Step

RATES = {"sgd": 0.1, "adamw": 0.01, "kfac": 0.01, "ingd": 0.01}
"""The best of five learning rates for each optimizer.

They are half powers of ten from 0.01 to 1 (SGD), from 0.0003 to 0.03 (AdamW) and from 0.001 to 0.1 (KFAC, INGD). They
were judged by the mean loss of seeds 100 to 102 on a fifth of the training set that was held out, after as many epochs
as here. None is at an end of its range."""

GOAL = 5.0
"""The test error in %. The table shows what it takes to reach it."""


def train_networks(scale: Scale, seed: int, step: Step) -> list[RunGroup]:
    """Train the network with each optimizer and each seed.

    The optimizers take turns, so that all are slower when the machine is slow for a while.
    """
    base = Config(epochs=scale.epochs, schedule="cosine", device="cpu")
    configs = [completed(replace(base, optimizer=name, lr=lr)) for name, lr in RATES.items()]
    _train(Config(epochs=1, device="cpu"))  # torch's first steps take long, which is no property of an optimizer
    runs: list[list[list[Epoch]]] = [[] for _ in configs]
    for number in range(seed, seed + scale.seeds):
        for config, done in zip(configs, runs, strict=True):
            step(f"{TITLES[config.optimizer]}, seed {number}")
            done.append(_train(replace(config, seed=number)))
    return [RunGroup(config, done) for config, done in zip(configs, runs, strict=True)]


def _train(config: Config) -> list[Epoch]:
    outcome = train(config)
    if outcome.signal is not None:
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise TrainingError(f"{TITLES[config.optimizer]}: {outcome.failure}; choose another --seed")
    return outcome.epochs


def network_table(networks: list[RunGroup]) -> Cells:
    """Return a table with a row for each optimizer."""
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


def _mean_until_goal(runs: RunGroup, what: Callable[[Epoch], float]) -> float:
    """Return the mean of a quantity at the first epoch that reaches the goal. It is infinite if a run never does."""
    return mean(next((what(epoch) for epoch in run if epoch.test_error <= GOAL), math.inf) for run in runs.runs)


def _number(value: float, digits: int) -> str:
    """Return the number as text, or a dash if it is not finite."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
