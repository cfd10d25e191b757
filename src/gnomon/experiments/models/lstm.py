"""A language model with long short-term memory (Hochreiter and Schmidhuber 1997)."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """An embedding, layers of LSTM cells, and a linear layer over bytes."""

    def __init__(self, width: int, hidden: int, layers: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.cells = nn.LSTM(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.tokens(tokens))[0])
