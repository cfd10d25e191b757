"""Which structure the factors of a layer get: names, factories, pairs and patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...groups import Arrow, BlockDiagonal, Dense, Diagonal, Fixed, Group, Heisenberg, as_factory

Factory = Callable[[int], Group]
Side = str | Factory
"""A name, or a function from the size to a group."""
Structure = Side | tuple[Side, Side] | Mapping[str, Any]
"""One for both factors, a pair for (inputs, outputs), or a mapping from patterns of layer names to those."""

AUTO = "auto"
"""The structure that is chosen by the shape of a layer: see :func:`by_shape`."""
LONG, LARGE = 3.5, 640
"""A side that is more than so many times as long as the other one, and larger than this, has a diagonal factor with
``"auto"``."""
INNER, SHORT = 257, 64
"""The size (with a bias) above which a long side between two linear layers has a diagonal factor, if the other side has
at least so many numbers: its dense factor does most of the work there. That of an adapter of rank 8 does not."""
ROOM, TIMES = 2**21, 4
"""The numbers that dense factors of smaller long sides may have together, in all and over the trained numbers."""
BLOCK = 32
RANK = 8
"""Dense rows or columns at an end of a sparse factor; products with a multiple of eight are quickest."""

NAMES: dict[str, Factory] = {
    **{name: as_factory(name) for name in ("dense", "triangular", "diagonal")},
    "block": lambda k: BlockDiagonal(k, min(k, BLOCK)),
    "arrow": lambda k: Arrow(k, min(RANK, k - 1)) if k > 1 else Dense(k),
    "heisenberg": lambda k: Heisenberg(k, RANK, RANK) if k > 2 * RANK else Dense(k),
    "toeplitz": as_factory("toeplitz"),
    "identity": Fixed,
}
"""Structures by name; ``block`` has blocks of 32, ``arrow`` a head of 8, ``heisenberg`` a head and a tail of 8.

A layer that is too small for one has a dense factor. Numbers behind a colon, as in ``"arrow:2"``, are taken as
everywhere in the library (:func:`gnomon.groups.as_structure`).
"""


def factory_of(side: object) -> Factory:
    """Return a side of a structure as a function from the size to a group."""
    if isinstance(side, str):
        if side not in NAMES and side.partition(":")[0] in NAMES:
            return as_factory(side)
        if side not in NAMES:
            raise ValueError(
                f"structure must be one of {AUTO}, {', '.join(NAMES)}, or a function of the size, got {side!r}"
            )
        return NAMES[side]
    if isinstance(side, Group):
        raise TypeError(f"structure must be a function of the size, got {side!r}; give for example lambda k: {side!r}")
    if not callable(side):
        raise TypeError(f"structure must be a name, a function of the size, a pair or a mapping, got {side!r}")
    return side


def check_structure(structure: Structure) -> None:
    """Raise for one that no layer could use."""
    if isinstance(structure, Mapping):
        for pattern, part in structure.items():
            if not isinstance(pattern, str):
                raise TypeError(f"structure must map patterns of layer names, got the pattern {pattern!r}")
            check_structure(part)
    elif isinstance(structure, (tuple, list)):
        if len(structure) != 2:
            raise ValueError(f"structure must be a pair (inputs, outputs), got {len(structure)} parts: {structure!r}")
        for side in structure:
            factory_of(side)
    elif structure != AUTO:
        factory_of(structure)


def by_shape(p: int, d: int, largest: int = LARGE) -> tuple[Side, Side]:
    """Return the structures of K (size p) and C (size d) by the shape of a layer.

    Sides are dense, except that a much longer side is diagonal. A dense factor of a side r times as long takes r^3
    times the work of the other one for an update and r^2 times its memory. Sides up to ``largest`` are dense whatever
    the ratio, because their factors cost little: those of output layers, for example, have few outputs.
    """

    def side(size: int, other: int) -> str:
        return "diagonal" if size > max(LONG * other, largest) else "dense"

    return side(p, d), side(d, p)


def largest_dense(shapes: Iterable[tuple[int, int, int]], trained: int) -> int:
    """Return the size up to which long sides are dense, in linear layers ``(blocks, d, p)`` of a model: 640, or 0.

    It is 0 where small long sides are most of the model, as in low-rank adapters of all layers of a network: where
    their dense factors together have more than 2 million numbers (8 MB in float32), and more than four times as many as
    the model trains.
    """
    sides = ((blocks, min(p, d), max(p, d)) for blocks, d, p in shapes)
    factors = sum(blocks * long**2 for blocks, short, long in sides if LONG * short < long <= LARGE)
    return 0 if factors > max(ROOM, TIMES * trained) else LARGE


def between_layers(shapes: Sequence[tuple[int, int]]) -> list[tuple[bool, bool]]:
    """Return, for each of the linear layers ``(inputs, outputs)``, whether its inputs and its outputs are hidden units.

    Inputs are where an earlier layer has as many outputs, and outputs where a later one has as many inputs, as in the
    perceptron of a transformer. Inputs of a whole model are correlated more strongly than hidden units.
    """
    first = {outputs: place for place, (_, outputs) in reversed([*enumerate(shapes)])}
    last = {inputs: place for place, (inputs, _) in enumerate(shapes)}
    return [(first.get(p, place) < place, last.get(d, place) > place) for place, (p, d) in enumerate(shapes)]


def unmatched(structure: Structure, names: list[str]) -> list[str]:
    """Return the patterns that match none of the names."""
    if not isinstance(structure, Mapping):
        return []
    return [pattern for pattern in structure if not any(fnmatchcase(name, pattern) for name in names)]


def groups_for(
    structure: Structure, name: str, p: int, d: int, max_dim: int | None, largest: int = LARGE
) -> tuple[Group, Group]:
    """Return the groups of K (size p) and C (size d) for a layer; a size above ``max_dim`` gets a diagonal.

    Of the patterns that match a layer's name the first counts; a layer that none matches is dense. ``largest`` is that
    of :func:`by_shape`.
    """
    if structure == AUTO:
        structure = by_shape(p, d, largest)
    if isinstance(structure, Mapping):
        chosen = next((value for pattern, value in structure.items() if fnmatchcase(name, pattern)), "dense")
        return groups_for(chosen, name, p, d, max_dim, largest)
    sides = structure if isinstance(structure, (tuple, list)) else (structure, structure)
    left, right = (_group(side, size, max_dim) for side, size in zip(sides, (p, d), strict=True))
    return left, right


def _group(side: Side, size: int, max_dim: int | None) -> Group:
    if max_dim is not None and size > max_dim:
        return Diagonal(size)
    group = factory_of(side)(size)
    if not isinstance(group, Group) or group.k != size:
        raise ValueError(f"structure must give a group of size {size} for that size, got {group!r} from {side!r}")
    if not group.is_algebra:
        raise ValueError(
            f"structure cannot be {group!r}, whose squares leave its coordinates; the preconditioner of a layer is a "
            "Kronecker product already: give the structures of its two factors as a pair"
        )
    return group
