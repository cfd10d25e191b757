"""Images that fit in memory. They are stored as bytes, and each batch is augmented and normalized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .augment import Part
from .base import DataError, DataSet, first, split


class Labeled(NamedTuple):
    """Images (count, channels, height, width) of bytes, and their labels."""

    images: Tensor
    labels: Tensor

    def first(self, limit: int | None, argument: str) -> Labeled:
        """Return the first images that a limit leaves."""
        count = first(limit, len(self.images), argument)
        return Labeled(self.images[:count], self.labels[:count])


@dataclass(frozen=True)
class Recipe:
    """The way in which bytes become the inputs of a network."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Callable[[Tensor, torch.Generator, Part], Tensor] | None = None
    white: int = 255
    """The byte that becomes 1 before the mean is subtracted."""

    def normalized(self, images: Tensor) -> Tensor:
        """Return the images with zero mean and unit variance."""
        mean, std = (torch.tensor(x, device=images.device)[:, None, None] for x in (self.mean, self.std))
        # The operations are in place, because at this size an allocation costs more than the arithmetic.
        return images.to(torch.float32, copy=True).div_(self.white).sub_(mean).div_(std)

    def augmented(self, images: Tensor, generator: torch.Generator, part: Part) -> Tensor:
        """Return the images augmented and normalized."""
        return self.normalized(images if self.augment is None else self.augment(images, generator, part))


class InMemoryImages(DataSet):
    """A data set of images that are stored as bytes."""

    kind = "images"

    def __init__(self, name: str, classes: int, recipe: Recipe, train: Labeled, test: Labeled) -> None:
        self.name, self.classes, self.recipe = name, classes, recipe
        self.channels = train.images.shape[1]
        self.train_size, self.test_size = len(train.images), len(test.images)
        self._train, self._test = train, test

    def train_batch(
        self, indices: Tensor, generator: torch.Generator, chosen: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        images, labels = _taken(self._train, indices[chosen])
        return self.recipe.augmented(images, generator, Part(len(indices), chosen)), labels

    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = _taken(self._test, indices)
        return self.recipe.normalized(images), labels

    def held_out(self, share: float) -> InMemoryImages:
        kept = split(self.train_size, share)
        parts = (
            Labeled(self._train.images[part], self._train.labels[part]) for part in (slice(kept), slice(kept, None))
        )
        return InMemoryImages(self.name, self.classes, self.recipe, *parts)


def _taken(part: Labeled, indices: Tensor) -> tuple[Tensor, Tensor]:
    # index_select copies whole images. Indexing with brackets copies single bytes and is ten times as slow.
    return part.images.index_select(0, indices), part.labels.index_select(0, indices)


def check_labels(labels: Tensor, classes: int, place: object) -> None:
    """Raise an error if a label is not the number of a class. The file then belongs to another data set."""
    low, high = labels.aminmax()
    if low < 0 or high >= classes:
        wrong = int(low if low < 0 else high)
        raise DataError(
            f"{place} has the label {wrong}, but the classes are 0 to {classes - 1}; give the set's own file"
        )
