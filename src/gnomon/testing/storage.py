"""Checks of storage, and of groups as values."""

from __future__ import annotations

import copy

import torch

from ..groups import Group
from ..groups.derived import DERIVED_FROM
from .elements import random_blocks
from .verdict import FLAGS, close, require


def check_storage(group: Group, device: torch.device | str = "cpu") -> None:
    """Check shapes, and elements as one tensor and as one vector."""
    whole = isinstance(group.k, int) and group.k > 0
    require(group, "k", whole, f"k is {group.k!r}, not a positive integer")
    tuples = isinstance(group.shapes, tuple) and all(isinstance(shape, tuple) for shape in group.shapes)
    require(group, "shapes", tuples and len(group.shapes) > 0, f"shapes is {group.shapes!r}, not a tuple of tuples")
    blocks = sorted(i for part in group.coordinate_sets for i in part)
    parts = blocks == list(range(len(group.shapes)))
    require(group, "coordinate_sets", parts, f"coordinate_sets is {group.coordinate_sets}: not each block once")
    for batch in ((), (2,), (2, 3)):
        a = random_blocks(group, batch, device)
        flat = torch.cat([block.reshape(*batch, -1) for block in a], -1)
        require(group, "numel", group.numel == flat.shape[-1], f"numel is {group.numel}, not {flat.shape[-1]}")
        require(group, "batch_shape", tuple(group.batch_shape(a)) == batch, f"batch_shape of a batch {batch} is not it")
        close(group, "flatten", group.flatten(a), flat, tolerance=0)
        for x, y in zip(group.unflatten(flat), a, strict=True):
            close(group, "unflatten", x, y, tolerance=0)
        stored = group.pack(a).clone()
        wanted = (*batch, *group.storage_shape)
        shape = f"pack gives the shape {tuple(stored.shape)}, but with storage_shape it should be {wanted}"
        require(group, "pack", tuple(stored.shape) == wanted, shape, "storage_shape")
        close(group, "pack", stored.reshape(*batch, -1), flat, tolerance=0)
        unpacked = group.unpack(stored)
        for x, y in zip(unpacked, a, strict=True):
            close(group, "unpack", x, y, what="unpack(pack(a))", tolerance=0)
        stored.zero_()
        views = not any(bool(block.any()) for block in unpacked)
        require(group, "unpack", views, "unpack copies; its blocks should be views of what is stored")


def check_value(group: Group) -> None:
    """Check that a group is a value: equal to its copy, and a key of caches."""
    twin, other = copy.deepcopy(group), copy.deepcopy(group)
    other.k = group.k + 1
    require(group, "__eq__", group == twin, "a copy of the group is not equal to it")
    require(group, "__eq__", group != other, "the group equals one of another size")
    require(group, "__eq__", group != object(), "the group equals an object that is no group")
    require(group, "__hash__", hash(group) == hash(twin), "a copy of the group has another hash")
    require(group, "__repr__", repr(group) == repr(twin), "a copy of the group is printed in another way", "_arguments")
    for flag in FLAGS:
        require(group, flag, isinstance(getattr(group, flag), bool), f"{flag} is {getattr(group, flag)!r}, not a bool")


def public_members() -> set[str]:
    """Return every member of a group that the library uses, attributes and flags included."""
    return {"k", "shapes", "dim", *FLAGS, *Group.__abstractmethods__, *DERIVED_FROM}
