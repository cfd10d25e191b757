"""MNIST and Fashion-MNIST from IDX files, compressed or plain."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .base import DataError, DataMissingError, DataSet, find_folder, held_under, places
from .images import InMemoryImages, Labeled, Recipe, check_labels

DEBIAN = Path("/usr/share/datasets")
"""The folder in which Debian's packages install data sets."""

CLASSES = 10


@dataclass(frozen=True)
class Layout:
    """The folders of a set's files, and how its images become inputs."""

    name: str
    title: str
    folders: tuple[str, ...]
    """The name of the folder in Debian, and its name in torchvision."""
    remedy: str
    recipe: Recipe


MNIST = Layout(
    "mnist",
    "MNIST",
    ("mnist", "MNIST/raw"),
    held_under("the four files *-ubyte or *-ubyte.gz in a folder mnist"),
    Recipe((0.1307,), (0.3081,)),
)
FASHION_MNIST = Layout(
    "fashion-mnist",
    "Fashion-MNIST",
    ("fashion-mnist", "FashionMNIST/raw"),
    "install Debian's dataset-fashion-mnist, or "
    + held_under("the four files *-ubyte or *-ubyte.gz in a folder fashion-mnist"),
    Recipe((0.2860,), (0.3530,)),
)


def mnist(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    return _load(MNIST, directory, train_limit, test_limit)


def fashion_mnist(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    return _load(FASHION_MNIST, directory, train_limit, test_limit)


def _load(layout: Layout, directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    train = read(layout, "train", directory).first(train_limit, "train_limit")
    test = read(layout, "t10k", directory).first(test_limit, "test_limit")
    return InMemoryImages(layout.name, CLASSES, layout.recipe, train, test)


def read(layout: Layout, part: Literal["train", "t10k"], directory: Path | None = None) -> Labeled:
    """Return all images of a part and their labels, in the order of the files, which is random."""
    candidates = [*places(directory, layout.folders), DEBIAN / layout.folders[0]]
    stem = f"{part}-images-idx3-ubyte"
    folder = find_folder(layout.title, candidates, [stem, f"{stem}.gz"], layout.remedy)
    images = _read_file(folder / stem, 3, layout.remedy).unsqueeze(1)
    file = folder / f"{part}-labels-idx1-ubyte"
    labels = _read_file(file, 1, layout.remedy).long()
    if len(images) != len(labels):
        raise DataError(f"{file} has {len(labels)} labels for {len(images)} images; {layout.remedy}")
    check_labels(labels, CLASSES, file)
    return Labeled(images, labels)


def _read_file(plain: Path, dimensions: int, remedy: str) -> Tensor:
    """Return the array of bytes in a file or in its compressed form."""
    file = plain if plain.is_file() else plain.with_name(f"{plain.name}.gz")
    try:
        content = file.read_bytes()
        return _parsed(content if file == plain else gzip.decompress(content), dimensions)
    except FileNotFoundError as error:
        raise DataMissingError(f"{plain} is missing, compressed or plain; {remedy}") from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{file} is not a whole IDX file ({error}); {remedy}") from error


def _parsed(content: bytes, dimensions: int) -> Tensor:
    """Parse the content of an IDX file.

    It has two zeros, the type (8 for bytes), the number of dimensions, each dimension as a big-endian integer, and the
    bytes.
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(f"it starts with {content[:4].hex() or 'nothing'}, not with 000008{dimensions:02}")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape) or 0 in shape:
        raise ValueError(f"{len(content) - start} bytes for {' x '.join(map(str, shape))}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
