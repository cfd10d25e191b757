"""The demonstration's first experiment: one network trained with four optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ...optim import INGD, KFAC
from ..common.confidence import half_interval
from ..data import digits
from ..models.perceptron import perceptron
from ..quality.task import History, Task, train
from ..training.config import TrainingError
from .scale import Cells, Scale, Step

TRAINED = 1437
"""The number of images that the network learns from. The others are for the test."""
SIZES = (64, 256, 128, 16, 128, 256, 64)
POINTS = 40
"""The number of measures of a run."""


@dataclass(frozen=True)
class Contestant:
    """An optimizer at its learning rate."""

    name: str
    title: str
    lr: float
    build: Callable[[nn.Module, float], Optimizer]


CONTESTANTS = (
    Contestant("sgd", "SGD", 0.01, lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9)),
    Contestant("adamw", "AdamW", 0.003, lambda model, lr: AdamW(model.parameters(), lr=lr)),
    Contestant("kfac", "KFAC", 0.01, lambda model, lr: KFAC(model, lr=lr)),
    Contestant("ingd", "INGD", 0.01, lambda model, lr: INGD(model, lr=lr)),
)
"""Each has the best of five learning rates.

They are half powers of ten from 0.001 to 0.1 (SGD, KFAC, INGD) and from 0.0003 to 0.03 (AdamW). They were judged by the
mean error of seeds 100 to 102 on a fifth of the training images that was held out, after as many steps as here. None is
at an end of its range. At the next larger rate SGD is better where it does not diverge, which it does for one seed in
ten."""
REFERENCE = "adamw"
"""The table shows what it takes to reach the final error of this optimizer."""


class Reconstruction(Task):
    """An autoencoder: it squeezes digits of 8 x 8 pixels into 16 numbers and draws them again."""

    name, measure, batch_size = "digits", "squared error of a test image", 256

    def __init__(self, steps: int, trained: slice = slice(TRAINED), tested: slice = slice(TRAINED, None)) -> None:
        images = digits.read().images.float().flatten(1) / digits.RECIPE.white
        self.steps, self.train, self.test = steps, images[trained], images[tested]

    def model(self) -> nn.Module:
        return perceptron(SIZES, nn.Tanh)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = self.train[torch.randint(len(self.train), (self.batch_size,), generator=generator)]
        return chosen, chosen

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum(-1).mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        return self.loss(model(self.test), self.test).item()


@dataclass(frozen=True)
class Runs:
    """The runs of an optimizer, one for each seed."""

    contestant: Contestant
    histories: list[History]

    @property
    def steps(self) -> list[int]:
        """The steps after which the error was measured."""
        return list(self.histories[0].measured)

    @property
    def errors(self) -> list[list[float]]:
        """The errors of all runs, for each measure."""
        return [[run.measured[step] for run in self.histories] for step in self.steps]

    @property
    def seconds(self) -> list[float]:
        """The mean CPU time until each measure."""
        return [mean(run.seconds_at[step] for run in self.histories) for step in self.steps]

    @property
    def final(self) -> float:
        return mean(run.final for run in self.histories)

    def place(self, error: float) -> int | None:
        """Return the first measure at which the mean error is at most the given one, or None."""
        return next((place for place, errors in enumerate(self.errors) if mean(errors) <= error), None)


def train_networks(scale: Scale, seed: int, step: Step) -> list[Runs]:
    """Train the network with each optimizer and each seed.

    The optimizers take turns, so that all are slower when the machine is slow for a while.
    """
    task = Reconstruction(scale.steps)
    train(task, INGD, steps=3)  # torch's first steps take long, which is no property of an optimizer
    runs = [Runs(contestant, []) for contestant in CONTESTANTS]
    for number in range(seed, seed + scale.seeds):
        for one in runs:
            step(f"{one.contestant.title}, seed {number}")
            one.histories.append(_train(task, one.contestant, number))
    return runs


def _train(task: Reconstruction, one: Contestant, seed: int) -> History:
    history = train(task, lambda model: one.build(model, one.lr), seed=seed, every=max(task.steps // POINTS, 1))
    if not math.isfinite(history.final):
        raise TrainingError(f"{one.title} diverges with seed {seed}; choose another --seed")
    return history


def network_table(networks: list[Runs]) -> Cells:
    """Return a table with a row for each optimizer."""
    goal = next(runs.final for runs in networks if runs.contestant.name == REFERENCE)
    header = ["optimizer", "rate", "final error", "steps to AdamW's", "CPU s to AdamW's", "CPU s"]
    return header, [_row(runs, goal) for runs in networks]


def _row(runs: Runs, goal: float) -> list[str]:
    place, finals = runs.place(goal), runs.errors[-1]
    reached = ["-", "-"] if place is None else [str(runs.steps[place]), f"{runs.seconds[place]:.2f}"]
    spread = f" ± {half_interval(finals):.2f}" if len(finals) > 1 else ""
    one = runs.contestant
    return [one.title, f"{one.lr:g}", f"{runs.final:.2f}{spread}", *reached, f"{runs.seconds[-1]:.2f}"]
