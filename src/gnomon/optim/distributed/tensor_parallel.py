"""Plain parameters that hold a rank's part of a matrix, as Megatron's do."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from ..kronecker.layers.base import WHOLE
from .sharded_tensors import as_sharded
from .strategies import ShardChoice

IS_PART, DIMENSION = "tensor_model_parallel", "partition_dim"
"""The attributes by which Megatron says that a parameter is divided over ranks, and along which dimension."""


def mark_parts(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None, shard: ShardChoice) -> None:
    """Mark parameters that are parts of tensors with those tensors, and others as copies at all ranks of a group.

    Without a group, or in a group of one rank, all parameters are whole.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"tensor_parallel_group must be a process group, got {type(group).__name__}")
    if group is not None and shard not in ("auto", "full"):
        raise ValueError(f"shard must be 'auto' or 'full' with tensor_parallel_group, got {shard!r}")
    pairs = [(name, p, _dimension(name, p)) for name, p in named]
    for name, p, dimension in pairs:
        if dimension is not None and group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{name} has tensor_model_parallel=True, so that it may be a part of a matrix: give the ranks that "
                "have the other parts as tensor_parallel_group=..., or a group of this rank alone where there are none"
            )
        if group is not None and as_sharded(p) is not None:
            raise ValueError(f"{name} is a DTensor, which knows its ranks: leave tensor_parallel_group out")
    for _, p, _ in pairs:
        if hasattr(p, WHOLE):  # of an optimizer that was built before
            delattr(p, WHOLE)
    if group is not None and group.size() > 1:
        _mark(pairs, group)


def _dimension(name: str, p: Tensor) -> int | None:
    """Return the dimension along which ranks have parts of a parameter; None where each has all of it."""
    if not getattr(p, IS_PART, False):
        return None
    dimension = getattr(p, DIMENSION, None)
    if not isinstance(dimension, int) or not 0 <= dimension < p.ndim:
        raise ValueError(
            f"{name} has tensor_model_parallel=True, so partition_dim must be one of its {p.ndim} dimensions, got "
            f"{dimension!r}"
        )
    return dimension


def _mark(pairs: list[tuple[str, Tensor, int | None]], group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(group, pairs[0][1].device.type)
    for _, p, dimension in pairs:
        placement = Replicate() if dimension is None else Shard(dimension)
        setattr(p, WHOLE, DTensor.from_local(p.detach(), mesh, [placement], run_check=False))
