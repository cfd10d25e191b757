"""Parameters that are sharded over ranks, as ``fully_shard()`` makes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..kronecker.layers.base import WHOLE


def as_sharded(tensor: Tensor) -> Any:
    """Return the tensor if it is a ``DTensor``, as ``fully_shard()`` makes parameters; otherwise None."""
    module = sys.modules.get("torch.distributed.tensor")  # to import it takes half as long as to import torch
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def layout_of(parameter: Tensor) -> Any:
    """Return the ``DTensor`` that says how ranks hold a parameter; None where each has all of it.

    It is the parameter itself, or the one of which the parameter is marked as a part.
    """
    return getattr(parameter, WHOLE, None) if as_sharded(parameter) is None else parameter


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, in the same memory."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, collected from all ranks."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded as the parameter ``like`` if it has the same shape; otherwise the tensor itself."""
    if as_sharded(like) is None or as_sharded(tensor) is not None or tensor.shape != like.shape:
        return tensor
    return joined(share(tensor, like).contiguous(), like)


def joined(part: Tensor, like: Tensor) -> Tensor:
    """Return a sharded tensor of which each rank has a part, as it has of the parameter ``like``."""
    if (sharded := as_sharded(like)) is None:
        return part
    mesh, placements = sharded.device_mesh, sharded.placements
    return sharded.from_local(part, mesh, placements, shape=like.shape, stride=like.stride())


def share(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that belongs to this rank, where ``like`` is sharded."""
    sharded = as_sharded(like)
    return tensor if sharded is None else tensor[_region(sharded, sharded.device_mesh.get_coordinate())]


def region(like: Tensor, place: int) -> tuple[slice, ...]:
    """Return the part of a tensor that a rank holds, by its place in the mesh of ``like``; all of it without a mesh."""
    sharded = layout_of(like)
    return () if sharded is None else _region(sharded, _coordinates(place, sharded.device_mesh.shape))


def _region(sharded: Any, coordinates: Sequence[int]) -> tuple[slice, ...]:
    """Return the part of a tensor at given coordinates of its mesh.

    Where several dimensions of the mesh divide one of the tensor, the first divides it first, except that
    ``fully_shard()`` divides what tensor parallelism has left, and says so by strides.
    """
    starts, stops = [0] * sharded.ndim, list(sharded.shape)
    dims = zip(sharded.placements, sharded.device_mesh.shape, coordinates, strict=True)
    for placement, count, here in sorted(dims, key=lambda dim: hasattr(dim[0], "split_factor")):
        if placement.is_shard() or hasattr(placement, "split_factor"):
            start, stop = starts[placement.dim], stops[placement.dim]
            size = -(-(stop - start) // count)  # as torch.chunk divides
            starts[placement.dim] = min(start + here * size, stop)
            stops[placement.dim] = min(start + (here + 1) * size, stop)
    return tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))


def holders_of(like: Tensor, place: int, count: int) -> list[int]:
    """Return the places of ranks that together hold a tensor, among them the given one; copies are left out."""
    if (sharded := layout_of(like)) is None:
        return [place]
    shape, kinds = sharded.device_mesh.shape, [placement.is_replicate() for placement in sharded.placements]
    here = _coordinates(place, shape)

    def has_part(other: int) -> bool:
        pairs = zip(_coordinates(other, shape), here, kinds, strict=True)
        return all(a == b for a, b, is_copy in pairs if is_copy)

    return [other for other in range(count) if has_part(other)]


def _coordinates(place: int, shape: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        found.append(rest)
    return found[::-1]
