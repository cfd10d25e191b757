"""Run a function on several processes that talk to each other, as torchrun would start them."""

import datetime
import gc
import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

multiprocessing.set_forkserver_preload(["torch", "torch.distributed.fsdp", "gnomon.optim"])


def _run(rank, count, folder, function, arguments, seconds):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timeout)
    torch.manual_seed(0)
    torch.save(function(rank, count, *arguments), f"{folder}/{rank}.pt")
    dist.barrier()
    gc.collect()  # a wrapped model that outlives its group can hang or abort the process at its end
    dist.destroy_process_group()


def on_ranks(count, function, *arguments, timeout=120):
    """What ``function(rank, count, *arguments)`` gives at each rank."""
    with tempfile.TemporaryDirectory() as folder:
        work = (count, folder, function, arguments, timeout)
        torch.multiprocessing.start_processes(_run, work, nprocs=count, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(count)]
