"""Pieces of sentences."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str]) -> str:
    """Return the names with commas between them, and "and" before the last one."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""
