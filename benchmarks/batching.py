"""Many small layers as one batch, against the same layers one after the other.

    python benchmarks/batching.py [--write]

32 layers of 32 x 32, a batch of 64, float32: the time of ``INGD.step``, process CPU time with one BLAS thread, both
forms in turns.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time

import report
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.layers import base

torch.set_num_threads(1)

LAYERS, SIZE, ROWS = 32, 32, 64
ROUNDS = 30
STACKED = base.SMALL


def setting() -> tuple[nn.Module, INGD]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
    return model, INGD(model, 1e-4, update_every=2, growing_intervals=False)


def seconds(model: nn.Module, optimizer: INGD, limit: int) -> float:
    """Of one step, with layers up to ``limit`` entries as one batch."""
    optimizer.zero_grad()
    model(torch.randn(ROWS, SIZE)).square().mean().backward()
    base.SMALL = limit
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def measure() -> dict[str, dict[str, float]]:
    """Medians of steps with an update and of steps without one, in milliseconds."""
    settings = {"batch": (*setting(), STACKED), "loop": (*setting(), -1)}
    found: dict[str, dict[str, list[float]]] = {name: {"update": [], "step": []} for name in settings}
    for step in range(2 * ROUNDS):
        for name, (model, optimizer, limit) in settings.items():
            found[name]["step" if step % 2 else "update"].append(1e3 * seconds(model, optimizer, limit))
    return {name: {kind: statistics.median(times) for kind, times in kinds.items()} for name, kinds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    write = parser.parse_args().write
    result = measure()
    names = {"update": "with an update of the factors", "step": "without"}
    rows = [
        [
            name,
            f"{result['batch'][kind]:.2f}",
            f"{result['loop'][kind]:.2f}",
            f"{result['batch'][kind] / result['loop'][kind]:.2f}",
        ]
        for kind, name in names.items()
    ]
    text = report.table([f"a step of {LAYERS} layers of {SIZE} x {SIZE}", "batch, ms", "loop, ms", "ratio"], rows)
    print(text)
    if write:
        made = f"`python benchmarks/batching.py --write`, on {report.machine()}."
        what = "INGD takes small layers of equal shape as one batch. The table compares that with a loop over layers."
        report.write("batching", f"## Many small layers\n\n{made}\n\n{what}\n\n{text}", result)


if __name__ == "__main__":
    main()
