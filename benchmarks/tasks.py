"""Three different small training tasks: a deep autoencoder, a convolutional classifier and a GPT."""

from __future__ import annotations

from collections.abc import Callable

from gnomon.experiments.data import DataMissingError
from gnomon.experiments.quality.autoencoder import Autoencoder, fashion_images
from gnomon.experiments.quality.cifar import Cifar
from gnomon.experiments.quality.language import Text
from gnomon.experiments.quality.task import History, Task, train

__all__ = [
    "TASKS",
    "Autoencoder",
    "Cifar",
    "DataMissingError",
    "History",
    "Task",
    "Text",
    "task_with_its_data",
    "train",
]

TASKS: dict[str, Callable[[], Task]] = {"autoencoder": Autoencoder, "cnn": Cifar, "gpt": Text}


def task_with_its_data(name: str) -> Task:
    """Return a task whose figures may be stored. Its data must be there: the autoencoder would take others instead."""
    if name == "autoencoder":
        fashion_images()
    return TASKS[name]()
