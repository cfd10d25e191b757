"""Images in files, in the layout of TinyImageNet or with one folder for each class. Pillow decodes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from . import augment
from .base import DataError, DataMissingError, DataSet, find_folder, first, held_under, library, places, shuffled, split
from .images import InMemoryImages, Labeled, Recipe

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
SIDE, RESIZED = 224, 256
"""The side of an ImageNet network's input, and the shorter side of the image from whose middle it is cut."""

IMAGENET = Recipe((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), augment.flip)
TINY = Recipe((0.4802, 0.4481, 0.3975), (0.2302, 0.2265, 0.2262), augment.rotate_and_flip)
TINY_SIDE = 64


class Files:
    """Files and their labels in a fixed random order. A limit takes the first files."""

    def __init__(self, found: Sequence[tuple[Path, int]], limit: int | None, argument: str) -> None:
        order = shuffled(len(found))[: first(limit, len(found), argument)].tolist()
        self.files = [found[i][0] for i in order]
        self.labels = torch.tensor([found[i][1] for i in order])

    def __len__(self) -> int:
        return len(self.files)

    def part(self, chosen: slice) -> Files:
        """Return a part of the files."""
        found = copy(self)
        found.files, found.labels = self.files[chosen], self.labels[chosen]
        return found

    def taken(self, indices: Tensor) -> tuple[list[Path], Tensor]:
        """Return the files and the labels at these indices."""
        return [self.files[i] for i in indices.tolist()], self.labels[indices]


