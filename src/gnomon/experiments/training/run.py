"""A training run from its start, or from where it was stopped, to its end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .. import data as sets
from .config import Config, TrainingError, completed
from .curves import draw_run
from .folder import RunFolder
from .report import Silent
from .trainer import CHECK_EVERY, DivergedError, Epoch, Trainer, load_data

SAVE_EVERY = 60.0
"""Seconds between checkpoints."""


@dataclass
class Outcome:
    """How a run ended."""

    config: Config
    trainer: Trainer
    epochs: list[Epoch] = field(default_factory=list)
    failure: str | None = None
    """Why it could not go on, where the loss or the weights were no longer finite."""
    signal: int | None = None
    """What it was interrupted by."""


class _InterruptedError(Exception):
    """A signal has come, and the state is whole."""


def train(
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = False,
    reporter: Silent | None = None,
    save_every: float = SAVE_EVERY,
    data: sets.DataSet | None = None,
) -> Outcome:
    """Train as a config says, or go on with the run in a folder.

    Args:
        config: what to train; settings that are not given are filled in (:func:`~.config.completed`).
        folder: where the run keeps its files; None for a run in memory.
        resume: go on from the folder's last checkpoint, if there is one; ``config`` must say the same as the run's own.
        reporter: what shows the progress.
        save_every: seconds between checkpoints; 0 for one after each step.
        data: the config's data, where it is at hand.

    A signal to end (Ctrl-C) waits for the end of the step; a checkpoint is then saved. Bad input, and a disk that is
    full, raise :class:`~.config.TrainingError` or :class:`~gnomon.experiments.data.DataError` with one line.
    """
    config, reporter = completed(config), reporter or Silent()
    place = None if folder is None else RunFolder(folder)
    goes_on = resume and place is not None and place.exists
    if place is not None and goes_on:
        place.check_same(asdict(config))
    elif place is not None:
        place.check_new()
    data = data or load_data(config)
    cuda = range(torch.cuda.device_count())
    with torch.random.fork_rng(cuda), _noted_signals() as signals:
        run = _Run(config, Trainer(config, data), place, reporter, save_every, signals)
        run.begin(goes_on)
        return run.outcome()


class _Run:
    """The loop over epochs, with what is around the steps: checkpoints, metrics, reports and signals."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        place: RunFolder | None,
        reporter: Silent,
        save_every: float,
        signals: list[int],
    ) -> None:
        self.config, self.trainer, self.place, self.reporter = config, trainer, place, reporter
        self.save_every, self.signals = save_every, signals
        self.epochs: list[Epoch] = []

    def begin(self, goes_on: bool) -> None:
        if self.place is None:
            return
        if not goes_on:
            self.place.begin(self.config, str(self.trainer.device))
        elif (saved := self.place.load(self.config, self.trainer.device)) is not None:
            state, self.epochs = saved
            self.trainer.load(state)
        self.place.write_config(self.config)
        self.place.write_epochs(self.epochs)

    def outcome(self) -> Outcome:
        outcome = Outcome(self.config, self.trainer, self.epochs)
        self.reporter.begin(self.trainer)
        try:
            self._train()
            self._save()
        except _InterruptedError:
            outcome.signal = self.signals[0]
            try:
                self._save()
            except DivergedError as error:
                outcome.failure = str(error)
        except DivergedError as error:
            outcome.failure = str(error)
        except RuntimeError as error:
            if not self.config.compile:
                raise
            raise TrainingError(f"compiling failed ({str(error).splitlines()[0]}); leave out --compile") from None
        finally:
            self.reporter.end()
        if self.place is not None and self.epochs:
            with self.place.writing(self.place.curves.name):
                draw_run(self.epochs, self.config, self.place.curves)
        return outcome

    def _train(self) -> None:
        saved = time.monotonic()
        while self.trainer.epoch < self.config.epochs:
            for _ in self.trainer.rest_of_epoch():
                if self.trainer.step % CHECK_EVERY == 0:
                    self.reporter.step(self.trainer)
                self._heed_signals()
                if time.monotonic() - saved >= self.save_every:
                    self._save()
                    saved = time.monotonic()
            epoch = self.trainer.finish_epoch(between=self._heed_signals)
            self.epochs.append(epoch)
            if self.place is not None:
                self.place.add_epoch(epoch)
            self.reporter.epoch(epoch)

    def _heed_signals(self) -> None:
        if self.signals:
            raise _InterruptedError

    def _save(self) -> None:
        """A checkpoint, unless the weights are not finite: the last good one stays then."""
        self.trainer.check_weights()
        if self.place is not None:
            self.place.save(self.config, self.trainer.state(), self.epochs)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The signals to end that have come: they wait until the state is whole. A second one does not wait."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # others cannot be told of signals
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
