"""MAGIC's telescope events: ten numbers of a shower of light, and whether a gamma ray caused it."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor

from .base import DataError, DataMissingError, data_directory, held_under, shuffled

CLASSES = {"g": 0, "h": 1}
"""Gamma rays, and hadrons of the background."""


def read(directory: Path | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows of ``magic04.csv`` in a fixed random order, and their classes."""
    file = (data_directory() if directory is None else directory) / "magic04.csv"
    remedy = held_under(
        "https://archive.ics.uci.edu/dataset/159/magic+gamma+telescope, saved as magic04.csv with a line of names"
    )
    if not file.is_file():
        raise DataMissingError(f"MAGIC is not at {file}; {remedy}")
    try:
        with file.open(newline="") as stream:
            _, *rows = csv.reader(stream)
        inputs = torch.tensor([[float(cell) for cell in row[:10]] for row in rows])
        labels = torch.tensor([CLASSES[row[10]] for row in rows])
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(f"{file} has a row without ten numbers and g or h ({error}); {remedy}") from error
    order = shuffled(len(rows))
    return inputs[order], labels[order]
