"""INGD beside SGD, AdamW and SOAP on three small tasks: an autoencoder, a CNN on CIFAR-100, a GPT.

    python benchmarks/training.py [autoencoder | cnn | gpt | all | none] [--only OPTIMIZER] [--time] [--write] [--redo]

Every optimizer has the same schedule (a cosine to zero) and its best of several learning rates: five for the
neighbours, three for INGD (its default, 0.5 and 2.5 times of it), which else stays at its defaults. INGD at five
times its default rate shows whether it diverges. Runs are kept in training.json and done once; ``--redo`` does the
chosen task's again. Times are process CPU time with one BLAS thread; ``--time`` trains the optimizers in turns, a
step of each, so that a busy machine burdens all alike. SOAP is that of pytorch_optimizer. ``GNOMON_DATA`` is where
CIFAR-100 lies.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import report
import torch
from matplotlib.figure import Figure
from tasks import TASKS, Task, task_with_its_data, train
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gnomon.experiments.common import palette
from gnomon.optim import INGD
from gnomon.optim.kronecker.config import preset_arguments

torch.set_num_threads(1)

STORE = Path(__file__).with_name("training.json")
FIGURES = Path(__file__).parent.parent / "docs" / "figures"
DEFAULT = preset_arguments(INGD)["lr"]
CURVE = 20  # points of a curve
CHOSEN = (
    "All runs have one seed.\n\n"
    "The figures favour INGD. These tasks are among the development tasks of `gnomon bench quality`, by which its "
    "defaults were chosen. Its three rates were chosen after six had been run. The other optimizers had five rates "
    "each, and their own defaults for other settings. CPU seconds are of runs that took turns.\n\n"
    "![Curves of the best runs](../docs/figures/training.png)"
)


def soap(model: nn.Module, lr: float) -> Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr=lr, precondition_frequency=10)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4),
    "AdamW": lambda model, lr: AdamW(model.parameters(), lr=lr),
    "SOAP": soap,
    "INGD": lambda model, lr: INGD(model, lr),
}
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "autoencoder": {"AdamW": (1e-3, 2e-3, 3e-3, 5e-3, 1e-2)},
    "cnn": {
        "SGD": (0.03, 0.1, 0.2, 0.4, 0.8),
        "AdamW": (1e-3, 2e-3, 3e-3, 5e-3, 1e-2),
        "SOAP": (1e-3, 3e-3, 5e-3, 1e-2, 2e-2),
    },
    "gpt": {"AdamW": (5e-4, 1e-3, 2e-3, 3e-3, 5e-3), "SOAP": (3e-3, 5e-3, 1e-2, 2e-2, 3e-2)},
}
OWN_RATES = (DEFAULT, 2.5 * DEFAULT, DEFAULT / 2)
TIMED = {"cnn": ("SGD", "INGD")}
"""Optimizers that train in turns, where they are not all."""
STEPS = {("autoencoder", "INGD"): 300}
"""Steps where they are not the task's own: INGD has half as many as AdamW for the autoencoder."""


def runs(task: str) -> Iterator[tuple[str, float]]:
    for name, rates in RATES[task].items():
        yield from ((name, lr) for lr in rates)
    yield from (("INGD", lr) for lr in (*OWN_RATES, 5 * DEFAULT))


def stored() -> dict[str, Any]:
    return json.loads(STORE.read_text()) if STORE.exists() else {}


def keep(key: str, value: Any) -> None:
    STORE.write_text(json.dumps(stored() | {key: value}, indent=1, sort_keys=True) + "\n")


