"""Language models on bytes: a GPT, a LLaMA and an LSTM, on Python's source or on English text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data import english, text
from ..models.gpt import GPT
from ..models.llama import Llama
from ..models.lstm import LSTM
from .task import Task

Pieces = tuple[Tensor, Tensor]
"""Tokens, and the token that follows each."""


class Language(Task):
    """A model that predicts the next byte. Validation and test pieces of the held-out text have no byte in common."""

    measure = "test loss"
    batch_size, context, test_size, validation_size = 16, 64, 1024, 128

    def __init__(self, text: Tensor, held_out: Tensor) -> None:
        self.text, self.held_out = text, held_out
        places = torch.Generator().manual_seed(1234)
        tests = [self._starts(held_out, 128, places) for _ in range(self.test_size // 128)]
        self._test = [self._pieces(held_out, starts) for starts in tests]
        others = self._starts(held_out, 4 * self.validation_size, places)
        apart = (others - torch.cat(tests).T).abs().amin(1) > self.context
        self._validation = [self._pieces(held_out, others[apart][: self.validation_size])]

    def batch(self, generator: torch.Generator) -> Pieces:
        return self._pieces(self.text, self._starts(self.text, self.batch_size, generator))

    def _starts(self, text: Tensor, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(text) - self.context, (count, 1), generator=generator)

    def _pieces(self, text: Tensor, starts: Tensor) -> Pieces:
        tokens = text[starts + torch.arange(self.context + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    def evaluate(self, model: nn.Module) -> float:
        return self._mean_loss(model, self._test)

    def validate(self, model: nn.Module) -> float:
        return self._mean_loss(model, self._validation)

    def _mean_loss(self, model: nn.Module, pieces: list[Pieces]) -> float:
        with torch.no_grad():
            return sum(self.loss(model(x), y).item() for x, y in pieces) / len(pieces)


class Text(Language):
    """A GPT on the bytes of Python's standard library: 2 layers, width 128, 4 heads, context 64."""

    name, steps, warmup, measure = "gpt", 400, 20, "validation loss"
    batch_size = 32

    def __init__(self, steps: int = steps, batch_size: int = batch_size) -> None:
        self.steps, self.batch_size = steps, batch_size
        super().__init__(*text.read())

    def model(self) -> nn.Module:
        return GPT(width=128, heads=4, layers=2, context=self.context)


class English(Language):
    """A GPT on English text: 3 layers, width 96, 6 heads, context 64."""

    name, steps, warmup = "english", 200, 20

    def __init__(self) -> None:
        super().__init__(*english.read())

    def model(self) -> nn.Module:
        return GPT(width=96, heads=6, layers=3, context=self.context)


class LlamaText(Language):
    """A LLaMA on the bytes of Python's standard library: 2 layers, width 128, 4 heads, hidden width 344."""

    name, steps, warmup = "llama", 200, 20

    def __init__(self) -> None:
        super().__init__(*text.read())

    def model(self) -> nn.Module:
        return Llama(width=128, heads=4, layers=2, hidden=344, context=self.context)


class LSTMText(Language):
    """An LSTM on English text: one layer of 192 cells after an embedding of width 96."""

    name, steps, warmup = "lstm", 250, 20

    def __init__(self) -> None:
        super().__init__(*english.read())

    def model(self) -> nn.Module:
        return LSTM(width=96, hidden=192, layers=1)
