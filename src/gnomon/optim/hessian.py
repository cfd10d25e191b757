"""How a diagonal of the Hessian is obtained from Hessian-vector products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..groups import SymmetricOperator
from ..groups.base import positive_size


class Diagonals(ABC):
    """A rule for the diagonal of a symmetric operator, which may be a part of a larger one."""

    @abstractmethod
    def __call__(self, operator: SymmetricOperator, like: Tensor) -> Tensor:
        """Return the diagonal, in the precision and on the device of ``like``."""

    def check(self, size: int) -> None:  # noqa: B027  # most rules fit any
        """Raise an error where the rule does not fit a Hessian of this size."""


class Hutchinson(Diagonals):
    """``mean of v . (H v)`` over random signs: unbiased, with the off-diagonal entries as its variance."""

    def __init__(self, samples: int = 1, generator: torch.Generator | None = None) -> None:
        self.samples = positive_size("samples", samples)
        self.generator = generator

    def __call__(self, operator: SymmetricOperator, like: Tensor) -> Tensor:
        bits = torch.randint(2, (self.samples, operator.k), generator=self.generator, device=like.device)
        signs = (2 * bits - 1).to(like.dtype)
        return (signs * operator.apply(signs)).mean(0)


class Colored(Diagonals):
    """Exact, with one product a color, where no two coordinates of a color are coupled by the Hessian.

    ``pattern`` says which are: a matrix whose non-zeros cover the Hessian's, dense or sparse. Coordinates get the
    first color that none of their neighbours has.
    """

    def __init__(self, pattern: Tensor) -> None:
        if pattern.ndim != 2 or pattern.shape[0] != pattern.shape[1]:
            raise ValueError(f"pattern must be a square matrix, got shape {tuple(pattern.shape)}")
        sparse = pattern.to_sparse_coo() if pattern.layout != torch.sparse_coo else pattern
        neighbours: list[list[int]] = [[] for _ in range(len(pattern))]
        for i, j in sparse.coalesce().indices().T.tolist():
            if i != j:
                neighbours[i].append(j)
                neighbours[j].append(i)
        colors = [-1] * len(pattern)
        for i, near in enumerate(neighbours):
            taken = {colors[j] for j in near}
            colors[i] = next(color for color in range(len(pattern)) if color not in taken)
        self.colors = torch.tensor(colors)

    def check(self, size: int) -> None:
        if len(self.colors) != size:
            raise ValueError(f"pattern is of size {len(self.colors)}, but a group of params has {size} numbers")

    def _part(self, operator: SymmetricOperator) -> Tensor:
        return self.colors[operator.where]

    def __call__(self, operator: SymmetricOperator, like: Tensor) -> Tensor:
        colors = self._part(operator)
        kinds = colors.unique()
        masks = (colors == kinds.unsqueeze(-1)).to(like)
        return (masks * operator.apply(masks)).sum(0)


class Banded(Colored):
    """:class:`Colored` for a Hessian in which coordinates further than ``width`` apart are not coupled."""

    def __init__(self, width: int) -> None:
        if not isinstance(width, int) or width < 0:
            raise ValueError(f"width must be an integer of at least 0 (1: tridiagonal), got {width!r}")
        self.width = width

    def check(self, size: int) -> None:
        """Accept any size."""

    def _part(self, operator: SymmetricOperator) -> Tensor:
        return torch.arange(operator.k) % (self.width + 1)


class Exact(Colored):
    """Exact whatever the Hessian is, with as many products as there are entries."""

    def __init__(self) -> None: ...

    def check(self, size: int) -> None:
        """Accept any size."""

    def _part(self, operator: SymmetricOperator) -> Tensor:
        return torch.arange(operator.k)


class Given(Diagonals):
    """A function of the user's that returns the whole diagonal at the current parameters."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.function = function

    def __call__(self, operator: SymmetricOperator, like: Tensor) -> Tensor:
        diagonal = self.function()
        if not isinstance(diagonal, Tensor) or diagonal.numel() != len(like):
            raise ValueError(f"hessian must return the {len(like)} numbers of the diagonal, got {diagonal!r}")
        return diagonal.detach().flatten().to(like)[operator.where]


def as_diagonals(hessian: str | Diagonals | Callable[[], Tensor]) -> Diagonals:
    """Return the rule behind the argument ``hessian`` of an optimizer."""
    if isinstance(hessian, Diagonals):
        return hessian
    if hessian == "hutchinson":
        return Hutchinson()
    if hessian == "exact":
        return Exact()
    if callable(hessian) and not isinstance(hessian, type):
        return Given(hessian)
    raise ValueError(
        "hessian must be 'hutchinson', 'exact', a function that returns the diagonal, or one of Hutchinson, Banded and "
        f"Colored from gnomon.optim, got {hessian!r}"
    )
