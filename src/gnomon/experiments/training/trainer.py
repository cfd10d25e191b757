"""The training of a network: everything that a step depends on, without files and displays."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .. import data as sets
from .. import models
from .config import Config, TrainingError
from .optimizers import build_optimizer
from .ranks import ALONE, Ranks, load_optimizer_state, optimizer_state
from .schedule import rate

CHECK_EVERY = 10
"""The steps between checks of the loss. At each check the CPU waits for the GPU."""


class DivergedError(Exception):
    """The loss or the weights are no longer finite."""


@dataclass(frozen=True)
class Epoch:
    """The measurements at the end of an epoch. It is a line of ``metrics.jsonl``."""

    epoch: int
    """The number of finished epochs."""
    steps: int
    """The number of steps since the start of the run."""
    loss: float
    """The mean loss of the epoch's training batches."""
    train_error: float
    """The mean error of the epoch's training batches in %."""
    test_loss: float
    test_error: float
    lr: float
    """The learning rate at the epoch's last step."""
    seconds: float
    """The time of all training steps since the start of the run, with their batches, without tests and checkpoints."""
    cpu_seconds: float
    """The same in CPU time, over all threads of the process. If there are several ranks, it is that of the first."""


def load_data(config: Config) -> sets.DataSet:
    """Load the data of a config. If a part of the training set is held out, it replaces the test set."""
    directory = None if config.data_dir is None else Path(config.data_dir)
    found = sets.load(config.data, directory, train_limit=config.train_limit, test_limit=config.test_limit)
    return found.held_out(config.validation) if config.validation else found


def chosen_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """Return the device of a name. Each of several ranks has its own GPU."""
    remedy = "'auto' takes what there is"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.several and name == "cuda":
        name, remedy = f"cuda:{ranks.local_rank}", "start one rank for each GPU, or give --device cpu"
    elif ranks.several and name.startswith("cuda:"):
        raise TrainingError(f"device {name!r} is one GPU for {ranks.size} ranks; give 'cuda', which is one for each")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(f"device {name!r} cannot be used: {reason}; {remedy}") from None
    return device


