"""The sizes of the demonstration, and the types that its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Step = Callable[[str], None]
"""Is called with a description before each piece of work."""

Cells = tuple[list[str], list[list[str]]]
"""The header and the rows of a table."""


@dataclass(frozen=True)
class Scale:
    """The sizes of the first two experiments."""

    steps: int = 200
    seeds: int = 5
    k: int = 400
    iterations: int = 200
