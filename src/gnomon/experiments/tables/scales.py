"""What is run for each table: the paper's protocol, and one that two cores finish in under 90 minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..training.config import Config
from . import published


@dataclass(frozen=True)
class Grid:
    """Learning rates and dampings at which INGD and KFAC are run side by side."""

    task: Config
    rates: tuple[float, ...]
    dampings: tuple[float, ...]
    presets: tuple[str, ...] = ("paper", "robust")


@dataclass(frozen=True)
class Scale:
    """What is compared, and with which budget."""

    tasks: tuple[Config, ...]
    """A model and its data each; the optimizer is put in."""
    optimizers: tuple[str, ...]
    settings: int
    """Learning rates that are tried of each optimizer; with one it is the default, or the authors'."""
    last: int
    """Epochs at the end of a run that its result is the mean of."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Of the final runs; settings are chosen with another, the tasks' own."""
    validation: float = 0.1
    """The share of the training set that settings are judged by."""
    grid: Grid | None = None


SMALL_OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "soap", "kfac", "ingd")


def _full(data: str, settings: int) -> Scale:
    """The paper's: 120 epochs, batches of 128, the rate divided by 10 every 40, its weight decays and dampings."""
    tasks = tuple(Config(model=model, data=data, preset="paper") for model in published.ERRORS[data])
    return Scale(tasks, published.METHODS, settings, last=10)


SMALL_CIFAR = Config(model="cnn", data="cifar100", train_limit=10_000, test_limit=5_000, epochs=8, schedule="thirds")
# 560 steps, for in the paper's update the preconditioner's own rate is small during the first 500.
GRID_TASK = replace(SMALL_CIFAR, train_limit=4_480, test_limit=1_000, epochs=4, batch_size=32)
SMALL_GPT = Config(model="gpt", data="python-text", train_limit=2_560, test_limit=1_000, epochs=10, batch_size=64)

TABLES: dict[str, dict[str, Scale]] = {
    "cifar100": {
        "full": _full("cifar100", settings=5),
        "small": Scale(
            (SMALL_CIFAR,),
            SMALL_OPTIMIZERS,
            settings=5,
            last=1,
            grid=Grid(GRID_TASK, rates=(0.003, 0.01, 0.03, 0.1), dampings=(0.0005, 0.01, 0.2)),
        ),
    },
    "tiny-imagenet": {
        "full": _full("tiny-imagenet", settings=5),
        "small": Scale(
            (replace(SMALL_CIFAR, data="tiny-imagenet", train_limit=4_000, test_limit=1_000, epochs=6),),
            SMALL_OPTIMIZERS,
            settings=5,
            last=1,
        ),
    },
    "imagenet-100": {
        "full": _full("imagenet-100", settings=1),
        "small": Scale(
            (replace(SMALL_CIFAR, data="imagenet-100", train_limit=1_000, test_limit=500, epochs=4, batch_size=32),),
            ("sgd", "adamw", "kfac", "ingd"),
            settings=3,
            last=1,
        ),
    },
    "gpt": {
        "full": Scale((replace(SMALL_GPT, train_limit=None, test_limit=None, batch_size=128),), SMALL_OPTIMIZERS, 5, 1),
        "small": Scale((SMALL_GPT,), SMALL_OPTIMIZERS, settings=5, last=1),
    },
}
