"""Tasks with samples of inputs and targets: batches are drawn from the training samples, the others are held out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .task import Task


class Samples(NamedTuple):
    """Inputs and their targets."""

    inputs: Tensor
    targets: Tensor

    def split(self, *sizes: int) -> tuple[Samples, ...]:
        """Return consecutive parts of these sizes."""
        return tuple(map(Samples, self.inputs.split(sizes), self.targets.split(sizes)))


class SampleTask(Task):
    """A task with training, validation and test samples. Its measure is the mean of the samples' :meth:`scores`."""

    batch_size: int
    train: Samples
    validation: Samples
    test: Samples

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.train.inputs), (self.batch_size,), generator=generator)
        return self.train.inputs[chosen], self.train.targets[chosen]

    def scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return what is measured of each sample: by default its cross entropy."""
        return cross_entropy(output, target, reduction="none")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)

    def evaluate(self, model: nn.Module) -> float:
        return self._mean_score(model, self.test)

    def validate(self, model: nn.Module) -> float:
        return self._mean_score(model, self.validation)

    def _mean_score(self, model: nn.Module, samples: Samples) -> float:
        model.eval()
        with torch.no_grad():
            parts = zip(samples.inputs.split(500), samples.targets.split(500), strict=True)
            scores = torch.cat([self.scores(model(x), y) for x, y in parts])
        model.train()
        return scores.mean().item()


def percent_wrong(output: Tensor, target: Tensor) -> Tensor:
    """Return 100 for each sample whose class is not the most likely one, and 0 for the others."""
    return 100.0 * (output.argmax(-1) != target)
