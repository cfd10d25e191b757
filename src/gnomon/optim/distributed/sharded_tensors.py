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
    """What this rank holds of it, in the same memory."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole(tensor: Tensor) -> Tensor:
    """All of it, from all ranks."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that is whole, sharded as a parameter of its shape is; others as they are."""
    if (sharded := as_sharded(like)) is None or as_sharded(tensor) is not None or tensor.shape != like.shape:
        return tensor
    return sharded.from_local(
        share(tensor, like).contiguous(),
        sharded.device_mesh,
        sharded.placements,
        shape=like.shape,
        stride=like.stride(),
    )


def share(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that is whole, the part that this rank holds of ``like``."""
    sharded = as_sharded(like)
    if sharded is None:
        return tensor
    for place, (placement, size) in enumerate(zip(sharded.placements, sharded.device_mesh.shape, strict=True)):
        if placement.is_shard():
            parts = tensor.chunk(size, placement.dim)
            here = sharded.device_mesh.get_local_rank(place)
            tensor = parts[here] if here < len(parts) else tensor.narrow(placement.dim, 0, 0)
    return tensor
