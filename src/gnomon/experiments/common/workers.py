"""A pool of processes of one thread each. Finished work is kept, whenever the processes are stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any, TypeVar

import torch

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


class WorkInterruptedError(RuntimeError):
    """A process of the pool was asked to end while it worked."""


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
        raise WorkInterruptedError("interrupted") from None
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