# ---------------------------------------------------------------------- any folder with a folder for each class
class ImageFolder(DataSet):
    """Images of any size. They are decoded for each batch, so that they need not fit in memory."""

    kind, channels = "images", 3

    def __init__(self, name: str, folder: Path, train_limit: int | None, test_limit: int | None) -> None:
        held_out = next(folder / part for part in ("val", "test") if (folder / part).is_dir())
        names = _class_names(folder / "train")
        if names != (others := _class_names(held_out)):
            odd = ", ".join(sorted(set(names) ^ set(others))[:3])
            raise DataError(
                f"{folder / 'train'} has {len(names)} classes and {held_out} has {len(others)} (not in both: {odd}); "
                "give both the same class folders"
            )
        self.name, self.classes = name, len(names)
        self._train = Files(_labeled_files(folder / "train", names), train_limit, "train_limit")
        self._test = Files(_labeled_files(held_out, names), test_limit, "test_limit")
        self.train_size, self.test_size = len(self._train), len(self._test)

    def train_batch(
        self, indices: Tensor, generator: torch.Generator, chosen: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        files, labels = self._train.taken(indices[chosen])
        draws = augment.crop_draws(len(indices), generator)[chosen]
        images = _batch(files, (partial(_random_crop, draws=row) for row in draws))
        return IMAGENET.augmented(images, generator, augment.Part(len(indices), chosen)), labels

    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        files, labels = self._test.taken(indices)
        return IMAGENET.normalized(_batch(files, repeat(_centre_crop))), labels

    def held_out(self, share: float) -> ImageFolder:
        kept, found = split(self.train_size, share), copy(self)
        found._train, found._test = self._train.part(slice(kept)), self._train.part(slice(kept, None))
        found.train_size, found.test_size = len(found._train), len(found._test)
        return found


def image_folder(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    return _image_folder("image-folder", directory, train_limit, test_limit)


def imagenet100(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    return _image_folder("imagenet-100", directory, train_limit, test_limit)


def _image_folder(name: str, directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    _pillow()
    remedy = held_under("folders train and val, or test, with one folder of images for each class in both")
    folder = find_folder(name, places(directory, [name]), ["train"], remedy)
    if not any((folder / part).is_dir() for part in ("val", "test")):
        raise DataMissingError(f"{folder} has neither val nor test; {remedy}")
    return ImageFolder(name, folder, train_limit, test_limit)


def _random_crop(image: Image, draws: Sequence[Sequence[float]]) -> Image:
    return image.resize((SIDE, SIDE), _pillow().BILINEAR, box=augment.resized_crop_box(*image.size, draws))


def _centre_crop(image: Image) -> Image:
    width, height = (RESIZED * side // min(image.size) for side in image.size)
    left, top = round((width - SIDE) / 2), round((height - SIDE) / 2)
    return image.resize((width, height), _pillow().BILINEAR).crop((left, top, left + SIDE, top + SIDE))


# ---------------------------------------------------------------------- TinyImageNet
def tiny_imagenet(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    """Load TinyImageNet. It is decoded once, because it fits in memory."""
    _pillow()
    remedy = held_under("http://cs231n.stanford.edu/tiny-imagenet-200.zip, folder tiny-imagenet-200")
    folder = find_folder("TinyImageNet", places(directory, ["tiny-imagenet-200"]), ["wnids.txt"], remedy)
    names = (folder / "wnids.txt").read_text(errors="replace").split()
    if set(names) != set(found := _class_names(folder / "train")):
        raise DataError(
            f"{folder / 'wnids.txt'} names {len(names)} classes, but {folder / 'train'} has {len(found)} class folders "
            f"that are not the same; {remedy}"
        )
    train = Files(_labeled_files(folder / "train", names), train_limit, "train_limit")
    test = Files(_annotated_files(folder / "val", names, remedy), test_limit, "test_limit")
    return InMemoryImages("tiny-imagenet", len(names), TINY, _in_memory(train), _in_memory(test))


def _annotated_files(folder: Path, names: Sequence[str], remedy: str) -> list[tuple[Path, int]]:
    """Return the files in val_annotations.txt. A line has a file, a class and a box, separated by tabs."""
    annotations = folder / "val_annotations.txt"
    if not annotations.is_file():
        raise DataMissingError(f"{annotations} is missing; {remedy}")
    label = {name: number for number, name in enumerate(names)}
    found = []
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), 1):
        file, _, rest = line.partition("\t")
        name = rest.split("\t")[0]
        if name not in label:
            raise DataError(f"{annotations}, line {number}: {name!r} is not a class of wnids.txt; {remedy}")
        found.append((folder / "images" / file, label[name]))
    if not found:
        raise DataError(f"{annotations} is empty; {remedy}")
    return found


def _in_memory(part: Files) -> Labeled:
    images = torch.empty(len(part), 3, TINY_SIDE, TINY_SIDE, dtype=torch.uint8)
    pixels = images.numpy()
    for i, file in enumerate(part.files):  # small images spend their time in Python, so threads would be slower
        pixels[i] = _decoded(file, _of_tiny_size).transpose(2, 0, 1)
    return Labeled(images, part.labels)


def _of_tiny_size(image: Image) -> Image:
    if image.size != (TINY_SIDE, TINY_SIDE):
        raise ValueError(f"its size is {image.width} x {image.height}, not {TINY_SIDE} x {TINY_SIDE}")
    return image


# ---------------------------------------------------------------------- files
def _class_names(folder: Path) -> list[str]:
    names = (
        sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")) if folder.is_dir() else []
    )
    if not names:
        raise DataError(f"{folder} has no class folders; put one folder of images for each class into it")
    return names


def _labeled_files(folder: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the images in the folder of each class, at any depth."""
    found: list[tuple[Path, int]] = []
    for label, name in enumerate(names):
        files = sorted(f for f in (folder / name).rglob("*") if f.suffix.lower() in SUFFIXES and f.name[0] != ".")
        if not files:
            raise DataError(f"{folder / name} has no images; put some into it or remove it")
        found += ((file, label) for file in files)
    return found


def _batch(files: Sequence[Path], prepare: Iterable[Callable[[Image], Image]]) -> Tensor:
    """Return the images (count, 3, height, width) as bytes. The functions in ``prepare`` bring them to one size."""
    pixels = np.stack(list(_pool().map(_decoded, files, prepare)))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _decoded(file: Path, prepare: Callable[[Image], Image]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        with _pillow().open(file) as image:
            return np.asarray(prepare(image.convert("RGB")))
    except FileNotFoundError as error:
        raise DataMissingError(f"{file} is missing; get the data again") from error
    except Exception as error:  # Pillow's readers raise many kinds of errors
        raise DataError(f"{file} is not a whole image ({error}); replace it or remove it") from error


@cache
def _pool() -> ThreadPoolExecutor:
    """Return a pool of threads. Pillow releases Python's lock while it decodes and resizes, so threads suffice."""
    return ThreadPoolExecutor(thread_name_prefix="gnomon-images")


@cache
def _pillow() -> ModuleType:
    return library("PIL.Image", "Pillow")
