"""The rates at which a rank computes and sends. They are given, or measured on this machine."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ..common.machine import multiplication_rate

MESSAGE = 2**26
"""The bytes of the message that is timed."""


@dataclass(frozen=True)
class Rates:
    """The rates of each rank."""

    flops: float
    """Floating-point operations per second. A multiplication with its addition counts as two."""
    bandwidth: float
    """The bytes per second that the rank sends."""
    note: str
    """A description of where the rates come from."""


def rates(flops: float | None, bandwidth: float | None) -> Rates:
    """Return the given rates. A rate that is not given is measured on this machine."""
    computes, sends = "given", "given"
    if flops is None:
        flops, computes = multiplication_rate(), "measured: products of float32 matrices on one core here"
    if bandwidth is None:
        bandwidth, sends = gloo_bandwidth(), "measured: all_reduce by gloo between two processes here"
    return Rates(flops, bandwidth, f"{flops / 1e12:.3g} TFLOP/s ({computes}), {bandwidth / 1e9:.3g} GB/s ({sends})")


def gloo_bandwidth(size: int = MESSAGE, repeat: int = 5) -> float:
    """Measure the bytes per second that each of two processes on this machine sends in an all_reduce.

    Each process sends as many bytes as the message has.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_exchange, (folder, size, repeat), nprocs=2)
        return float(Path(folder, "rate").read_text())


def _exchange(rank: int, folder: str, size: int, repeat: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    message, times = torch.zeros(size // 4), []
    for _ in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        times.append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "rate").write_text(str(size / statistics.median(times[1:])))  # the first one opens connections
    dist.destroy_process_group()
