"""The 1,797 handwritten digits of 8 x 8 pixels that are part of scikit-learn."""

from __future__ import annotations

from pathlib import Path

import torch

from .base import DataSet, library, shuffled
from .images import InMemoryImages, Labeled, Recipe

RECIPE = Recipe((0.3053,), (0.3761,), white=16)
TEST_SIZE = 360


def load(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    """Load the digits. A fixed fifth is the test set. The directory is not used."""
    images, labels = read()
    order = shuffled(len(images))
    test, train = (Labeled(images[part], labels[part]) for part in (order[:TEST_SIZE], order[TEST_SIZE:]))
    return InMemoryImages(
        "digits", 10, RECIPE, train.first(train_limit, "train_limit"), test.first(test_limit, "test_limit")
    )


def read() -> Labeled:
    """Return all digits in the order of the library. Pixels are from 0 (white) to 16 (black)."""
    content = library("sklearn.datasets", "scikit-learn").load_digits()
    return Labeled(torch.from_numpy(content.images).to(torch.uint8).unsqueeze(1), torch.from_numpy(content.target))
