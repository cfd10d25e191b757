"""The tasks of the suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .adaptation import Lora
from .autoencoder import Autoencoder
from .equation import Burgers
from .images import Cnn, Denoiser, ResNet, ViT
from .language import English, LlamaText, LSTMText, Text
from .tabular import Magic, Regression
from .task import Task

DEVELOPMENT: dict[str, Callable[[], Task]] = {
    "autoencoder": partial(Autoencoder, steps=300, fashion=False),
    "cnn": Cnn,
    "gpt": partial(Text, steps=200, batch_size=16),
    "llama": LlamaText,
    "magic": Magic,
    "equation": Burgers,
}
"""The tasks by which INGD's defaults may be chosen."""

JUDGEMENT: dict[str, Callable[[], Task]] = {
    "english": English,
    "vit": ViT,
    "resnet": ResNet,
    "regression": Regression,
    "denoiser": Denoiser,
    "lstm": LSTMText,
    "lora": Lora,
}
"""The tasks by which nothing is chosen except each optimizer's learning rate."""

TASKS = DEVELOPMENT | JUDGEMENT
