"""Three small training tasks that are unlike each other: a deep autoencoder, a convolutional classifier, a GPT."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .models.gpt import GPT
from .models.perceptron import perceptron

FASHION_MNIST = (Path("/usr/share/datasets/fashion-mnist"), Path("fashion-mnist"))
"""Where Debian's package dataset-fashion-mnist puts it, and where it may lie under ``GNOMON_DATA``."""


class DataMissingError(FileNotFoundError):
    """Data that a task needs is not on this machine; the message says where it is looked for."""


def data_directory() -> Path:
    """Where data sets lie: ``GNOMON_DATA``, or ``.data`` in the working directory."""
    return Path(os.environ.get("GNOMON_DATA", ".data"))


class Task(ABC):
    """A model, its batches and its measure, all fixed by a seed."""

    name: str
    steps: int
    warmup: int = 0
    measure: str
    """What :meth:`evaluate` gives; lower is better."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The network at its start, from torch's global generator."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float: ...

    def rate(self, step: int, steps: int) -> float:
        """Linear warm-up, then a cosine to zero, as a multiple of the learning rate."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(steps - self.warmup, 1)))


class Autoencoder(Task):
    """784-256-128-32-128-256-784 with tanh on Fashion-MNIST, or on scikit-learn's digits scaled to 28 x 28."""

    name, steps, measure = "autoencoder", 600, "squared error of a training image"
    batch_size = 128

    def __init__(self) -> None:
        self.images = fashion_mnist() if fashion_mnist_file() else digits()

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


class Cifar(Task):
    """Four 3 x 3 convolutions with batch norm on a part of CIFAR-100; five epochs."""

    name, measure = "cnn", "test error in %"
    batch_size, epochs, train_size, test_size = 128, 5, 20_000, 4_000

    def __init__(self) -> None:
        self.steps = self.epochs * (self.train_size // self.batch_size)
        self.images, self.labels = cifar100("train", self.train_size)
        self.test_images, self.test_labels = cifar100("test", self.test_size)
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
        self.text, self.held_out = python_sources()
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


# ---------------------------------------------------------------------- data
def fashion_mnist_file() -> Path | None:
    folders = (FASHION_MNIST[0], data_directory() / FASHION_MNIST[1])
    return next((f for folder in folders if (f := folder / "train-images-idx3-ubyte.gz").exists()), None)


def fashion_mnist() -> Tensor:
    """60,000 images as rows of 784 numbers in [0, 1]."""
    file = fashion_mnist_file()
    if file is None:
        raise DataMissingError(f"Fashion-MNIST is not in {FASHION_MNIST[0]}; install Debian's dataset-fashion-mnist")
    pixels = np.frombuffer(gzip.decompress(file.read_bytes()), dtype=np.uint8, offset=16)
    return torch.from_numpy(pixels.reshape(-1, 784).copy()).float() / 255


def digits() -> Tensor:
    """scikit-learn's 1,797 digits, enlarged to 28 x 28, as rows in [0, 1]."""
    from sklearn.datasets import load_digits

    small = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    return interpolate(small, (28, 28), mode="bilinear").flatten(1)


def cifar100(part: str, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` images of the official pickles, normalized, and their fine labels."""
    file = data_directory() / "cifar-100-python" / part
    if not file.exists():
        raise DataMissingError(f"CIFAR-100 is not in {file.parent}; set GNOMON_DATA to the folder that holds it")
    with file.open("rb") as stream:
        content = pickle.load(stream, encoding="bytes")
    images = torch.from_numpy(content[b"data"][:count].reshape(-1, 3, 32, 32)).float() / 255
    mean, std = torch.tensor([0.5071, 0.4867, 0.4408]), torch.tensor([0.2675, 0.2565, 0.2761])
    return (images - mean[:, None, None]) / std[:, None, None], torch.tensor(content[b"fine_labels"][:count])


def python_sources() -> tuple[Tensor, Tensor]:
    """The bytes of the standard library's own modules; of every ten files the last is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = sorted(f for f in root.rglob("*.py") if outside.isdisjoint(f.relative_to(root).parts))
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) == held) for held in (False, True)]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


# ---------------------------------------------------------------------- training
@dataclass
class History:
    """How a run went."""

    loss: list[float] = field(default_factory=list)
    """At every step, on its batch."""
    measured: dict[int, float] = field(default_factory=dict)
    """The task's measure after some steps, the last among them."""
    seconds: float = 0.0
    """Process CPU time of the steps alone."""

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
    """A task trained with its schedule; measured at the end, and after each ``every`` steps."""
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
