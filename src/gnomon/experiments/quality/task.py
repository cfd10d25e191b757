"""The interface of training tasks, and the loop that trains them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class Task(ABC):
    """A model, its batches and its measure. A seed determines all of them."""

    name: str
    steps: int
    warmup: int = 0
    measure: str
    """A description of what :meth:`evaluate` returns. It is positive, and lower is better."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network at its start. Weights come from torch's global generator."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """Return the measure that is reported, from test data if the task has them."""

    def validate(self, model: nn.Module) -> float:
        """Return the same measure from validation data: a learning rate is chosen by it, and curves show it."""
        return self.evaluate(model)

    def rate(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate: a linear warm-up, then a cosine to zero."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(steps - self.warmup, 1)))


@dataclass
class History:
    """The measurements of a run."""

    loss: list[float] = field(default_factory=list)
    """The loss of every step on its batch."""
    measured: dict[int, float] = field(default_factory=dict)
    """The task's measure after some steps, and after the last."""
    seconds_at: dict[int, float] = field(default_factory=dict)
    """The CPU time of the steps until each measure."""
    seconds: float = 0.0
    """The CPU time of the steps alone."""

    @property
    def final(self) -> float:
        return self.measured[max(self.measured)]


class Training:
    """A model of a task, its optimizer and its schedule, which take steps when they are asked to."""

    def __init__(self, task: Task, optimizer: Callable[[nn.Module], Optimizer], steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._task, self.model = task, task.model()
        self.optimizer = optimizer(self.model)
        self._schedule = LambdaLR(self.optimizer, lambda step: task.rate(step, steps))
        self._generator = torch.Generator().manual_seed(seed)
        self.done, self.seconds = 0, 0.0
        """The number of steps, and the CPU time of the steps alone."""

    def step(self) -> float:
        """Take a step; return the loss on its batch."""
        x, y = self._task.batch(self._generator)
        start = time.process_time()
        self.optimizer.zero_grad()
        loss = self._task.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self._schedule.step()
        self.seconds += time.process_time() - start
        self.done += 1
        return loss.item()

    def advance(self, steps: int) -> None:
        """Take some steps."""
        for _ in range(steps):
            self.step()


def train(
    task: Task,
    optimizer: Callable[[nn.Module], Optimizer],
    steps: int | None = None,
    seed: int = 0,
    every: int | None = None,
    watch: Callable[[int, nn.Module, Any], None] | None = None,
    measure: Callable[[nn.Module], float] | None = None,
) -> History:
    """Train a task with its schedule. Measure at the end, and after every ``every`` steps.

    The measure is the task's :meth:`~Task.evaluate` unless another is given.
    """
    steps = task.steps if steps is None else steps
    measure = task.evaluate if measure is None else measure
    training, history = Training(task, optimizer, steps, seed), History()
    for step in range(1, steps + 1):
        history.loss.append(training.step())
        history.seconds = training.seconds
        if watch is not None:
            watch(step, training.model, training.optimizer)
        if step == steps or (every is not None and step % every == 0):
            history.measured[step] = measure(training.model)
            history.seconds_at[step] = history.seconds
    return history
