"""The source of Python's standard library, as bytes: several megabytes of real text on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from .base import DataError, DataSet, first, shuffled, split


class PythonText(DataSet):
    """Pieces of text in a fixed mixed order: tokens, and the token that follows each of them."""

    name, kind, classes, channels = "python-text", "text", 256, 1
    context = 64

    def __init__(self, text: Tensor, held_out: Tensor, train_size: int | None, test_size: int | None) -> None:
        """The first pieces of both texts, as many as there are where no size is given."""
        self._text, self._held_out = text, held_out
        # a training piece starts anywhere in its stretch, so it may run into the next one
        self._starts = self._stretches((len(text) - self.context) // self.context, train_size)
        self._test_starts = self._stretches((len(held_out) - 1) // self.context, test_size)
        self.train_size, self.test_size = len(self._starts), len(self._test_starts)

    def _stretches(self, count: int, size: int | None) -> Tensor:
        return shuffled(count)[:size] * self.context

    def train_batch(
        self, indices: Tensor, generator: torch.Generator, chosen: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Each piece is moved on by a random part of its length, so that epochs differ."""
        shifts = torch.randint(self.context, indices.shape, generator=generator, device=generator.device)
        return self._cut(self._text, (self._starts[indices] + shifts.to(indices.device))[chosen])

    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._cut(self._held_out, self._test_starts[indices])

    def held_out(self, share: float) -> PythonText:
        """The text itself is cut in two: pieces that are neighbours share bytes."""
        kept = split(self.train_size, share)
        cut = split(len(self._text), share)
        return PythonText(self._text[:cut], self._text[cut:], kept, self.train_size - kept)

    def _cut(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        tokens = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]


def load(directory: Path | None, train_limit: int | None, test_limit: int | None) -> DataSet:
    """The text of the Python that runs; the directory plays no part."""
    texts = read()
    whole = PythonText(*texts, None, None)
    train_size = first(train_limit, whole.train_size, "train_limit")
    test_size = first(test_limit, whole.test_size, "test_limit")
    return PythonText(*texts, train_size, test_size)


def read() -> tuple[Tensor, Tensor]:
    """The bytes of the standard library's own modules; of every ten files the last is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = sorted(f for f in root.rglob("*.py") if outside.isdisjoint(f.relative_to(root).parts))
    if len(files) < 10:
        raise DataError(f"{root} holds {len(files)} modules of Python's library; use a Python that has their source")
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) == held) for held in (False, True)]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out
