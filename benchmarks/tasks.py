"""Three different small training tasks: a deep autoencoder, a convolutional classifier and a GPT."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gnomon.experiments.data import DataMissingError, cifar, digits, idx, text
from gnomon.experiments.models.gpt import GPT
from gnomon.experiments.models.perceptron import perceptron


class Task(ABC):
    """A model, its batches and its measure. A seed determines all of them."""

    name: str
    steps: int
    warmup: int = 0
    measure: str
    """A description of what :meth:`evaluate` returns. Lower is better."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network at its start. Weights come from torch's global generator."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float: ...

    def rate(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate: a linear warm-up, then a cosine to zero."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(steps - self.warmup, 1)))


class Autoencoder(Task):
    """784-256-128-32-128-256-784 with tanh on Fashion-MNIST, or on scikit-learn's digits scaled to 28 x 28."""

    name, steps, measure = "autoencoder", 600, "squared error of a training image"
    batch_size = 128

    def __init__(self) -> None:
        try:
            self.images = idx.read(idx.FASHION_MNIST, "train").images.flatten(1).float() / 255
        except DataMissingError:
            self.images = enlarged_digits()

    def model(self) -> nn.Module:
        return perceptron((784, 256, 128, 32, 128, 256, 784), nn.Tanh)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.images), (self.batch_size,), generator=generator)
        return self.images[chosen], self.images[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum(-1).mean()

    def evaluate(self, model: nn.Module) -> float:
        images = self.images[:4096]
        with torch.no_grad():
            return self.loss(model(images), images).item()


def enlarged_digits() -> Tensor:
    """Return scikit-learn's digits at 28 x 28 pixels, as rows in [0, 1]."""
    return interpolate(digits.read().images.float() / digits.RECIPE.white, (28, 28), mode="bilinear").flatten(1)


class Cifar(Task):
    """Four 3 x 3 convolutions with batch norm on a part of CIFAR-100, trained for five epochs."""

    name, measure = "cnn", "test error in %"
    batch_size, epochs, train_size, test_size = 128, 5, 20_000, 4_000

    def __init__(self) -> None:
        self.steps = self.epochs * (self.train_size // self.batch_size)
        train = cifar.read(cifar.CIFAR100, "train").first(self.train_size, "train_size")
        test = cifar.read(cifar.CIFAR100, "test").first(self.test_size, "test_size")
        self.images, self.labels = cifar.RECIPE.normalized(train.images), train.labels
        self.test_images, self.test_labels = cifar.RECIPE.normalized(test.images), test.labels
        self._order = torch.empty(0, dtype=torch.long)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for i, o, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 2)):
            layers += [nn.Conv2d(i, o, 3, stride, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if len(self._order) < self.batch_size:
            self._order = torch.randperm(self.train_size, generator=generator)
        chosen, self._order = self._order[: self.batch_size], self._order[self.batch_size :]
        images = self.images[chosen]
        flipped = torch.rand(len(chosen), generator=generator) < 0.5
        return torch.where(flipped[:, None, None, None], images.flip(-1), images), self.labels[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)

    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            wrong = [(model(x).argmax(-1) != y) for x, y in zip(*self._test_batches(), strict=True)]
        model.train()
        return 100 * torch.cat(wrong).float().mean().item()

    def _test_batches(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.test_images.split(500), self.test_labels.split(500)


class Text(Task):
    """A GPT on the bytes of Python's standard library: 2 layers, width 128, 4 heads, context 64."""

    name, steps, warmup, measure = "gpt", 400, 20, "validation loss"
    batch_size, context = 32, 64

    def __init__(self) -> None:
        self.text, self.held_out = text.read()
        places = torch.Generator().manual_seed(1234)
        self._validation = [self._cut(self.held_out, 128, places) for _ in range(8)]

    def model(self) -> nn.Module:
        return GPT(width=128, heads=4, layers=2, context=self.context)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self._cut(self.text, self.batch_size, generator)

    def _cut(self, text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - self.context, (count, 1), generator=generator)
        tokens = text[starts + torch.arange(self.context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            return sum(self.loss(model(x), y).item() for x, y in self._validation) / len(self._validation)


TASKS: dict[str, Callable[[], Task]] = {"autoencoder": Autoencoder, "cnn": Cifar, "gpt": Text}


# ---------------------------------------------------------------------- training
@dataclass
class History:
    """The measurements of a run."""

    loss: list[float] = field(default_factory=list)
    """The loss of every step on its batch."""
    measured: dict[int, float] = field(default_factory=dict)
    """The task's measure after some steps, and after the last."""
    seconds: float = 0.0
    """The CPU time of the steps alone."""

    @property
    def final(self) -> float:
        return self.measured[max(self.measured)]


def train(
    task: Task,
    optimizer: Callable[[nn.Module], Optimizer],
    steps: int | None = None,
    seed: int = 0,
    every: int | None = None,
    watch: Callable[[int, nn.Module, Any], None] | None = None,
) -> History:
    """Train a task with its schedule. Measure at the end, and after every ``every`` steps."""
    steps = task.steps if steps is None else steps
    torch.manual_seed(seed)
    model = task.model()
    opt = optimizer(model)
    schedule = LambdaLR(opt, lambda step: task.rate(step, steps))
    generator = torch.Generator().manual_seed(seed)
    history = History()
    for step in range(1, steps + 1):
        x, y = task.batch(generator)
        start = time.process_time()
        opt.zero_grad()
        loss = task.loss(model(x), y)
        loss.backward()
        opt.step()
        schedule.step()
        history.seconds += time.process_time() - start
        history.loss.append(loss.item())
        if watch is not None:
            watch(step, model, opt)
        if step == steps or (every is not None and step % every == 0):
            history.measured[step] = task.evaluate(model)
    return history