def seed_of(*parts: object) -> int:
    """Return a seed from numbers and words, so that the seeds of runs, epochs and steps are unrelated."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class Trainer:
    """A model, its optimizer, and the number of steps that were taken.

    All random numbers of a step come from the run's seed and the number of the step. So a run that is resumed in the
    middle of an epoch gives the same results as one that was not interrupted. Each rank has a trainer, and all ranks
    call its methods together.
    """

    def __init__(self, config: Config, data: sets.DataSet, ranks: Ranks = ALONE) -> None:
        self.config, self.data, self.ranks = config, data, ranks
        self.device = chosen_device(config.device, ranks)
        self.epoch = self.step = 0
        self.seconds = self.cpu_seconds = 0.0
        self.sums = torch.zeros(2, device=self.device)  # the sums of loss and error over the epoch's steps
        self.batch_size = min(config.batch_size, data.train_size)
        self._share = ranks.share(self.batch_size)
        self.steps_per_epoch = data.train_size // self.batch_size
        torch.manual_seed(seed_of(config.seed, "model"))
        self.model = self._built().to(self.device)
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._check_fit()
        trained = ranks.wrapped(self.model)
        self.optimizer = build_optimizer(config, trained)
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        # The optimizer is built first, because a compiled model ignores hooks that are added later.
        self.forward: Callable[[Tensor], Tensor] = torch.compile(trained) if config.compile else trained

    def _built(self) -> nn.Module:
        try:
            return models.build(self.config.model, self.data.classes, channels=self.data.channels)
        except (ValueError, ImportError) as error:
            raise TrainingError(str(error)) from None

    @property
    def channels_last(self) -> bool:
        return self.config.channels_last and self.data.kind == "images"

    def _check_fit(self) -> None:
        """Raise an error if the network does not accept the data, or lacks an output for each class."""
        what = f"model {self.config.model} does not fit the data {self.config.data}"
        x, y = self.data.test_batch(torch.arange(min(2, self.data.test_size)))
        shape = " x ".join(map(str, x.shape[1:]))
        self.model.eval()
        try:
            with torch.no_grad():
                output = self.model(self._placed(x))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise TrainingError(f"{what}, whose inputs are {shape}: {reason}; choose another model") from None
        if output.shape[:-1] != y.shape or output.shape[-1] != self.data.classes:
            raise TrainingError(
                f"{what}: outputs of shape {tuple(output.shape)} for targets of shape {tuple(y.shape)} in "
                f"{self.data.classes} classes; choose another model"
            )

    def _placed(self, x: Tensor) -> Tensor:
        if self.channels_last and x.ndim == 4:
            return x.to(self.device, memory_format=torch.channels_last)
        return x.to(self.device)

    # ------------------------------------------------------------------ steps
    @property
    def steps(self) -> int:
        """The number of steps since the start of the run."""
        return self.epoch * self.steps_per_epoch + self.step

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        assert self.config.lr is not None
        return self.config.lr * rate(self.config, max(self.steps - 1, 0), self.steps_per_epoch)

    @property
    def means(self) -> tuple[float, float]:
        """The mean loss, and the mean error in %, of the epoch's steps so far."""
        loss, error = (self.sums / max(self.step, 1)).tolist()
        return loss, error

    def rest_of_epoch(self) -> Iterator[None]:
        """Take the remaining steps of the epoch. One step is taken for each item of the iterator."""
        self.model.train()
        wall, cpu = time.perf_counter(), time.process_time()
        for x, y in self._batches():
            self._take_step(x, y)
            self.step += 1
            if self.step % CHECK_EVERY == 0 or self.step == self.steps_per_epoch:
                self.check_loss()
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += time.process_time() - cpu
            yield
            wall, cpu = time.perf_counter(), time.process_time()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the remaining batches of the epoch. Each is prepared while the batch before it is trained on.

        The last samples that do not fill a batch are left out. The next epoch has another order.
        """
        seed, epoch = self.config.seed, self.epoch
        order = torch.randperm(self.data.train_size, generator=_generator(seed, epoch, "order"))

        def batch(step: int) -> tuple[Tensor, Tensor]:
            chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
            return self.data.train_batch(chosen, _generator(seed, epoch, step, "batch"), self._share)

        with ThreadPoolExecutor(max_workers=1) as worker:
            coming = deque(worker.submit(batch, step) for step in range(self.step, self.steps_per_epoch)[:1])
            while coming:
                present = coming.popleft().result()
                if self.step + 1 < self.steps_per_epoch:
                    coming.append(worker.submit(batch, self.step + 1))
                yield present

    def _take_step(self, x: Tensor, y: Tensor) -> None:
        own = (self.ranks.rank,) if self.ranks.rank else ()
        torch.manual_seed(seed_of(self.config.seed, self.epoch, self.step, "step", *own))  # for example for dropout
        factor = rate(self.config, self.steps, self.steps_per_epoch)
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        self.optimizer.zero_grad()
        loss, error = self._loss_and_error(self.forward, x, y)
        loss.backward()
        self.optimizer.step()
        self.sums += self.ranks.mean(torch.stack([loss.detach(), error]))

    def _loss_and_error(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross entropy and the share of wrong answers in %, over all positions of a text."""
        y = y.to(self.device).flatten()
        with self._autocast():
            output = forward(self._placed(x)).flatten(0, -2)
        return cross_entropy(output.float(), y), 100 * (output.detach().argmax(-1) != y).float().mean()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.amp == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # ------------------------------------------------------------------ checks and measures
    def check_loss(self) -> None:
        """Raise an error if the loss is not finite."""
        if not math.isfinite(self.means[0]):
            raise DivergedError(f"the loss is not finite at epoch {self.epoch + 1}, step {self.step}")

    def check_weights(self) -> None:
        """Raise an error if the weights are not finite. They may be infinite although the loss was finite."""
        self.check_loss()
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise DivergedError(f"weights are not finite at epoch {self.epoch + 1}, step {self.step}")

    def finish_epoch(self, between: Callable[[], object]) -> Epoch:
        """Measure on the test set, and go to the next epoch. ``between`` is called after each batch."""
        test_loss, test_error = self.measure(between)
        if not math.isfinite(test_loss):
            raise DivergedError(f"the test loss is not finite after epoch {self.epoch + 1}")
        loss, train_error = self.means
        times = round(self.seconds, 3), round(self.cpu_seconds, 3)
        record = Epoch(self.epoch + 1, self.steps, loss, train_error, test_loss, test_error, self.lr, *times)
        self.epoch, self.step = self.epoch + 1, 0
        self.sums.zero_()
        return record

    def measure(self, between: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Return the loss, and the error in %, over the whole test set. Each rank measures a part of it."""
        self.model.eval()
        self.ranks.share_buffers(self.model)
        # The parts of the ranks differ in size and may be empty, so a forward pass must not wait for other ranks.
        forward = self.model if self.ranks.several else self.forward
        sums = torch.zeros(2, device=self.device)
        with torch.no_grad():
            for batch in torch.arange(self.data.test_size).split(self.batch_size):
                if len(own := batch[self.ranks.rank :: self.ranks.size]):
                    sums += len(own) * torch.stack(self._loss_and_error(forward, *self.data.test_batch(own)))
                between()
        loss, error = (self.ranks.total(sums) / self.data.test_size).tolist()
        return loss, error

    # ------------------------------------------------------------------ states
    def state(self) -> dict[str, Any]:
        """Return everything from which the run can be resumed."""
        return {
            "classes": self.data.classes,
            "train size": self.data.train_size,
            "epoch": self.epoch,
            "step": self.step,
            "sums": self.sums,
            "seconds": self.seconds,
            "cpu seconds": self.cpu_seconds,
            "model": self.model.state_dict(),
            "optimizer": optimizer_state(self.optimizer),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load a state of the same run. A state of another run raises an error."""
        for what, now in (("classes", self.data.classes), ("train size", self.data.train_size)):
            if state[what] != now:
                raise TrainingError(
                    f"the checkpoint is of data with {what} {state[what]}, the data has {now}; give the data it was "
                    "begun with, or begin another run"
                )
        try:
            self.model.load_state_dict(state["model"])
            load_optimizer_state(self.optimizer, state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0].rstrip(":")
            raise TrainingError(
                f"the checkpoint is of another model or optimizer ({reason}); begin another run"
            ) from None
        self.epoch, self.step = state["epoch"], state["step"]
        self.seconds, self.cpu_seconds = state["seconds"], state["cpu seconds"]
        self.sums.copy_(state["sums"])


def _generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*parts))
