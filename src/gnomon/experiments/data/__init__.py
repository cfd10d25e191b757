"""Data sets in their usual layouts on disk. A batch depends only on its indices and on a generator."""

from __future__ import annotations

from pathlib import Path

from . import cifar, digits, folders, idx, text
from .base import DataError, DataMissingError, DataSet, Loader, data_directory

__all__ = ["DATA", "DataError", "DataMissingError", "DataSet", "Loader", "data_directory", "load"]

DATA: dict[str, Loader] = {
    "digits": digits.load,
    "mnist": idx.mnist,
    "fashion-mnist": idx.fashion_mnist,
    "cifar10": cifar.cifar10,
    "cifar100": cifar.cifar100,
    "tiny-imagenet": folders.tiny_imagenet,
    "image-folder": folders.image_folder,
    "imagenet-100": folders.imagenet100,
    "python-text": text.load,
}


def load(
    name: str, directory: Path | None = None, *, train_limit: int | None = None, test_limit: int | None = None
) -> DataSet:
    """Load a data set by its name, from a directory or from ``GNOMON_DATA``. A limit takes the first examples."""
    if name not in DATA:
        raise DataError(f"data {name!r} is not known; give one of {', '.join(DATA)}")
    return DATA[name](directory, train_limit, test_limit)
