"""The processes that train one model, and the messages between them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..torch_internals import timeout_of
from .sharded_tensors import layout_of

Purpose = Literal["statistics", "factors", "directions", "numbers", "gradients", "weights"]


class Ranks:
    """A group of processes, with the bytes that each of its messages holds counted by their purpose.

    Collectives go through a group of their own. Among themselves they have one order at all ranks; among those of
    ``DistributedDataParallel`` they need none with gloo.
    """

    def __init__(self, members: Sequence[int] = (), copies: int = 0, like: dist.ProcessGroup | None = None) -> None:
        self.count = max(len(members), 1)
        self.copies = copies
        """How many ranks hold the same share of a parameter; 0 where all hold all of it."""
        self.rank = members.index(dist.get_rank()) if self.count > 1 else 0
        self.members, self.sent = tuple(members), Counter[Purpose]()
        self.received = Counter[Purpose]()
        """The bytes that this rank has received from others by :meth:`exchange`."""
        self._group = None
        if self.count > 1:
            assert like is not None
            self._group = dist.new_group(
                list(members),
                timeout_of(like),
                dist.get_backend(like),
                use_local_synchronization=True,
            )

    @classmethod
    def of(cls, model: nn.Module, in_any_way: bool = False) -> Ranks:
        """Return the ranks of a wrapped model, or of one whose parameters are sharded; otherwise this process alone.

        Parameters may be sharded ``in_any_way`` over one mesh, or all alike, as ``fully_shard()`` does it.
        """
        if wrappers := wrappers_in(model):
            members = [dist.get_process_group_ranks(wrapper.process_group) for wrapper in wrappers]
            if any(other != members[0] for other in members):
                raise ValueError("parts of the model are trained by different groups of ranks; wrap all of it once")
            return cls(members[0], like=wrappers[0].process_group)
        named = {name: sharded for name, p in model.named_parameters() if (sharded := layout_of(p)) is not None}
        if not named:
            return cls()
        for name, p in model.named_parameters():
            if p.requires_grad and name not in named:
                raise ValueError(f"{name} is not sharded while others are; fully_shard() the model itself too")
        meshes = [p.device_mesh for p in named.values()]
        if any(mesh != meshes[0] for mesh in meshes):
            raise ValueError("the model's parameters are on different device meshes; shard all of it over one")
        for name, p in named.items():
            if p.device.type != p.device_mesh.device_type:
                raise ValueError(f"{name} is offloaded to the {p.device.type}; shard the model without offloading")
            known = ("Shard", "_StridedShard") if in_any_way else ("Shard",)
            if not all(placement.is_replicate() or type(placement).__name__ in known for placement in p.placements):
                raise ValueError(f"{name} has placements {p.placements}; fully_shard() gives Shard and Replicate")
        if in_any_way:
            return cls(meshes[0].mesh.flatten().tolist(), 1, meshes[0].get_group(0))
        kinds = {tuple(placement.is_shard() for placement in p.placements) for p in named.values()}
        if len(kinds) > 1:
            raise ValueError(
                "some of the model's parameters are sharded and others replicated; fully_shard() all of it"
            )
        sizes = zip(meshes[0].shape, kinds.pop(), strict=True)
        copies = math.prod(size for size, is_shard in sizes if not is_shard)
        return cls(meshes[0].mesh.flatten().tolist(), copies, meshes[0].get_group(0))

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds a share of each parameter only."""
        return self.copies > 0

    # ------------------------------------------------------------------ messages
    def add_up(self, tensor: Tensor, owner: int | None, purpose: Purpose) -> Message:
        """Add a tensor up over ranks in its memory, at all of them or at the owner alone."""
        self._count(tensor, purpose)
        with explained():
            if owner is None:
                work = dist.all_reduce(tensor, group=self._group, async_op=True)
            else:
                work = dist.reduce(tensor, self.members[owner], group=self._group, async_op=True)
        return Message(tensor, work)

    def spread(self, tensor: Tensor, owner: int, purpose: Purpose) -> Message:
        """Send the owner's values to all ranks, into the tensor's memory."""
        self._count(tensor, purpose)
        with explained():
            return Message(tensor, dist.broadcast(tensor, self.members[owner], group=self._group, async_op=True))

    def share_out(self, owned: Mapping[int, list[Tensor]], purpose: Purpose) -> None:
        """Copy the tensors of each owner to all other ranks, with one message for each owner.

        ``owned`` holds tensors of the same shapes and types at all ranks.
        """
        filled = {owner: tensors for owner, tensors in owned.items() if tensors}
        messages = {owner: self.spread(_as_bytes(tensors), owner, purpose) for owner, tensors in filled.items()}
        for owner, message in messages.items():
            received = message.received()
            if owner != self.rank:
                sizes = [tensor.numel() * tensor.element_size() for tensor in owned[owner]]
                for tensor, part in zip(owned[owner], received.split(sizes), strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))  # a copy is aligned for any type

    def exchange(self, sent: Sequence[list[Tensor]], received: Sequence[list[Tensor]], purpose: Purpose) -> None:
        """Send tensors to each rank, and fill those that each rank sends to this one."""
        sizes = [_size(tensors) for tensors in sent], [_size(tensors) for tensors in received]
        given, found = list(chain.from_iterable(sent)), list(chain.from_iterable(received))
        device = next((tensor.device for tensor in (*given, *found)), torch.device("cpu"))
        out, flat = torch.empty(sum(sizes[1]), dtype=torch.uint8, device=device), _as_bytes(given, device)
        self.sent[purpose] += sum(sizes[0]) - sizes[0][self.rank]
        self.received[purpose] += sum(sizes[1]) - sizes[1][self.rank]
        with explained():
            dist.all_to_all_single(out, flat, sizes[1], sizes[0], group=self._group)
        for tensor, part in zip(found, out.split([_size([tensor]) for tensor in found]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned for any type

    def sum(self, tensor: Tensor) -> Tensor:
        """Add a few numbers up over ranks."""
        return tensor if self.count == 1 else self.add_up(tensor.clone(), None, "numbers").received()

    def sum_of_shares(self, tensor: Tensor) -> Tensor:
        """Add numbers of shares of parameters up over ranks; ranks with the same share count once."""
        return self.sum(tensor) / max(self.copies, 1)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the maximum of each number over ranks; it is infinite where the number of a rank is not finite."""
        if self.count == 1:
            return tensor
        tensor = tensor.nan_to_num(nan=torch.inf, posinf=torch.inf)
        self._count(tensor, "numbers")
        with explained():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor

    def _count(self, tensor: Tensor, purpose: Purpose) -> None:
        self.sent[purpose] += tensor.numel() * tensor.element_size()


def wrappers_in(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Return the model itself if it is wrapped, or the wrappers inside it where it is compiled or a part of another."""
    return [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]


class Message:
    """A tensor on its way."""

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self._tensor, self._work = tensor, work

    def received(self) -> Tensor:
        """Return the result, once it is there."""
        with explained():
            if self._work is not None:
                self._work.wait()
        return self._tensor


def is_loss_of_a_rank(error: BaseException) -> bool:
    """Return whether an error says that another rank is gone, or has not answered in time."""
    # gloo's errors have no class of their own, but name its source.
    named = isinstance(error, RuntimeError) and re.search(r"gloo|nccl|timed out", str(error), re.IGNORECASE)
    return isinstance(error, dist.DistError) or bool(named)


@contextmanager
def explained() -> Iterator[None]:
    """Explain what to do when another rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not is_loss_of_a_rank(error):
            raise
        raise RuntimeError(
            f"another rank has ended or does not answer ({str(error).splitlines()[0]}); start again from the last "
            "checkpoint, on fewer ranks if need be"
        ) from error


def _as_bytes(tensors: list[Tensor], device: torch.device | None = None) -> Tensor:
    empty = [] if device is None else [torch.empty(0, dtype=torch.uint8, device=device)]
    return torch.cat([*empty, *(_in_a_row(tensor).view(torch.uint8) for tensor in tensors)])


def _in_a_row(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor one behind the other; a single one may have any stride, until it is copied."""
    row = tensor.contiguous().view(-1)
    return row if row.stride(0) == 1 else row.clone(memory_format=torch.contiguous_format)


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
