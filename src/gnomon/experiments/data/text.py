"""The source of Python's standard library as bytes. It is several megabytes of text on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from .base import DataError, DataSet, first, shuffled, split


class PythonText(DataSet):
    """Pieces of text in a fixed random order. The target of each token is the next token."""

    name, kind, classes, channels = "python-text", "text", 256, 1
    context = 64

    def __init__(self, text: Tensor, held_out: Tensor, train_size: int | None, test_size: int | None) -> None:
        """Take the first pieces of both texts, or all pieces if no size is given."""
        self._text, self._held_out = text, held_out
        # A training piece starts anywhere in its stretch of the text, so it may reach into the next stretch.
        self._starts = self._stretches((len(text) - self.context) // self.context, train_size)
        self._test_starts = self._stretches((len(held_out) - 1) // self.context, test_size)
        self.train_size, self.test_size = len(self._starts), len(self._test_starts)

    def _stretches(self, count: int, size: int | None) -> Tensor:
        return shuffled(count)[:size] * self.context

    def train_batch(
        self, indices: Tensor, generator: torch.Generator, chosen: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Return pieces that are shifted by a random part of their length, so that epochs differ."""
        shifts = torch.randint(self.context, indices.shape, generator=generator, device=generator.device)
        return self._cut(self._text, (self._starts[indices] + shifts.to(indices.device))[chosen])

    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._cut(self._held_out, self._test_starts[indices])

    def held_out(self, share: float) -> PythonText:
        """Return two parts of the training text as a data set. The text is cut, because neighbouring pieces overlap."""
        kept = split(self.train_size, share)
        cut = split(len(self._text), share)
        return PythonText(self._text[:cut], self._text[cut:], kept, self.train_size - kept)

    def _cut(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        tokens = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]


def load(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    """Load the text of the running Python. The directory is not used."""
    texts = read()
    whole = PythonText(*texts, None, None)
    train_size = first(train_limit, whole.train_size, "train_limit")
    test_size = first(test_limit, whole.test_size, "test_limit")
    return PythonText(*texts, train_size, test_size)


def read() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's own modules. Of every ten files the last is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = sorted(f for f in root.rglob("*.py") if outside.isdisjoint(f.relative_to(root).parts))
    if len(files) < 10:
        raise DataError(f"{root} holds {len(files)} modules of Python's library; use a Python that has their source")
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) == held) for held in (False, True)]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out
