"""Posteriors by name. A name is that of posteriordb, ``data-model``, or that of a generated posterior."""

from __future__ import annotations

from collections.abc import Callable

from .base import Posterior

Maker = Callable[[str], Posterior]
_MAKERS: dict[str, Maker] = {}


def posterior(*names: str) -> Callable[[Maker], Maker]:
    """Register a function that makes the posteriors of the given names."""

    def register(maker: Maker) -> Maker:
        _MAKERS.update(dict.fromkeys(names, maker))
        return maker

    return register


def names() -> list[str]:
    """Return the names of all posteriors, sorted."""
    return sorted(_MAKERS)


def load(name: str) -> Posterior:
    """Return a posterior by its name. Data is read from ``GNOMON_DATA``."""
    if name not in _MAKERS:
        raise ValueError(f"posterior {name!r} is not known; give one of {', '.join(names())}")
    return _MAKERS[name](name)
