"""What a problem is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..groups import Group
from ..manifolds import SPD


class Matrix(Protocol):
    """What an objective asks of an SPD matrix: :class:`gnomon.SPD` and :class:`gnomon.baselines.Ambient` both do."""

    def matrix(self) -> Tensor: ...
    def logdet(self) -> Tensor: ...
    def quad(self, x: Tensor) -> Tensor: ...
    def inv_quad(self, x: Tensor) -> Tensor: ...


class Problem(ABC):
    """An objective: call it on a point for the loss. :func:`solve` minimizes it."""

    minimum: float | None = None
    """The least value of the loss, where it is known."""

    @abstractmethod
    def start(self) -> nn.Module | nn.Parameter:
        """Return the point to start from."""

    @abstractmethod
    def __call__(self, point: Any) -> Tensor:
        """Return the loss."""


class SPDProblem(Problem):
    """An objective on one SPD matrix, full or structured."""

    minimizer: Tensor | None = None
    """The best full matrix, where it is known."""

    def __init__(self, like: Tensor) -> None:
        self.k, self.dtype, self.device = like.shape[-1], like.dtype, like.device

    def start(self, structure: Group | None = None) -> SPD:
        """Return the identity on the full manifold, or with a factor in the given group."""
        return SPD(self.k if structure is None else structure, dtype=self.dtype, device=self.device)

    @abstractmethod
    def __call__(self, point: Matrix) -> Tensor:
        """Return the loss."""

    @abstractmethod
    def gradient(self, S: Tensor) -> Tensor:
        """Return the symmetric Euclidean gradient at a dense matrix, in closed form."""


def pick(data: Tensor, rows: Tensor | None) -> Tensor:
    """Return a mini-batch, the rows with the given indices, or all rows."""
    return data if rows is None else data[rows]


def symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)


def normal(*shape: int, dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None) -> Tensor:
    """Return standard normal numbers, drawn in float64 so that a seed means the same data in every precision."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
