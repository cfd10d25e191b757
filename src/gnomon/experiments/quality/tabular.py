"""Perceptrons on tables: a classifier of MAGIC's telescope events, and a regression on generated measurements."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..data import magic
from ..models.perceptron import perceptron
from .samples import Samples, SampleTask, percent_wrong


class Magic(SampleTask):
    """A classifier of showers in MAGIC's telescope, with five hidden layers of width 256."""

    name, steps, measure = "magic", 700, "test error in %"
    batch_size = 128
    scores = staticmethod(percent_wrong)

    def __init__(self) -> None:
        inputs, labels = magic.read()
        held_out = len(inputs) // 5
        sizes = (len(inputs) - 2 * held_out, held_out, held_out)
        mean, deviation = inputs[: sizes[0]].mean(0), inputs[: sizes[0]].std(0)
        self.train, self.validation, self.test = Samples((inputs - mean) / deviation, labels).split(*sizes)

    def model(self) -> nn.Module:
        return perceptron((10, *(256,) * 5, 2))


class Regression(SampleTask):
    """A regression 12-256-256-256-3 on inputs that are correlated and badly scaled, with noise that depends on them.

    Hidden causes z are uniform in the unit cube of eight dimensions, and the inputs are twelve mixtures of them whose
    scales go from 0.1 to 10. The targets are the end of an arm of three links, whose angles and lengths are causes, and
    Friedman's function ``10 sin(pi z1 z2) + 20 (z3 - 1/2)^2 + 10 z4 + 5 z5`` (Friedman 1991), each with unit variance.
    Training targets have noise of deviation ``0.05 + 0.25 z6^2``. Validation and test targets have none.
    """

    name, steps, measure = "regression", 800, "test error in % of the targets' deviation"
    batch_size = 256
    sizes = (12_000, 2_000, 4_000)
    causes, inputs = 8, 12

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2024)
        causes = torch.rand(sum(self.sizes), self.causes, generator=generator)
        mixing = torch.randn(self.causes, self.inputs, generator=generator) / math.sqrt(self.causes)
        mixed = 2 * (causes - 0.5) @ (mixing + torch.eye(self.causes, self.inputs))
        scales = 10 ** torch.linspace(-1, 1, self.inputs)[torch.randperm(self.inputs, generator=generator)]
        targets = torch.cat([_arm(causes), _friedman(causes)], 1)
        targets = (targets - targets.mean(0)) / targets.std(0)
        train, self.validation, self.test = Samples(mixed * scales, targets).split(*self.sizes)
        deviation = 0.05 + 0.25 * causes[: self.sizes[0], 5:6].square()
        noise = deviation * torch.randn(train.targets.shape, generator=generator)
        self.train = Samples(train.inputs, train.targets + noise)

    def model(self) -> nn.Module:
        return perceptron((self.inputs, 256, 256, 256, 3))

    def scores(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean(1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target)

    def _mean_score(self, model: nn.Module, samples: Samples) -> float:
        return 100 * math.sqrt(super()._mean_score(model, samples))


def _arm(causes: Tensor) -> Tensor:
    """Return the coordinates of the end of an arm of three links."""
    angles = (math.pi * (causes[:, :3] - 0.5)).cumsum(1)
    lengths = 0.5 + causes[:, 5:8]
    return torch.stack([(lengths * angles.cos()).sum(1), (lengths * angles.sin()).sum(1)], 1)


def _friedman(causes: Tensor) -> Tensor:
    z1, z2, z3, z4, z5 = causes[:, :5].unbind(1)
    return (10 * torch.sin(math.pi * z1 * z2) + 20 * (z3 - 0.5).square() + 10 * z4 + 5 * z5)[:, None]
