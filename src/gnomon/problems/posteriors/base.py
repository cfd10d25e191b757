"""What a posterior is: a log density over R^d, its parameters on their scale, and the moments of reference draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .transforms import FREE, Transform

Values = dict[str, Tensor]
"""Tensors of shape ``(draws, *shape)`` under the names of the model."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model: a scalar, a vector or a matrix, and the map from R^m to its values."""

    name: str
    shape: tuple[int, ...] = ()
    transform: Transform = FREE

    @property
    def size(self) -> int:
        """The number of unconstrained coordinates."""
        return math.prod(self.shape) - self.transform.lost


@dataclass(frozen=True)
class Reference:
    """Moments of reference draws on the model's scale. An entry of a vector has a name such as ``beta[1]``."""

    names: tuple[str, ...]
    means: Tensor
    sds: Tensor

    def entries(self, values: Values) -> Tensor:
        """Return the draws of the entries that the reference has, ``(draws, names)``."""
        columns = dict(_entries(values))
        return torch.stack([columns[name] for name in self.names], -1)

    def error(self, values: Values) -> float:
        """Return the largest error of the draws' means, in posterior standard deviations, and log standard deviations.

        The error of an entry is ``max(|mean - reference mean| / reference sd, |log(sd / reference sd)|)``.
        """
        draws = self.entries(values)
        means = (draws.mean(0) - self.means) / self.sds
        sds = (draws.std(0) / self.sds).log()
        errors = torch.stack([means, sds]).abs()
        return math.inf if bool(errors.isnan().any()) else float(errors.max())


def _entries(values: Values) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of every value, named as Stan names them: indices from one, separated by commas."""
    for name, value in values.items():
        indices = itertools.product(*(range(1, size + 1) for size in value.shape[1:]))
        for index, entry in zip(indices, value.flatten(1).unbind(1) if value.ndim > 1 else [value], strict=True):
            yield f"{name}[{','.join(map(str, index))}]" if index else name, entry


class Posterior:
    """A log density of a model's parameters given its data, over unconstrained coordinates.

        log_density(x) = log_joint(theta(x)) + log |det d theta / dx|

    ``log_joint`` takes the parameters on their scale; ``derived`` returns further values, such as the transformed
    parameters of a model without centering. The coordinates have the order of ``parameters``; those of the first
    ``globals`` parameters come first, and given these the others are independent, each alone or in small groups.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Parameter],
        log_joint: Callable[[Values], Tensor],
        *,
        derived: Callable[[Values], Values] | None = None,
        reference: Reference | None = None,
        global_parameters: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.dim = sum(parameter.size for parameter in self.parameters)
        self.reference = reference
        self.globals = sum(parameter.size for parameter in self.parameters[: len(global_parameters)])
        """The number of leading coordinates that are global unknowns of a hierarchical model; 0 for other models."""
        if tuple(global_parameters) != tuple(p.name for p in self.parameters[: len(global_parameters)]):
            raise ValueError(f"global_parameters must be the first parameters, got {global_parameters!r}")
        self._log_joint = log_joint
        self._derived = derived

    def __repr__(self) -> str:
        return f"Posterior({self.name!r}, dim={self.dim})"

    def log_density(self, x: Tensor) -> Tensor:
        """Return the log density of each row, ``(draws, dim) -> (draws,)``, up to a constant."""
        values, log_determinant = self._constrain(x)
        return self._log_joint(values) + log_determinant

    def to_constrained(self, x: Tensor) -> Values:
        """Return the model's values at each row of coordinates, under their names."""
        values, _ = self._constrain(x)
        return values if self._derived is None else {**values, **self._derived(values)}

    def error(self, x: Tensor) -> float:
        """Return the largest error of draws ``(draws, dim)``; see :meth:`Reference.error`."""
        if self.reference is None:
            raise ValueError(
                f"posterior {self.name!r} has no reference draws; choose one of the names with_reference()"
            )
        return self.reference.error(self.to_constrained(x))

    def _constrain(self, x: Tensor) -> tuple[Values, Tensor]:
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"x must have the shape (draws, {self.dim}), got {tuple(x.shape)}")
        values: Values = {}
        log_determinant = x.new_zeros(())
        pieces = x.split([parameter.size for parameter in self.parameters], 1)
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            value, part = parameter.transform.apply(piece)
            values[parameter.name] = value.reshape(len(x), *parameter.shape)
            log_determinant = log_determinant + part
        return values, log_determinant
