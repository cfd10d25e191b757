"""Parameters that are sharded over ranks, as ``fully_shard()`` makes them."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def as_sharded(tensor: Tensor) -> Any:
    """The tensor if it is a ``DTensor``, as ``fully_shard()`` makes parameters; otherwise None."""
    module = sys.modules.get("torch.distributed.tensor")  # to import it takes half as long as to import torch
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, collected from all ranks."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded as the parameter ``like`` if it has the same shape; otherwise the tensor itself."""
    if as_sharded(like) is None or as_sharded(tensor) is not None or tensor.shape != like.shape:
        return tensor
    return joined(share(tensor, like).contiguous(), like)


def joined(part: Tensor, like: Tensor) -> Tensor:
    """A sharded tensor of which each rank has a part, as it has of the parameter ``like``."""
    if (sharded := as_sharded(like)) is None:
        return part
    mesh, placements = sharded.device_mesh, sharded.placements
    return sharded.from_local(part, mesh, placements, shape=like.shape, stride=like.stride())


def share(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that belongs to this rank, where ``like`` is sharded."""
    sharded = as_sharded(like)
    if sharded is None:
        return tensor
    for place, (placement, size) in enumerate(zip(sharded.placements, sharded.device_mesh.shape, strict=True)):
        if placement.is_shard():
            parts = tensor.chunk(size, placement.dim)
            here = sharded.device_mesh.get_local_rank(place)
            tensor = parts[here] if here < len(parts) else tensor.narrow(placement.dim, 0, 0)
    return tensor
