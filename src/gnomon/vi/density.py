"""What the user writes, made into a batched function of parameters, and of mini-batches where there are some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .parameters import Parameters

Density = Callable[..., Tensor]


class DensityError(RuntimeError):
    """The density or its gradient is not finite where it must be, or cannot be differentiated."""


def batched(function: Density, parameters: Parameters, named: bool, like: Tensor, batch: tuple[Any, ...]) -> Density:
    """Return a function that maps ``(draws, ...)`` to ``(draws,)``.

    It is the given one if that does so already; otherwise that is the function of one draw, and is vmapped. It is
    evaluated at three draws and at the first of them alone. A function of one draw fails, or returns something of
    another shape, or a number that depends on the other draws.
    """
    generator = torch.Generator().manual_seed(0)
    x = (0.1 * torch.randn(3, parameters.dim, generator=generator, dtype=torch.float64)).to(like)

    def arguments(rows: Tensor) -> Any:
        return parameters.constrain(rows) if named else rows

    try:
        value, first = function(arguments(x), *batch), function(arguments(x[:1]), *batch)
        if _shape(value) == (3,) and _shape(first) == (1,) and _agree(value[:1], first):
            return function
        found = f"a result of shape {_shape(value)} for 3 draws"
    except Exception as error:  # of a function that knows nothing of draws, or of one that fails in any case
        found = f"{type(error).__name__}: {error}"
    mapped = torch.func.vmap(function, in_dims=(0, *[None] * len(batch)), randomness="error")
    try:
        value = mapped(arguments(x), *batch)
    except Exception as error:
        raise ValueError(
            f"log_density takes neither a batch of draws ({found}) nor, under torch.func.vmap, a single one "
            f"({type(error).__name__}: {error}). It must map {_expected(parameters, named)}. Draws are "
            f"{like.dtype}: pass dtype= if your data has another type"
        ) from error
    if _shape(value) != (3,):
        raise ValueError(
            f"log_density returns {found}, and a result of shape {_shape(value)[1:]} for one draw; it must return one "
            "number for each draw: sum over data and parameters"
        )
    return mapped


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, Tensor):
        raise TypeError(f"log_density must return a tensor, got {type(value).__name__}")
    return tuple(value.shape)


def _agree(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True).all())


def _expected(parameters: Parameters, named: bool) -> str:
    if not named:
        return f"a tensor of shape (draws, {parameters.dim}) to (draws,)"
    shapes = ", ".join(f"{block.name!r}: {('draws', *block.shape)}" for block in parameters)
    return f"a dictionary of tensors {{{shapes}}} to (draws,)".replace("'draws'", "draws")


class Minibatches:
    """Batches of data, again and again, and a density that scales a batch's likelihood up to all data.

    ``log p(x) = log_prior(x) + num_data / len(batch) * log_likelihood(x, batch)``
    """

    def __init__(self, data: Iterable[Any], num_data: int | None) -> None:
        if isinstance(data, (Tensor, Iterator)) or not isinstance(data, Iterable):
            raise TypeError(
                f"data must be a DataLoader, or a list of batches that can be read more than once, got "
                f"{type(data).__name__}"
            )
        self._data = data
        self.num_data = _count(data, num_data)
        self._iterator: Iterator[Any] = iter(())
        self.first = self.next()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the data once."""
        return (_arguments(batch) for batch in self._data)

    def next(self) -> tuple[Any, ...]:
        """Return the next batch; after the last one comes the first."""
        for _ in range(2):
            for batch in self._iterator:
                return _arguments(batch)
            self._iterator = iter(self._data)
        raise ValueError("data holds no batches")

    def density(self, log_likelihood: Density, log_prior: Density) -> Density:
        """Return an estimate of the log density of all data, from one batch."""

        def log_density(x: Any, *batch: Any) -> Tensor:
            return log_prior(x) + self.num_data / batch_size(batch) * log_likelihood(x, *batch)

        return log_density


def batch_size(batch: tuple[Any, ...]) -> int:
    """Return how many data a batch has."""
    first = batch[0]
    return len(next(iter(first.values()))) if isinstance(first, dict) else len(first)


def _arguments(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _count(data: Any, num_data: int | None) -> int:
    if num_data is None:
        try:
            num_data = len(data.dataset)
        except (AttributeError, TypeError):
            raise ValueError("num_data is None, and data has no dataset that tells it; pass num_data=") from None
    if num_data < 1:
        raise ValueError(f"num_data must be a positive integer, got {num_data!r}")
    return num_data
