"""A training run, from its start or from its last checkpoint to its end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import data as sets
from .config import Config, TrainingError, completed
from .curves import draw_run
from .folder import RunFolder
from .ranks import ALONE, Ranks, reason
from .report import Silent
from .trainer import CHECK_EVERY, DivergedError, Epoch, Trainer, load_data

SAVE_EVERY = 60.0
"""The seconds between checkpoints."""


@dataclass
class Outcome:
    """The result of a run."""

    config: Config
    trainer: Trainer
    epochs: list[Epoch] = field(default_factory=list)
    failure: str | None = None
    """The reason why the run ended early: the loss or the weights were no longer finite."""
    signal: int | None = None
    """The signal that interrupted the run."""


class _InterruptedError(Exception):
    """A rank has received a signal. It is raised between steps, when the state is consistent."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def train(
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = False,
    reporter: Silent | None = None,
    save_every: float = SAVE_EVERY,
    data: sets.DataSet | None = None,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Train according to a config, or resume the run in a folder.

    Args:
        config: The settings of the run. Settings that are None get defaults (:func:`~.config.completed`).
        folder: The folder of the run's files, or None for a run in memory.
        resume: Whether to resume from the last checkpoint of the folder, if there is one. ``config`` must agree with
            the run in the folder.
        reporter: The display of the progress.
        save_every: The seconds between checkpoints. With 0 there is a checkpoint after each step.
        data: The data of the config, if it is loaded already.
        ranks: The processes that train together. The first one writes the folder.

    A signal to end (Ctrl-C) takes effect after the step, and a checkpoint is then saved. Bad input, a full disk and a
    lost rank raise :class:`~.config.TrainingError` or :class:`~gnomon.experiments.data.DataError` with one line.
    """
    try:
        return _trained(completed(config), folder, resume, reporter or Silent(), save_every, data, ranks)
    except RuntimeError as error:
        if not ranks.is_loss_of_a_rank(error):
            raise
        has_checkpoint = folder is not None and RunFolder(folder).has_checkpoint
        where = "go on from the last checkpoint" if has_checkpoint else "begin again"
        how = "" if folder is None else f": gnomon train --output {folder} --resume"
        raise TrainingError(
            f"rank {ranks.rank} of {ranks.size} has lost another rank ({reason(error)}); {where}, alone or with "
            f"torchrun on as many ranks as there are{how}"
        ) from None


def _trained(
    config: Config,
    folder: Path | None,
    resume: bool,
    reporter: Silent,
    save_every: float,
    data: sets.DataSet | None,
    ranks: Ranks,
) -> Outcome:
    place = RunFolder(folder) if folder is not None and ranks.leads else None
    with nullcontext() if place is None else place.alone():
        return _trained_in(place, config, resume, reporter, save_every, data, ranks)


def _trained_in(
    place: RunFolder | None,
    config: Config,
    resume: bool,
    reporter: Silent,
    save_every: float,
    data: sets.DataSet | None,
    ranks: Ranks,
) -> Outcome:
    goes_on = resume and place is not None and place.exists
    if place is not None and goes_on:
        place.check_same(asdict(config))
    elif place is not None:
        place.check_new()
    data = data or load_data(config)
    cuda = range(torch.cuda.device_count())
    with torch.random.fork_rng(cuda), _noted_signals() as signals:
        run = _Run(config, Trainer(config, data, ranks), place, reporter, save_every, signals)
        run.begin(goes_on)
        return run.outcome()


class _Run:
    """The loop over epochs, with checkpoints, metrics, reports and signals."""

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
        self.save_every, self.signals, self.ranks = save_every, signals, trainer.ranks
        self.epochs: list[Epoch] = []

    def begin(self, goes_on: bool) -> None:
        """Load the last checkpoint if the run is resumed. The first rank, which has the folder, decides and reads."""
        saved = self.ranks.from_first(lambda: self._saved() if goes_on else None)
        if saved is not None:
            state, self.epochs = saved
            self.trainer.load(state)
        if self.place is None:
            return
        if not goes_on:
            self.place.begin(self.config, str(self.trainer.device), self.ranks.size)
        self.place.write_config(self.config)
        self.place.write_epochs(self.epochs)

    def _saved(self) -> tuple[dict[str, Any], list[Epoch]] | None:
        device = torch.device("cpu") if self.ranks.several else self.trainer.device
        return None if self.place is None else self.place.load(self.config, device)

    def outcome(self) -> Outcome:
        """Train to the end and return the result."""
        outcome = Outcome(self.config, self.trainer, self.epochs)
        self.reporter.begin(self.trainer)
        try:
            self._train()
            self._save()
        except _InterruptedError as interrupt:
            outcome.signal = interrupt.number
            try:
                self._save()
            except DivergedError as error:
                outcome.failure = str(error)
        except DivergedError as error:
            outcome.failure = str(error)
        except RuntimeError as error:
            if not self.config.compile or self.ranks.is_loss_of_a_rank(error):
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
                if self._heed_signals(save=time.monotonic() - saved >= self.save_every):
                    self._save()
                    saved = time.monotonic()
            epoch = self.trainer.finish_epoch(between=self._heed_signals)
            self.epochs.append(epoch)
            if self.place is not None:
                self.place.add_epoch(epoch)
            self.reporter.epoch(epoch)

    def _heed_signals(self, save: bool = False) -> bool:
        """Return whether any rank wants to save. A signal to any rank interrupts all ranks."""
        number, save_now = self.ranks.greatest(self.signals[0] if self.signals else 0, save)
        if number:
            raise _InterruptedError(number)
        return bool(save_now)

    def _save(self) -> None:
        """Write a checkpoint, unless the weights are not finite. In that case the last good one stays."""
        self.trainer.check_weights()
        state = self.trainer.state()  # the ranks may have to gather it together
        if self.place is not None:
            self.place.save(self.config, state, self.epochs)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Give a list of the received signals to end. A second signal raises ``KeyboardInterrupt`` at once."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
