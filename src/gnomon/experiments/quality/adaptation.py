"""Low-rank adaptation of a pre-trained language model to another text."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..data import english
from ..models.gpt import GPT
from ..models.lora import adapt
from .language import Language, Text
from .task import train

PRETRAINING = 250


class Lora(Language):
    """Adapters of rank 8 in a frozen GPT that was trained on Python's source. They learn English text."""

    name, steps, warmup = "lora", 160, 20
    rank = 8

    def __init__(self) -> None:
        super().__init__(*english.read())

    def model(self) -> nn.Module:
        model = copy.deepcopy(pretrained())
        return adapt(model, model.blocks, self.rank)


@functools.cache
def pretrained() -> GPT:
    """Return the GPT of :class:`~.language.Text` after a short run of AdamW. A process trains it once."""
    task = Text(PRETRAINING, batch_size=16)
    found: list[nn.Module] = []

    def adamw(model: nn.Module) -> Optimizer:
        found.append(model)
        return AdamW(model.parameters(), lr=2e-3)

    with torch.random.fork_rng():
        train(task, adamw, measure=lambda model: 0.0)
    model = found[0]
    assert isinstance(model, GPT)
    return model
