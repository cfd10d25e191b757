"""The folder of a run: ``config.toml``, ``versions.json``, ``metrics.jsonl``, ``checkpoint.pt`` and ``curves.png``."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ..common.files import atomic_file, write_atomically
from ..common.machine import versions
from .config import Config, TrainingError, as_toml, completed, config_from, read_settings
from .lock import LockedError, locked
from .schedule import needs_the_end
from .seal import SealedStream, check_whole
from .trainer import Epoch

CHANGEABLE = {"data_dir", "device"}
"""The settings that may change when a run is resumed, perhaps on another machine."""

STATE = {"classes", "train size", "epoch", "step", "sums", "seconds", "cpu seconds", "model", "optimizer"}
"""What a checkpoint has beside the config and the epochs, see :meth:`~.trainer.Trainer.state`."""


class RunFolder:
    """The files of a run. A file that cannot be written raises a :class:`TrainingError`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether the folder contains a run."""
        try:
            return self._config.exists()
        except OSError as error:
            raise TrainingError(
                f"cannot look into {self.path}: {error.strerror or error}; give another folder"
            ) from None

    @property
    def _config(self) -> Path:
        return self.path / "config.toml"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        try:
            return self.checkpoint.exists()
        except OSError:  # a folder that cannot be looked into
            return False

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    # ------------------------------------------------------------------ the run
    def check_new(self) -> None:
        """Raise an error if the folder contains a run, or what is left of one."""
        if self.exists:
            raise TrainingError(f"{self.path} holds a run; add --resume to continue it, or choose another --output")
        for file in (self.checkpoint, self._metrics):
            if file.exists():
                raise TrainingError(
                    f"{self.path} holds the {file.name} of a run, but no {self._config.name}; put that file back to go "
                    "on with the run, or choose another --output"
                )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from training in the folder. The folder is made where it is missing."""
        with ExitStack() as stack:
            try:
                with self.writing("lock"):
                    stack.enter_context(locked(self.path))
            except LockedError as owner:
                raise TrainingError(
                    f"another process trains in {self.path} ({owner}); wait for it, or choose another --output"
                ) from None
            yield

    def begin(self, config: Config, device: str, ranks: int = 1) -> None:
        """Write the first files of a run."""
        threads = torch.get_num_threads()
        machine = {"platform": platform.platform(), "device": device, "threads": threads, "ranks": ranks}
        with self.writing("versions.json"):
            write_atomically(self.path / "versions.json", json.dumps({**versions(), **machine}, indent=1) + "\n")
        self.write_config(config)  # the last file, because the run exists as soon as this file does

    def write_config(self, config: Config) -> None:
        """Write the settings of the run."""
        with self.writing("config.toml"):
            write_atomically(self._config, as_toml(config))

    def config(self) -> Config:
        """Read the settings of the run."""
        if not self.exists:
            raise TrainingError(f"{self.path} holds no run: there is no {self._config.name}; give the folder of a run")
        return completed(config_from(read_settings(self._config)))

    def check_same(self, wanted: Mapping[str, object]) -> None:
        """Raise an error if one of these settings differs from the run in the folder and may not change."""
        begun = self.config()
        free = CHANGEABLE if needs_the_end(begun) else {*CHANGEABLE, "epochs"}
        for name, value in wanted.items():
            if name not in free and getattr(begun, name) != value:
                raise TrainingError(
                    f"the run in {self.path} was begun with {name} = {getattr(begun, name)}, not {value}; leave that "
                    "out to continue it, or choose another --output"
                )

    # ------------------------------------------------------------------ checkpoints
    def save(self, config: Config, state: dict[str, Any], epochs: list[Epoch]) -> None:
        """Write a checkpoint. If that fails, the last checkpoint stays as it was."""
        content = {"config": asdict(config), "epochs": [asdict(epoch) for epoch in epochs], **state}
        with self.writing(self.checkpoint.name), atomic_file(self.checkpoint) as stream:
            sealed = SealedStream(stream)
            torch.save(content, sealed)  # type: ignore[arg-type]  # it needs a method write()
            sealed.seal()

    def load(self, config: Config, device: torch.device) -> tuple[dict[str, Any], list[Epoch]] | None:
        """Return the last checkpoint and the epochs until then, or None if there is no checkpoint yet."""
        if not self.checkpoint.exists():
            return None
        try:
            check_whole(self.checkpoint)
            state = torch.load(self.checkpoint, map_location=device, weights_only=True)
            if missing := {"config", "epochs", *STATE} - set(state if isinstance(state, dict) else ()):
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            saved = config_from(state["config"])
            epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        except Exception as error:  # a damaged file may raise any error
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TrainingError(
                f"{self.checkpoint} is no checkpoint of a run, or damaged ({reason}); put the right one there, or "
                "delete it to begin from the start"
            ) from None
        for name, there, here in differences(saved, config, {*CHANGEABLE, "epochs"}):
            raise TrainingError(
                f"{self.checkpoint} is of another run, with {name} = {there} instead of {here}; put the right one "
                "there, or delete it to begin from the start"
            )
        return state, epochs

    # ------------------------------------------------------------------ metrics
    def epochs(self) -> list[Epoch]:
        """Return the finished epochs. A last line that is not complete is ignored."""
        try:
            lines = self._metrics.read_text().splitlines(keepends=True)
            return [_epoch(line) for line in lines if line.endswith("\n")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TrainingError(f"cannot read {self._metrics}: {error.strerror or error}; leave this run out") from None
        except (ValueError, TypeError) as error:
            raise TrainingError(
                f"{self._metrics} is not the metrics of a run, or damaged ({error}); leave it out, or continue it "
                "with --resume, which writes the file anew"
            ) from None

    def write_epochs(self, epochs: list[Epoch]) -> None:
        """Write exactly these epochs. Epochs after the checkpoint from which a run is resumed are dropped."""
        with self.writing(self._metrics.name):
            write_atomically(self._metrics, "".join(map(_line, epochs)))

    def add_epoch(self, epoch: Epoch) -> None:
        """Append an epoch to the metrics."""
        with self.writing(self._metrics.name), self._metrics.open("a") as stream:
            stream.write(_line(epoch))

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Turn a failure to write, for example because the disk is full, into one line with the remedy."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer of archives raises RuntimeError
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            kept = " What was saved before is intact: continue with --resume" if self.has_checkpoint else ""
            raise TrainingError(
                f"cannot write {self.path / name}: {reason}; make room or choose another --output.{kept}"
            ) from None


def differences(one: Config, other: Config, free: set[str]) -> Iterator[tuple[str, object, object]]:
    """Yield the settings in which two configs differ, except those in ``free``."""
    for name in (field.name for field in fields(Config)):
        if name not in free and getattr(one, name) != getattr(other, name):
            yield name, getattr(one, name), getattr(other, name)


def _epoch(line: str) -> Epoch:
    found = Epoch(**json.loads(line))
    for name, value in asdict(found).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {value!r}")
    return found


def _line(epoch: Epoch) -> str:
    return json.dumps(asdict(epoch)) + "\n"
