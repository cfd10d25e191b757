"""CIFAR-10 and CIFAR-100 from the official pickles."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from .augment import crop_and_flip
from .base import DataError, DataMissingError, DataSet, find_folder, held_under, places
from .images import InMemoryImages, Labeled, Recipe, check_labels

RECIPE = Recipe((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), crop_and_flip)


@dataclass(frozen=True)
class Layout:
    """The names of a set's files, and the key of its labels."""

    name: str
    title: str
    folder: str
    files: dict[str, tuple[str, ...]]
    labels: bytes
    classes: int


CIFAR10 = Layout(
    "cifar10",
    "CIFAR-10",
    "cifar-10-batches-py",
    {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    b"labels",
    10,
)
CIFAR100 = Layout(
    "cifar100", "CIFAR-100", "cifar-100-python", {"train": ("train",), "test": ("test",)}, b"fine_labels", 100
)


def cifar10(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    return _load(CIFAR10, directory, train_limit, test_limit)


def cifar100(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    return _load(CIFAR100, directory, train_limit, test_limit)


def _load(layout: Layout, directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    train = read(layout, "train", directory).first(train_limit, "train_limit")
    test = read(layout, "test", directory).first(test_limit, "test_limit")
    return InMemoryImages(layout.name, layout.classes, RECIPE, train, test)


def read(layout: Layout, part: Literal["train", "test"], directory: Path | None = None) -> Labeled:
    """Return all images of a part and their (fine) labels, in the order of the files, which is random."""
    remedy = held_under(f"the Python version from https://www.cs.toronto.edu/~kriz/cifar.html, folder {layout.folder}")
    files = layout.files[part]
    folder = find_folder(layout.title, places(directory, [layout.folder]), files, remedy)
    batches = [_read_file(folder / file, layout, remedy) for file in files]
    return Labeled(torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches]))


def _read_file(file: Path, layout: Layout, remedy: str) -> Labeled:
    if not file.is_file():
        raise DataMissingError(f"{file} is missing; {remedy}")
    try:
        with file.open("rb") as stream:
            content = _Restricted(stream, encoding="bytes").load()
        images = torch.from_numpy(content[b"data"].bytes().reshape(-1, 3, 32, 32).copy())
        labels = torch.tensor(content[layout.labels], dtype=torch.long)
        if len(images) == 0 or labels.shape != (len(images),):
            raise ValueError(f"{len(images)} images, {len(labels)} labels")
    except Exception as error:  # a broken pickle may raise any error
        reason = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise DataError(f"{file} is not a whole {layout.title} file ({reason}); {remedy}") from error
    check_labels(labels, layout.classes, file)
    return Labeled(images, labels)


class _Restricted(pickle.Unpickler):
    """Loads containers, numbers, strings and arrays of bytes, and refuses everything else that a pickle may call.

    Arrays are recorded instead of rebuilt by numpy, because a forged object array would make numpy follow pointers in
    the file.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module.replace("numpy._core", "numpy.core"), name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data") from None


class _DType:
    def __init__(self, kind: str | bytes, *_: object) -> None:
        self.kind = kind.decode() if isinstance(kind, bytes) else kind

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order and other properties that bytes do not have."""


class _Array:
    shape: Sequence[int]
    dtype: _DType
    fortran: bool
    content: bytes

    def __setstate__(self, state: tuple[int, Sequence[int], _DType, bool, bytes]) -> None:
        _, self.shape, self.dtype, self.fortran, self.content = state

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self.dtype.kind not in ("u1", "|u1"):
            raise ValueError(f"pixels of type {self.dtype.kind}, not u1")
        return np.frombuffer(self.content, np.uint8).reshape(self.shape, order="F" if self.fortran else "C")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _frombuffer(content: bytes, dtype: _DType, shape: Sequence[int], order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
}
