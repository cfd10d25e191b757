"""How fast a rank computes and sends: given, or measured on this machine."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from .bench_limit import multiplication_rate

MESSAGE = 2**26
"""Bytes of the message that is timed."""


@dataclass(frozen=True)
class Rates:
    """Of each rank."""

    flops: float
    """Floating-point operations a second: two for a multiplication, with its addition."""
    bandwidth: float
    """Bytes a second that it sends."""
    note: str
    """Where they are from."""


def rates(flops: float | None, bandwidth: float | None) -> Rates:
    """Those that are given, and for others this machine's."""
    computes, sends = "given", "given"
    if flops is None:
        flops, computes = multiplication_rate(), "measured: products of float32 matrices on one core here"
    if bandwidth is None:
        bandwidth, sends = gloo_bandwidth(), "measured: all_reduce by gloo between two processes here"
    return Rates(flops, bandwidth, f"{flops / 1e12:.3g} TFLOP/s ({computes}), {bandwidth / 1e9:.3g} GB/s ({sends})")


def gloo_bandwidth(size: int = MESSAGE, repeat: int = 5) -> float:
    """Bytes a second that each of two processes here sends in an all_reduce, which is as many as the message has."""
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
        Path(folder, "rate").write_text(str(size / statistics.median(times[1:])))  # the first opens connections
    dist.destroy_process_group()
