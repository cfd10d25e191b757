"""The source of Python's standard library, as bytes: several megabytes of real text on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from .base import DataError, DataSet, first, shuffled


class PythonText(DataSet):
    """Pieces of text in a fixed mixed order: tokens, and the token that follows each of them."""

    name, kind, classes, channels = "python-text", "text", 256, 1
    context = 64

    def __init__(self, directory: Path | None, train_limit: int | None, test_limit: int | None) -> None:
        self._text, self._held_out = read()
        # a training piece starts anywhere in its stretch, so it may run into the next one
        self._starts = self._stretches((len(self._text) - self.context) // self.context, train_limit, "train_limit")
        self._test_starts = self._stretches((len(self._held_out) - 1) // self.context, test_limit, "test_limit")
        self.train_size, self.test_size = len(self._starts), len(self._test_starts)

    def _stretches(self, count: int, limit: int | None, argument: str) -> Tensor:
        return shuffled(count)[: first(limit, count, argument)] * self.context

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Each piece is moved on by a random part of its length, so that epochs differ."""
        shifts = torch.randint(self.context, indices.shape, generator=generator, device=generator.device)
        return self._cut(self._text, self._starts[indices] + shifts.to(indices.device))

    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._cut(self._held_out, self._test_starts[indices])

    def _cut(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        tokens = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]


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
