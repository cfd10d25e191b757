"""Structures as people write them: names, sizes, groups and functions of the size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from .base import Group
from .block_diagonal import BlockDiagonal
from .block_triangular import Arrow, Heisenberg
from .dense import Dense
from .diagonal import Diagonal
from .low_rank import LowRank
from .toeplitz import Toeplitz
from .triangular import Triangular

Factory = Callable[[int], Group]
StructureLike = str | int | Group | Factory
"""A name such as ``"arrow:2"``, a size, a group, or a function from the size to a group."""

_NAMED: dict[str, tuple[Callable[..., Group], tuple[str, ...], tuple[int, ...]]] = {
    "dense": (Dense, (), ()),
    "triangular": (Triangular, (), ()),
    "diagonal": (Diagonal, (), ()),
    "block": (BlockDiagonal, ("size",), (2,)),
    "arrow": (Arrow, ("rank",), (1,)),
    "lowrank": (LowRank, ("rank",), (1,)),
    "heisenberg": (Heisenberg, ("head", "tail"), (1, 1)),
    "toeplitz": (Toeplitz, (), ()),
}
"""The class, the names of its numbers and their defaults, by name."""

STRUCTURE_NAMES = tuple(_NAMED)


def as_structure(structure: StructureLike, k: int | None = None, name: str = "structure") -> Group:
    """Return the group of size k that a person means.

    Args:
        structure: one of

            - a name, with its numbers behind a colon: ``"dense"``, ``"triangular"``, ``"diagonal"``, ``"toeplitz"``,
              ``"block:5"`` (the size of the blocks, 2 unless given), ``"arrow:2"`` and ``"lowrank:2"`` (the rank, 1
              unless given), ``"heisenberg:2,3"`` (head and tail, 1 unless given);
            - a function from the size to a group, such as ``gnomon.groups.Arrow``;
            - a group, whose size must be k;
            - a size, which means the full manifold.
        k: the size. Names and functions need it.
        name: what the argument is called in an error.
    """
    if isinstance(structure, Group):
        group = structure
    elif isinstance(structure, str) or callable(structure):
        factory = as_factory(structure, name)
        if k is None:
            raise TypeError(
                f"{name} is {structure!r}, which has no size; pass a size or a group such as gnomon.groups.Arrow(100)"
            )
        group = factory(k)
    else:
        try:
            group = Dense(operator.index(structure))
        except TypeError:
            raise TypeError(
                f"{name} must be a size or a group such as gnomon.groups.Arrow(100), or where the size is known a name "
                f"({', '.join(STRUCTURE_NAMES)}) or a function of the size, got {structure!r}"
            ) from None
    if not isinstance(group, Group) or (k is not None and group.k != k):
        given = "" if isinstance(structure, Group) else f" from {structure!r}"
        raise ValueError(
            f"{name} must be a group of size {k}, got {group!r}{given}; a name such as 'arrow:2' or a function such as "
            "gnomon.groups.Arrow fits every size"
        )
    return group


def as_factory(structure: str | Factory, name: str = "structure") -> Factory:
    """Return a name, or a function of the size, as a function of the size."""
    if not isinstance(structure, str):
        return structure
    kind, _, given = structure.partition(":")
    if kind not in _NAMED:
        raise ValueError(f"{name} must be one of {', '.join(STRUCTURE_NAMES)}, got {structure!r}")
    cls, parameters, defaults = _NAMED[kind]
    if not given and kind == structure:
        return partial(_make, cls, defaults)
    try:
        numbers = tuple(int(number) for number in given.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != len(parameters) or not numbers:
        if parameters:
            example = ",".join(["2"] * len(parameters))
            raise ValueError(
                f"{name} must be {kind!r} or give its {' and '.join(parameters)} as in '{kind}:{example}', "
                f"got {structure!r}"
            )
        raise ValueError(f"{name} is {structure!r}, but {kind!r} takes no numbers")
    return partial(_make, cls, numbers)


def _make(cls: Callable[..., Group], numbers: tuple[int, ...], k: int) -> Group:
    return cls(k, *numbers)
