"""Ranks: the processes that train one network together.

``torchrun`` starts them and gives each its rank. Each takes an equal part of every batch. Gradients, statistics and
measures are means over the ranks, so all take the same steps as one process with the whole batch.
"""

from __future__ import annotations

import gc
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.optim import Optimizer

from ...optim.distributed.process_group import is_loss_of_a_rank
from .config import TrainingError

T = TypeVar("T")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that ``torchrun`` sets for each process. ``LOCAL_RANK`` is its number on its own machine."""


class Ranks:
    """The rank of this process and the number of ranks. By default there is one."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, store: Any = None) -> None:
        self.rank, self.size, self.local_rank, self._store = rank, size, local_rank, store

    @property
    def leads(self) -> bool:
        """Whether this rank writes the files and the messages."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    # ------------------------------------------------------------------ batches and the model
    def share(self, batch_size: int) -> slice:
        """Return this rank's part of a batch."""
        if batch_size % self.size:
            fits = [n for n in range(1, self.size) if batch_size % n == 0]
            raise TrainingError(
                f"batch_size = {batch_size} cannot be shared equally by {self.size} ranks; start another number of "
                f"them, such as {fits[-1]}, or begin a run with a batch_size that {self.size} divides"
            )
        each = batch_size // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return a model whose backward pass computes the mean of the gradients over the ranks."""
        return nn.parallel.DistributedDataParallel(model) if self.several else model

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of the first rank to all ranks.

        The running means of batch norm differ between ranks, because each rank has seen other samples.
        """
        if self.several:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    # ------------------------------------------------------------------ messages
    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        if not self.several:
            return values
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the ranks."""
        return self.total(values) / self.size if self.several else values

    def greatest(self, *numbers: int) -> list[int]:
        """Return the greatest value of each number over the ranks, so that all ranks make the same decision."""
        if not self.several:
            return list(numbers)
        found = torch.tensor(numbers)  # on the CPU, so that a busy GPU is not waited for
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def from_first(self, make: Callable[[], T]) -> T:
        """Return to all ranks what the first rank makes. Tensors in it are on the CPU."""
        if not self.several:
            return make()
        box: list[Any] = [make() if self.leads else None]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    # ------------------------------------------------------------------ failures
    def is_loss_of_a_rank(self, error: BaseException) -> bool:
        """Return whether an error means that another rank has ended, or has not answered in time."""
        return self.several and is_loss_of_a_rank(error)

    def fails_first(self) -> bool:
        """Return whether this rank is the first to report an error. Only that rank shows it."""
        if self._store is None or not _store_answers():
            return True
        try:
            return self._store.add("failures", 1) == 1
        except RuntimeError:
            return True


ALONE = Ranks()


@contextmanager
def together(timeout: float) -> Iterator[Ranks]:
    """Connect the ranks that ``torchrun`` has started. An error is raised on one rank, and the others exit.

    Args:
        timeout: The seconds after which a rank that waits for another gives up.
    """
    ranks = _joined(timeout)
    try:
        yield ranks
    except Exception:
        if not ranks.fails_first():
            raise SystemExit(1) from None
        raise
    if ranks.several:
        gc.collect()  # a wrapped model that outlives its Gloo group can hang or abort the process at its end
        dist.destroy_process_group()


def check_alone(command: str) -> None:
    """Raise an error if ``torchrun`` has started several processes of a command that runs in one."""
    if _are_several():
        raise TrainingError(f"{command} is not for torchrun (WORLD_SIZE={os.environ['WORLD_SIZE']}); start it alone")


def _are_several() -> bool:
    return all(name in os.environ for name in ENVIRONMENT) and int(os.environ["WORLD_SIZE"]) > 1


def _joined(timeout: float) -> Ranks:
    if not _are_several():
        return ALONE
    size, limit = int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout)
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
        store.set_timeout(limit)
        backend = "cpu:gloo,cuda:nccl" if cuda and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"the {size} ranks did not meet within --timeout {timeout:g} seconds ({reason(error)}); start all of them, "
            "with one MASTER_ADDR and MASTER_PORT, or run without torchrun"
        ) from None
    return Ranks(rank, size, local_rank, store)


def _store_answers() -> bool:
    """Return whether the store of the ranks can be reached.

    Without torchrun the store belongs to the first rank and ends with it. torch would then print a stack trace.
    """
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=1):
            return True
    except OSError:
        return False


def reason(error: BaseException) -> str:
    """Return an error between ranks as one line, without the position in the source of the transport."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0]).partition(". ")[0].rstrip(".")


# ---------------------------------------------------------------------- checkpoints
def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole state, which the first rank saves. Every rank calls this."""
    return optimizer.state_dict()


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state that any number of ranks has saved."""
    optimizer.load_state_dict(state)
