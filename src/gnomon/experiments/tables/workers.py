"""Training runs in parallel processes of one thread each; what is finished is kept, whenever the work is stopped."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from .. import data as sets
from ..common.files import write_atomically
from ..training.config import Config, TrainingError
from ..training.folder import RunFolder
from ..training.run import train
from ..training.trainer import Epoch, load_data

T = TypeVar("T")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc keeps what is freed: giving pages back and asking for them again takes a third of a step of some networks
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""Of the processes; it must be there when they start."""


# ---------------------------------------------------------------------- what a process does
@dataclass(frozen=True)
class Run:
    """A run of ``gnomon train`` in a folder of its own."""

    config: Config
    folder: Path
    keep_weights: bool = True

    @property
    def _failure(self) -> Path:
        return self.folder / "failure.txt"

    def perform(self) -> None:
        """Train from where the run is to its end; the folder then tells how it went."""
        outcome = train(self.config, self.folder, resume=True, data=_data(self.config))
        if outcome.signal is not None:
            raise KeyboardInterrupt
        if outcome.failure is not None:
            write_atomically(self._failure, outcome.failure + "\n")
        if not self.keep_weights:
            RunFolder(self.folder).checkpoint.unlink(missing_ok=True)

    def result(self) -> Result | None:
        """How the run ended; None where it has not."""
        place = RunFolder(self.folder)
        if not place.exists:
            return None
        place.check_same(asdict(self.config))
        epochs, failed = place.epochs(), self._failure.exists()
        return Result(self.config, epochs, failed) if failed or len(epochs) >= self.config.epochs else None


@dataclass(frozen=True)
class Result:
    """A run that has ended."""

    config: Config
    epochs: list[Epoch]
    diverged: bool = False


@dataclass(frozen=True)
class Timing:
    """What a step of a task takes with an optimizer, and how large the task is."""

    seconds: float
    train_size: int
    test_size: int

    def of(self, config: Config) -> float:
        """Seconds of a whole run; measuring on a sample is about a third of training on it."""
        trained, measured = self.train_size, self.test_size
        if config.validation:
            measured = round(config.validation * trained)
            trained -= measured
        return config.epochs * self.seconds * (trained + measured / 3) / config.batch_size


def rehearse(config: Config, steps: int = 10) -> Timing:
    """Time the second of two short epochs: in the first one much is done once."""
    data = _data(config)
    size = min(steps * config.batch_size, data.train_size)
    short = replace(config, train_limit=size, test_limit=1, epochs=2)
    first, second = train(short).epochs
    return Timing((second.seconds - first.seconds) / (second.steps - first.steps), data.train_size, data.test_size)


@functools.lru_cache(maxsize=4)
def _read(data: str, directory: str | None, train: int | None, test: int | None, validation: float) -> sets.DataSet:
    return load_data(Config(data=data, data_dir=directory, train_limit=train, test_limit=test, validation=validation))


def _data(config: Config) -> sets.DataSet:
    """The config's data, which a process reads once."""
    return _read(config.data, config.data_dir, config.train_limit, config.test_limit, config.validation)


# ---------------------------------------------------------------------- the processes
class Workers:
    """So many processes. Leaving the context with an error, Ctrl-C among them, lets each save and ends it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> Workers:
        context = multiprocessing.get_context("spawn")
        gpus: Queue[int] | None = context.Queue() if torch.cuda.is_available() else None
        for worker in range(self.count if gpus is not None else 0):
            gpus.put(worker % torch.cuda.device_count())  # type: ignore[union-attr]
        self._others = set(multiprocessing.active_children())
        self._environment = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        self._pool = ProcessPoolExecutor(self.count, context, _begin, (gpus,))
        self._handler = None
        if threading.current_thread() is threading.main_thread():  # others cannot be told of signals
            self._handler = signal.signal(signal.SIGTERM, _interrupt)
        return self

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._pool.submit(_work, function, *arguments)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        for name, value in self._environment.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A request to end is answered as Ctrl-C is."""
    raise KeyboardInterrupt(number)


def default_jobs() -> int:
    """One for each GPU, or for each core that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _State:
    """Of a process of the pool."""

    busy = False
    stopping = False


def _begin(gpus: Queue[int] | None) -> None:
    """The first thing that a process does."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C is for the command, which then tells its processes
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus.get())
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _work(function: Callable[..., T], *arguments: Any) -> T:
    """Call it, unless the process is to stop: work that lay ready is left then."""
    try:
        _State.busy = True
        if _State.stopping:
            raise KeyboardInterrupt
        return function(*arguments)
    except KeyboardInterrupt:
        _State.stopping = True
        raise TrainingError("interrupted") from None
    finally:
        _State.busy = False


def _stop(number: int, frame: FrameType | None) -> None:
    _State.stopping = True
    if _State.busy:
        raise KeyboardInterrupt


def _end_with_parent() -> None:
    """A command that is killed leaves nobody behind who would write to the folders of the next one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    while _State.busy:
        time.sleep(0.1)
    os._exit(1)
