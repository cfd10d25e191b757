"""What each parameter of a model gets, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One parameter, or a weight with its bias."""

    name: str
    shape: tuple[int, ...]
    treatment: str
    k: str = ""
    """The structure of the input factor."""
    c: str = ""
    """The structure of the output factor."""
    bytes: int = 0
    """Of state, momentum included."""
    update: int = 0
    """Multiplications of an update of the factors, the statistics of a batch not included."""
    step: int = 0
    """Multiplications of a step."""


HEADER = ("parameter", "shape", "treatment", "K", "C", "state", "update", "step")


@dataclass(frozen=True)
class Summary:
    """Rows for people (``str``) and for programs (``rows``)."""

    rows: list[Row]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        total = ("total", "", "", "", "", *self._costs(self.rows))
        return table(HEADER, [self._cells(row) for row in self.rows], total)

    def _cells(self, row: Row) -> tuple[str, ...]:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        return (row.name, shape, row.treatment, row.k, row.c, *self._costs([row]))

    @staticmethod
    def _costs(rows: list[Row]) -> tuple[str, str, str]:
        return (
            f"{scaled(sum(row.bytes for row in rows))}B",
            scaled(sum(row.update for row in rows)),
            scaled(sum(row.step for row in rows)),
        )


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...]) -> str:
    """Columns of text, with a rule below the header and one above the total."""
    cells = [header, *rows, total]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def scaled(count: float) -> str:
    """With three digits and a unit, as in ``1.23 M``; ``B`` may follow."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit else f"{count:.0f} "
        count /= 1000
    return f"{count:.3g} T"
