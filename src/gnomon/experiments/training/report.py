"""The display of a run's progress."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .config import TrainingError
from .optimizers import TITLES
from .trainer import Epoch, Trainer


class Silent:
    """A reporter that shows nothing."""

    def begin(self, trainer: Trainer) -> None:
        """Receive the trainer before the first step."""

    def step(self, trainer: Trainer) -> None:
        """Receive the trainer after some of the steps."""

    def epoch(self, epoch: Epoch) -> None:
        """Receive the measures of an epoch at its end."""

    def end(self) -> None:
        """Close the report at the end of the run, also after an error."""


HEADER = "epoch      loss   train error   test loss   test error           lr       time"


class Bar(Silent):
    """Prints a line for each epoch. On a terminal it also shows a bar for the whole run."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        columns = [TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[measures]}")]
        times = [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self.progress = Progress(*columns, *times, console=self.console, transient=True, expand=True)

    def begin(self, trainer: Trainer) -> None:
        config, data = trainer.config, trainer.data
        parameters = sum(p.numel() for p in trainer.model.parameters())
        self._print(
            f"{config.model} ({parameters:,} parameters) on {config.data} ({data.train_size:,} to train, "
            f"{data.test_size:,} to {'validate' if config.validation else 'test'}), {TITLES[config.optimizer]} at "
            f"lr {config.lr:g}, {trainer.steps_per_epoch} steps an epoch on {_place(trainer)}"
        )
        if config.batch_size > data.train_size:
            self._print(
                f"batch_size {config.batch_size} is larger than the training set: a step takes all {data.train_size} "
                "samples"
            )
        if trainer.steps:
            self._print(f"going on at epoch {trainer.epoch + 1}, step {trainer.step}")
        self._print(HEADER)
        total = config.epochs * trainer.steps_per_epoch
        self._task = self.progress.add_task("", total=total, completed=trainer.steps, measures="")
        if self.console.is_terminal:
            self.progress.start()
        self.step(trainer)

    def step(self, trainer: Trainer) -> None:
        loss, error = trainer.means
        measures = f"loss {loss:.3f}  error {error:.1f}%" if trainer.step else ""
        epoch = min(trainer.epoch + 1, trainer.config.epochs)
        text = f"epoch {epoch}/{trainer.config.epochs}"
        self.progress.update(self._task, completed=trainer.steps, description=text, measures=measures)

    def epoch(self, epoch: Epoch) -> None:
        time = timedelta(seconds=round(epoch.seconds))
        self._print(
            f"{epoch.epoch:>5} {epoch.loss:>9.4f} {epoch.train_error:>11.2f} % {epoch.test_loss:>11.4f} "
            f"{epoch.test_error:>10.2f} % {epoch.lr:>12.3g} {time!s:>10}"
        )

    def end(self) -> None:
        if self.progress.live.is_started:
            self.progress.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _place(trainer: Trainer) -> str:
    ranks = trainer.ranks.size
    return str(trainer.device) if ranks == 1 else f"{ranks} ranks of {trainer.device.type}"


class TensorBoard(Silent):
    """Writes the measures of each epoch for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise TrainingError(
                "--tensorboard needs the package tensorboard, which is not installed; pip install 'gnomon[experiments]'"
            ) from None
        self._folder, self._open = folder, SummaryWriter
        self._writer: Any = None

    def begin(self, trainer: Trainer) -> None:
        # Entries that an earlier part of the run wrote after its last checkpoint are dropped.
        self._writer = self._open(str(self._folder), purge_step=trainer.epoch + 1)

    def epoch(self, epoch: Epoch) -> None:
        measures = {
            "loss/train": epoch.loss,
            "loss/test": epoch.test_loss,
            "error/train": epoch.train_error,
            "error/test": epoch.test_error,
            "lr": epoch.lr,
            "seconds": epoch.seconds,
        }
        for name, value in measures.items():
            self._writer.add_scalar(name, value, epoch.epoch)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Several(Silent):
    """Calls each of its reporters."""

    def __init__(self, *reporters: Silent) -> None:
        self.reporters = reporters

    def begin(self, trainer: Trainer) -> None:
        for reporter in self.reporters:
            reporter.begin(trainer)

    def step(self, trainer: Trainer) -> None:
        for reporter in self.reporters:
            reporter.step(trainer)

    def epoch(self, epoch: Epoch) -> None:
        for reporter in self.reporters:
            reporter.epoch(epoch)

    def end(self) -> None:
        for reporter in self.reporters:
            reporter.end()
