"""Tables for terminals and for Markdown pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from textwrap import fill

from rich import box
from rich.padding import PaddingDimensions
from rich.table import Table

NARROW = 100
"""A terminal with fewer columns does not show the settings of methods."""

WORDS = ("method", "settings")
"""The columns of words. Their cells may break between words."""


def titled_table(title: str, padding: PaddingDimensions = (0, 1)) -> Table:
    """Return an empty terminal table with its title on the left."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=padding)


def terminal_table(title: str, header: list[str], rows: list[list[str]], width: int) -> Table:
    """Return a table of methods that fits the width of a terminal.

    A narrow terminal does not show settings, nor the last columns for which it has no room. Headers break between
    words. Numbers do not break, because a part of a number is misleading.
    """
    shown = [i for i, name in enumerate(header) if name != "settings" or width >= NARROW]
    widths = [least_width(name, [row[i] for row in rows], name in WORDS) for i, name in enumerate(header)]
    while len(shown) > 2 and sum(widths[i] + 3 for i in shown) > width:
        shown.pop()
    table = titled_table(title)
    for i in shown:
        words = header[i] in WORDS
        table.add_column(fill(header[i], widths[i]), justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        table.add_row(*[row[i] for i in shown], style="bold" if row[0].startswith("ours") else "")
    return table


def least_width(name: str, cells: list[str], words: bool) -> int:
    """Return the width of a column's longest number or word. Its name and cells of words break between words."""
    return max(map(len, [*name.split(), *(" ".join(cells).split() if words else cells)]), default=0)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> str:
    """Return a Markdown table. The columns named in ``left`` are aligned to the left, the others to the right."""
    rule = ["---" if column in left else "---:" for column in header]
    return "\n".join(map(markdown_row, (header, rule, *rows)))


def markdown_row(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