def measure(name: str, only: str | None, redo: bool) -> None:
    """Every run of a task that is not in the store, or those of one optimizer."""
    task: Task | None = None
    for optimizer, lr in runs(name):
        key = f"{name}/{optimizer}/{lr:.3g}"
        if only not in (None, optimizer) or (key in stored() and not redo):
            continue
        task = task_with_its_data(name) if task is None else task
        steps = STEPS.get((name, optimizer), task.steps)
        build = functools.partial(OPTIMIZERS[optimizer], lr=lr)
        history = train(task, build, steps, every=max(steps // CURVE, 1))
        outcome = {
            "final": history.final,
            "measured": {str(step): value for step, value in history.measured.items()},
            "training loss": sum(history.loss[-20:]) / 20,
            "seconds": history.seconds,
        }
        keep(key, outcome)
        print(f"{key}: {outcome['final']:.4g} in {history.seconds:.0f} s", flush=True)


def in_turns(name: str) -> None:
    """Seconds of each optimizer at its best rate, a step of each in turn."""
    task = task_with_its_data(name)
    best = {o: best_of(name, o)[0] for o in TIMED.get(name, compared(name))}
    loops = {o: Loop(task, OPTIMIZERS[o], lr) for o, lr in best.items()}
    for _ in range(task.steps):
        for loop in loops.values():
            loop.step()
    keep(f"{name}/seconds in turns", {o: loop.seconds for o, loop in loops.items()})
    print({o: round(loop.seconds, 1) for o, loop in loops.items()})


def at_equal_time(name: str) -> None:
    """INGD with as many steps as it has time for while SOAP takes all of its own, by the seconds in turns."""
    seconds = stored().get(f"{name}/seconds in turns", {})
    if not {"SOAP", "INGD"} <= set(seconds):
        return
    task, lr = task_with_its_data(name), best_of(name, "INGD")[0]
    steps = min(task.steps, int(task.steps * seconds["SOAP"] / seconds["INGD"]))
    history = train(task, functools.partial(OPTIMIZERS["INGD"], lr=lr), steps)
    keep(f"{name}/INGD in SOAP's time", {"steps": steps, "final": history.final, "lr": lr})
    print(f"{name}: {history.final:.4g} in {steps} steps, SOAP's time")


class Loop:
    """A training loop that can be left and entered again."""

    def __init__(self, task: Task, optimizer: Callable[[nn.Module, float], Optimizer], lr: float) -> None:
        torch.manual_seed(0)
        self.task, self.model = task, task.model()
        self.optimizer = optimizer(self.model, lr)
        self.schedule = LambdaLR(self.optimizer, lambda step: task.rate(step, task.steps))
        self.generator = torch.Generator().manual_seed(0)
        self.seconds = 0.0

    def step(self) -> None:
        x, y = self.task.batch(self.generator)
        start = time.process_time()
        self.optimizer.zero_grad()
        self.task.loss(self.model(x), y).backward()
        self.optimizer.step()
        self.schedule.step()
        self.seconds += time.process_time() - start


def done(task: str, optimizer: str) -> dict[float, dict[str, Any]]:
    """The runs of an optimizer that are in the store, by learning rate; INGD's among its three."""
    rates = OWN_RATES if optimizer == "INGD" else RATES[task][optimizer]
    store = stored()
    return {lr: store[key] for lr in sorted(rates) if (key := f"{task}/{optimizer}/{lr:.3g}") in store}


def all_of(task: str, optimizer: str) -> dict[float, dict[str, Any]]:
    """Every run of an optimizer that is in the store, INGD's beyond its three rates too."""
    beginning = f"{task}/{optimizer}/"
    found = {float(key.removeprefix(beginning)): run for key, run in stored().items() if key.startswith(beginning)}
    return dict(sorted(found.items()))


def best_of(task: str, optimizer: str) -> tuple[float, dict[str, Any]]:
    """The rate and the run with the lowest measure."""
    ends = done(task, optimizer)
    lr = min(ends, key=lambda lr: ends[lr]["final"] if math.isfinite(ends[lr]["final"]) else math.inf)
    return lr, ends[lr]


def compared(task: str) -> list[str]:
    return [optimizer for optimizer in (*RATES[task], "INGD") if done(task, optimizer)]


def tables() -> str:
    parts = []
    for name, kind in TASKS.items():
        rows = []
        for optimizer in compared(name):
            ends = [f"{run['final']:.4g} ({lr:.2g})" for lr, run in all_of(name, optimizer).items()]
            lr, best = best_of(name, optimizer)
            seconds = stored().get(f"{name}/seconds in turns", {}).get(optimizer)
            spent = "" if seconds is None else f"{seconds:.0f}"
            rows.append([optimizer, f"**{best['final']:.4g}** at {lr:.2g}", spent, ", ".join(ends)])
        header = ["", f"best {kind.measure}", "CPU seconds", "all (learning rate)"]  # type: ignore[attr-defined]
        five = stored().get(f"{name}/INGD/{5 * DEFAULT:.3g}")
        note = "" if five is None else f"\n\nINGD at five times its default rate: {five['final']:.4g}."
        if same := stored().get(f"{name}/INGD in SOAP's time"):
            note += f"\n\nINGD in the CPU time of SOAP, which is {same['steps']} steps: {same['final']:.4g}."
        missing = [f"{o} {lr:.2g}" for o, lr in runs(name) if f"{name}/{o}/{lr:.3g}" not in stored()]
        note += f"\n\nNot run yet: {', '.join(missing)}." if missing else ""
        parts.append(f"### {name}\n\n{report.table(header, rows)}{note}")
    return "\n\n".join(parts)


def figure() -> None:
    """The curves of the best runs."""
    canvas = Figure(figsize=(13, 3.8), layout="constrained")
    for axes, (name, kind) in zip(canvas.subplots(1, 3), TASKS.items(), strict=True):
        for optimizer in compared(name):
            lr, best = best_of(name, optimizer)
            steps = sorted(map(int, best["measured"]))
            values = [best["measured"][str(s)] for s in steps]
            color, width = palette.of_optimizer(optimizer).light, 2.2 if optimizer == "INGD" else 1.5
            axes.plot(steps, values, label=f"{optimizer}, {lr:.2g}", color=color, linewidth=width)
        axes.set(xlabel="steps", ylabel=kind.measure, title=name)  # type: ignore[attr-defined]
        if name == "autoencoder":
            axes.axhline(best_of(name, "AdamW")[1]["final"], color=palette.SOFT.light, linewidth=0.8, linestyle=":")
            axes.set_ylim(8, 60)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    FIGURES.mkdir(exist_ok=True)
    canvas.savefig(FIGURES / "training.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="all", choices=[*TASKS, "all", "none"])
    parser.add_argument("--time", action="store_true", help="train the optimizers in turns and compare their times")
    parser.add_argument("--write", action="store_true", help="write the tables and the figure")
    parser.add_argument("--only", choices=OPTIMIZERS, help="the runs of one optimizer")
    parser.add_argument("--redo", action="store_true", help="do runs again that are in the store")
    arguments = parser.parse_args()
    for name in {"all": list(TASKS), "none": []}.get(arguments.task, [arguments.task]):
        if arguments.time:
            in_turns(name)
            at_equal_time(name)
        else:
            measure(name, arguments.only, arguments.redo)
    if arguments.write:
        made = f"`python benchmarks/training.py all --write`, on {report.machine('pytorch_optimizer')}."
        text = f"## Training: three tasks, one set of defaults\n\n{made} {CHOSEN}\n\n{tables()}"
        report.write("training", text, stored())
        figure()


if __name__ == "__main__":
    main()
