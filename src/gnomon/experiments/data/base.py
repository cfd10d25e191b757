"""The interface of data sets, the search for their files, and their errors."""

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
    """Data cannot be used. The message names the file and the remedy."""


class DataMissingError(DataError, FileNotFoundError):
    """Data is not on this machine. The message says where it was searched and how to get it."""


class DataSet(ABC):
    """Training and test examples by index. A batch depends only on its arguments, so that runs are reproducible."""

    name: str
    kind: Literal["images", "text"]
    classes: int
    """The number of labels or tokens."""
    channels: int
    train_size: int
    test_size: int

    @abstractmethod
    def train_batch(
        self, indices: Tensor, generator: torch.Generator, chosen: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets. Inputs are augmented with the generator's random numbers and normalized.

        ``chosen`` selects samples of the batch. They are the same as in the whole batch.
        """

    @abstractmethod
    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized inputs, and targets."""

    @abstractmethod
    def held_out(self, share: float) -> DataSet:
        """Return a data set of the training examples alone. The last of them, a share, are its test set."""


Loader = Callable[[Path | None, int | None, int | None], DataSet]
"""Loads a data set from a directory, with the limits of training and test examples."""


def data_directory() -> Path:
    """Return the folder of data sets: ``GNOMON_DATA``, or ``.data`` in the working directory."""
    return Path(os.environ.get("GNOMON_DATA", ".data"))


def places(directory: Path | None, folders: Sequence[str]) -> list[Path]:
    """Return the places to search for the files of a set: these folders, and the directory if one is given."""
    root = data_directory() if directory is None else directory
    return [root / folder for folder in folders] + ([] if directory is None else [directory])


def find_folder(title: str, candidates: Sequence[Path], content: Sequence[str], remedy: str) -> Path:
    """Return the first folder that contains one of the names in ``content``."""
    for folder in candidates:
        if any((folder / name).exists() for name in content):
            return folder
    looked = " or ".join(str(folder) for folder in candidates)
    raise DataMissingError(f"{title} is not in {looked}; {remedy}")


def held_under(source: str) -> str:
    """Return the remedy for missing data."""
    return f"get it ({source}) and set GNOMON_DATA, or --data-dir, to the folder that holds it"


def first(limit: int | None, size: int, argument: str) -> int:
    """Return how many of ``size`` examples a limit leaves."""
    if limit is None:
        return size
    if not 1 <= limit <= size:
        raise DataError(f"{argument}={limit} is not between 1 and {size}, the number of examples; leave it out for all")
    return limit


def split(size: int, share: float) -> int:
    """Return how many of ``size`` examples remain for training if a share is held out. Neither part may be empty."""
    kept = size - round(share * size)
    if not 0 < kept < size:
        raise DataError(f"validation={share} of {size} training examples leaves none on one side; give another share")
    return kept


def shuffled(size: int) -> Tensor:
    """Return a fixed random order. With it the first examples of a set that is sorted by class are of all classes."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))


def library(module: str, package: str) -> ModuleType:
    """Import a module of the extra ``experiments``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"this data needs {package} ({error}); pip install 'gnomon[experiments]'") from error
