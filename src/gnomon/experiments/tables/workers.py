"""Training runs in parallel processes of one thread each. Finished work is kept, whenever the processes are stopped."""

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
    # With these settings glibc keeps freed memory. To return pages and request them again takes a third of a step of
    # some networks.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""The environment of the processes. It must be set before they start."""


# ---------------------------------------------------------------------- the work of a process
@dataclass(frozen=True)
class Run:
    """A run of ``gnomon train`` in its own folder."""

    config: Config
    folder: Path
    keep_weights: bool = True

    @property
    def _failure(self) -> Path:
        return self.folder / "failure.txt"

    def perform(self) -> None:
        """Train to the end of the run, from the last checkpoint if there is one. The results are in the folder."""
        outcome = train(self.config, self.folder, resume=True, data=_data(self.config))
        if outcome.signal is not None:
            raise KeyboardInterrupt
        if outcome.failure is not None:
            write_atomically(self._failure, outcome.failure + "\n")
        if not self.keep_weights:
            RunFolder(self.folder).checkpoint.unlink(missing_ok=True)

    def result(self) -> Result | None:
        """Return the result of the run, or None if it has not ended."""
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
    """The time of a step of a task with an optimizer, and the size of the task."""

    seconds: float
    train_size: int
    test_size: int

    def of(self, config: Config) -> float:
        """Estimate the seconds of a whole run. To measure on a sample takes about a third of training on it."""
        trained, measured = self.train_size, self.test_size
        if config.validation:
            measured = round(config.validation * trained)
            trained -= measured
        return config.epochs * self.seconds * (trained + measured / 3) / config.batch_size


def rehearse(config: Config, steps: int = 10) -> Timing:
    """Time the second of two short epochs. The first one includes work that is done only once."""
    data = _data(config)
    size = min(steps * config.batch_size, data.train_size)
    short = replace(config, train_limit=size, test_limit=1, epochs=2)
    first, second = train(short).epochs
    return Timing((second.seconds - first.seconds) / (second.steps - first.steps), data.train_size, data.test_size)


@functools.lru_cache(maxsize=4)
def _read(data: str, directory: str | None, train: int | None, test: int | None, validation: float) -> sets.DataSet:
    return load_data(Config(data=data, data_dir=directory, train_limit=train, test_limit=test, validation=validation))


def _data(config: Config) -> sets.DataSet:
    """Return the data of a config. A process reads it once."""
    return _read(config.data, config.data_dir, config.train_limit, config.test_limit, config.validation)


# ---------------------------------------------------------------------- the processes
class Workers:
    """A pool of processes. When an error, such as Ctrl-C, leaves the context, each process saves its run and ends."""

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
        if threading.current_thread() is threading.main_thread():  # other threads cannot handle signals
            self._handler = signal.signal(signal.SIGTERM, _interrupt)
        return self

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in one of the processes."""
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
    """Handle a request to end in the same way as Ctrl-C."""
    raise KeyboardInterrupt(number)


def default_jobs() -> int:
    """Return the number of GPUs, or of the cores that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _State:
    """The state of a process of the pool."""

    busy = False
    stopping = False


def _begin(gpus: Queue[int] | None) -> None:
    """Prepare a process of the pool."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # only the command receives Ctrl-C; it then ends its processes
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus.get())
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _work(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, unless the process is to stop. Work that was submitted before is then not done."""
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
    """End the process when the command is killed, so that it does not write to the folders of the next command."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    while _State.busy:
        time.sleep(0.1)
    os._exit(1)
