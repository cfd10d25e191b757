"""What every data set offers, where its files are looked for, and what is said when they are not good."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the remedy."""


class DataMissingError(DataError, FileNotFoundError):
    """Data that is not on this machine; the message says where it is looked for and how to get it."""


class DataSet(ABC):
    """Training and test examples by their index. A batch is a function of its arguments alone, so that runs repeat."""

    name: str
    kind: Literal["images", "text"]
    classes: int
    """Labels, or tokens, are below it."""
    channels: int
    train_size: int
    test_size: int

    @abstractmethod
    def train_batch(
        self, indices: Tensor, generator: torch.Generator, chosen: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Inputs, augmented with the generator's random numbers and normalized, and targets.

        With ``chosen`` those samples of the batch alone, as they are in the whole of it.
        """

    @abstractmethod
    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs, normalized, and targets."""

    @abstractmethod
    def held_out(self, share: float) -> DataSet:
        """The training examples alone: the last of them, a share, are the test set, and the others are trained on."""


Loader = Callable[[Path | None, int | None, int | None], DataSet]
"""From a directory and the two limits."""


def data_directory() -> Path:
    """Where data sets lie: ``GNOMON_DATA``, or ``.data`` in the working directory."""
    return Path(os.environ.get("GNOMON_DATA", ".data"))


def places(directory: Path | None, folders: Sequence[str]) -> list[Path]:
    """Where the files of a set may lie: in one of these folders, or in a directory that was named for this set."""
    root = data_directory() if directory is None else directory
    return [root / folder for folder in folders] + ([] if directory is None else [directory])


def find_folder(title: str, candidates: Sequence[Path], content: Sequence[str], remedy: str) -> Path:
    """The first folder that holds one of the names in ``content``."""
    for folder in candidates:
        if any((folder / name).exists() for name in content):
            return folder
    looked = " or ".join(str(folder) for folder in candidates)
    raise DataMissingError(f"{title} is not in {looked}; {remedy}")


def held_under(source: str) -> str:
    """The remedy for data that is not there."""
    return f"get it ({source}) and set GNOMON_DATA, or --data-dir, to the folder that holds it"


def first(limit: int | None, size: int, argument: str) -> int:
    """How many of ``size`` examples a limit leaves."""
    if limit is None:
        return size
    if not 1 <= limit <= size:
        raise DataError(f"{argument}={limit} is not between 1 and {size}, the number of examples; leave it out for all")
    return limit


def split(size: int, share: float) -> int:
    """How many of ``size`` examples are left to train on where a share is held out; there are some of both."""
    kept = size - round(share * size)
    if not 0 < kept < size:
        raise DataError(f"validation={share} of {size} training examples leaves none on one side; give another share")
    return kept


def shuffled(size: int) -> Tensor:
    """One fixed order, for sets that lie sorted by class, so that the first few are of all classes."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))


def library(module: str, package: str) -> ModuleType:
    """A module of the extra ``experiments``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"this data needs {package} ({error}); pip install 'gnomon[experiments]'") from error
