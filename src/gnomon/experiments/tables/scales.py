"""The runs of each table at three scales.

They are the paper's protocol, one that two cores finish in under 90 minutes, and one that a core finishes in minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..training.config import Config
from . import published


@dataclass(frozen=True)
class Grid:
    """The learning rates and dampings at which INGD and KFAC are compared."""

    task: Config
    rates: tuple[float, ...]
    dampings: tuple[float, ...]
    presets: tuple[str, ...] = ("paper", "robust")


@dataclass(frozen=True)
class Scale:
    """The tasks and optimizers that are compared, and their budget."""

    tasks: tuple[Config, ...]
    """A model and its data for each task. The optimizer is set later."""
    optimizers: tuple[str, ...]
    settings: int
    """The number of learning rates that are tried for each optimizer. A single rate is the default or the authors'."""
    last: int
    """The number of epochs at the end of a run over which its result is the mean."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """The seeds of the final runs. Settings are chosen with another seed, that of the task."""
    validation: float = 0.1
    """The share of the training set on which settings are judged."""
    grid: Grid | None = None


SMALL_OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "soap", "kfac", "ingd")


def _full(data: str, settings: int) -> Scale:
    """Return the paper's protocol.

    It has 120 epochs, batches of 128, a rate that is divided by 10 every 40 epochs, and the paper's weight decays and
    dampings.
    """
    tasks = tuple(Config(model=model, data=data, preset="paper") for model in published.ERRORS[data])
    return Scale(tasks, published.METHODS, settings, last=10)


SMALL_CIFAR = Config(model="cnn", data="cifar100", train_limit=10_000, test_limit=5_000, epochs=8, schedule="thirds")
# These are 560 steps, because in the paper's update the preconditioner's own rate is small during the first 500.
GRID_TASK = replace(SMALL_CIFAR, train_limit=4_480, test_limit=1_000, epochs=4, batch_size=32)
SMALL_GPT = Config(model="gpt", data="python-text", train_limit=2_560, test_limit=1_000, epochs=10, batch_size=64)

# These show that everything runs, and what a page looks like. The numbers are of networks that have hardly learned.
TINY_CIFAR = replace(SMALL_CIFAR, train_limit=800, test_limit=500, epochs=3, batch_size=32)
TINY_GPT = replace(SMALL_GPT, train_limit=192, test_limit=64, epochs=3, batch_size=16)


def _tiny(task: Config, grid: Grid | None = None) -> Scale:
    return Scale((task,), SMALL_OPTIMIZERS, settings=3, last=1, seeds=(1, 2), grid=grid)


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
        "tiny": _tiny(
            TINY_CIFAR, Grid(replace(TINY_CIFAR, train_limit=320, epochs=1), (0.01, 0.1), (0.01, 0.2), ("robust",))
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
        "tiny": _tiny(replace(TINY_CIFAR, data="tiny-imagenet", train_limit=160, test_limit=100)),
    },
    "imagenet-100": {
        "full": _full("imagenet-100", settings=1),
        "small": Scale(
            (replace(SMALL_CIFAR, data="imagenet-100", train_limit=1_000, test_limit=500, epochs=4, batch_size=32),),
            ("sgd", "adamw", "kfac", "ingd"),
            settings=3,
            last=1,
        ),
        "tiny": _tiny(replace(TINY_CIFAR, data="imagenet-100", train_limit=32, test_limit=32, epochs=2, batch_size=8)),
    },
    "gpt": {
        "full": Scale((replace(SMALL_GPT, train_limit=None, test_limit=None, batch_size=128),), SMALL_OPTIMIZERS, 5, 1),
        "small": Scale((SMALL_GPT,), SMALL_OPTIMIZERS, settings=5, last=1),
        "tiny": _tiny(TINY_GPT),
    },
}
