"""The training runs of a table, as work for a process."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import data as sets
from ..common.files import write_atomically
from ..training.config import Config
from ..training.folder import RunFolder
from ..training.run import train
from ..training.trainer import Epoch, load_data


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
