"""Comparisons whose failure says what is wrong, and which method of the group to correct or to override."""

from __future__ import annotations

import inspect

from torch import Tensor

from ..groups import Group
from ..groups.derived import DERIVED_FROM

TOLERANCE = 1e-10
FLAGS = ("trivial_transport", "is_algebra", "has_matrix_exp")
"""What a group may claim; without the claim there is nothing to check."""


def owner(group: Group, member: str) -> type | None:
    """Return the class that defines a member; None for the default."""
    default = inspect.getattr_static(Group, member, None)
    for kind in type(group).__mro__:
        if member in vars(kind):
            return None if kind in Group.__mro__ or vars(kind)[member] is default else kind
    return None


def sources(group: Group, member: str) -> list[str]:
    """Return what the default of a member is derived from.

    These are members, near or far, that the group's own classes define.
    """
    found: list[str] = []
    for source in DERIVED_FROM.get(member, ()):
        nearer = [source] if owner(group, source) or source not in DERIVED_FROM else sources(group, source)
        found += [name for name in nearer if name not in found]
    return found


def advice(group: Group, member: str) -> str:
    """Return what to do about a member that is wrong."""
    if member in FLAGS:
        return f"set `{member}` to False"
    kind = owner(group, member)
    if kind is not None:
        return f"correct `{member}`, which {kind.__name__} defines"
    if member not in DERIVED_FROM:  # an attribute
        return f"correct `{member}`"
    names = sources(group, member)
    if not names:
        return f"override `{member}`"
    listed = ", ".join(f"`{name}`" for name in names)
    return f"override `{member}`, or correct what its default is derived from: {listed}"


def require(group: Group, member: str, holds: bool, complaint: str, *others: str) -> None:
    """Raise an AssertionError with the complaint and with advice, unless the condition holds.

    The advice is on the member, and on others that may be at fault.
    """
    if not holds:
        advised = "; or ".join(advice(group, name) for name in (member, *others))
        raise AssertionError(f"{group}: {complaint}; {advised}")


def distance(actual: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number wanted where that is above one."""
    if actual.shape != wanted.shape:
        return float("inf")
    scale = max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    return float((actual - wanted).detach().abs().max()) / scale if wanted.numel() else 0.0


def close(
    group: Group,
    member: str,
    actual: Tensor,
    wanted: Tensor,
    *others: str,
    what: str = "",
    tolerance: float = TOLERANCE,
) -> None:
    """:func:`require` that a member gives what is wanted; ``what`` names the call, if not the member alone."""
    what = what or member
    shapes = f"{what} has shape {tuple(actual.shape)}, not {tuple(wanted.shape)}"
    require(group, member, actual.shape == wanted.shape, shapes, *others)
    error = distance(actual, wanted)
    off = f"{what} is off by {error:.1e} (relative; allowed {tolerance:.0e})"
    require(group, member, error <= tolerance, off, *others)
