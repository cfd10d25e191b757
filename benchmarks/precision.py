"""What half precision of INGD's factors costs: the training loss of three tasks after 500 steps.

    python benchmarks/precision.py [autoencoder | cnn | gpt | all | none] [--write] [--redo]

The tasks of training.py at INGD's defaults, with factors in float32, bfloat16 and float16. The loss is the mean over
the last 50 steps. It ought to be within 2% of that with float32; a loss that is lower is no fault. Runs are kept in
precision.json and done once; ``--redo`` does the chosen task's again. ``GNOMON_DATA`` is where CIFAR-100 lies.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import report
import torch
from tasks import task_with_its_data, train

from gnomon.optim import INGD

torch.set_num_threads(1)

STORE = Path(__file__).with_name("precision.json")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEEDS = {"autoencoder": (0, 1), "cnn": (0,), "gpt": (0,)}
STEPS, LAST = 500, 50
LIMIT = 1.02
"""Times the loss with float32."""


def stored() -> dict[str, Any]:
    return json.loads(STORE.read_text()) if STORE.exists() else {}


def key_of(task: str, dtype: str, seed: int) -> str:
    return f"{task}/{dtype}/{seed}"


def measure(name: str, redo: bool) -> None:
    """Every run of a task that is not in the store."""
    for seed in SEEDS[name]:
        for dtype, precond_dtype in TYPES.items():
            key = key_of(name, dtype, seed)
            if key in stored() and not redo:
                continue
            # A task of its own, since the CNN's would go on with the rest of its last epoch: the batches must be equal.
            history = train(task_with_its_data(name), functools.partial(INGD, precond_dtype=precond_dtype), STEPS, seed)
            outcome = {"loss": sum(history.loss[-LAST:]) / LAST, "seconds": history.seconds}
            STORE.write_text(json.dumps(stored() | {key: outcome}, indent=1, sort_keys=True) + "\n")
            print(f"{key}: {outcome['loss']:.5g} in {history.seconds:.0f} s", flush=True)


def row(name: str, seed: int) -> list[str]:
    """The losses of a run with each type, and their ratios to that with float32."""
    runs = [stored().get(key_of(name, dtype, seed)) for dtype in TYPES]
    full, cells = runs[0], []
    for run in runs:
        ratio = 1.0 if run is None or full is None else run["loss"] / full["loss"]
        shown = "" if run is full else f" ({ratio:.4f})" if ratio <= LIMIT else f" (**{ratio:.4f}**)"
        cells.append("not run yet" if run is None else f"{run['loss']:.5g}{shown}")
    return [name, str(seed), *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="all", choices=[*SEEDS, "all", "none"])
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    parser.add_argument("--redo", action="store_true", help="do runs again that are in the store")
    arguments = parser.parse_args()
    for name in {"all": SEEDS, "none": ()}.get(arguments.task, (arguments.task,)):
        measure(name, arguments.redo)
    text = report.table(["", "seed", *TYPES], [row(name, seed) for name, seeds in SEEDS.items() for seed in seeds])
    print(text)
    if arguments.write:
        made = f"`python benchmarks/precision.py --write`, on {report.machine()}."
        what = (
            f"The cells have the mean training loss over the last {LAST} of {STEPS} steps with INGD's defaults, and "
            f"its ratio to the loss with float32. A ratio above {LIMIT} is in bold."
        )
        report.write("precision", f"## Factors in half precision\n\n{made}\n\n{what}\n\n{text}", stored())


if __name__ == "__main__":
    main()
