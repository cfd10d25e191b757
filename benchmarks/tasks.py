"""Three different small training tasks: a deep autoencoder, a convolutional classifier and a GPT."""

from __future__ import annotations

from collections.abc import Callable

from gnomon.experiments.data import DataMissingError
from gnomon.experiments.quality.autoencoder import Autoencoder
from gnomon.experiments.quality.cifar import Cifar
from gnomon.experiments.quality.language import Text
from gnomon.experiments.quality.task import History, Task, train

__all__ = ["TASKS", "Autoencoder", "Cifar", "DataMissingError", "History", "Task", "Text", "train"]

TASKS: dict[str, Callable[[], Task]] = {"autoencoder": Autoencoder, "cnn": Cifar, "gpt": Text}
