"""Named parameters on their own scale, and the unconstrained vectors in which inference runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints
from torch.distributions.constraints import Constraint

Specification = int | Sequence[int] | Constraint | tuple[Sequence[int] | int, Constraint]
"""A shape, a constraint (of a scalar), or a pair of both."""


class Block(NamedTuple):
    """One named parameter: its shape for the user, and its place in the unconstrained vector."""

    name: str
    shape: torch.Size
    constraint: Constraint
    transform: Transform
    inner_shape: torch.Size
    where: slice


class Parameters:
    """Named parameters, their shapes and their constraints; ``biject_to`` gives the maps to the unconstrained scale.

    The unconstrained vector holds the parameters one after the other, in the order of the mapping.
    """

    def __init__(self, specifications: Mapping[str, Specification]) -> None:
        if not specifications:
            raise ValueError("parameters is empty; name at least one parameter with its shape")
        self.blocks: list[Block] = []
        start = 0
        for name, specification in specifications.items():
            shape, constraint = _shape_and_constraint(name, specification)
            transform = _transform(name, constraint)
            inner_shape = _inner_shape(name, transform, shape)
            where = slice(start, start + math.prod(inner_shape))
            self.blocks.append(Block(name, shape, constraint, transform, inner_shape, where))
            start = where.stop
        self.dim = start

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def constrain(self, x: Tensor) -> dict[str, Tensor]:
        """Return vectors ``(*sample, dim)`` as parameters ``(*sample, *shape)`` on their own scale."""
        return {block.name: block.transform(_part(block, x)) for block in self.blocks}

    def constrain_with_logdet(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return :meth:`constrain` for ``(draws, dim)``, and the log-determinants of its Jacobian, ``(draws,)``."""
        values, total = {}, x.new_zeros(len(x))
        for block in self.blocks:
            inner = _part(block, x)
            values[block.name] = outer = block.transform(inner)
            if block.constraint is not constraints.real:
                total = total + block.transform.log_abs_det_jacobian(inner, outer).reshape(len(x), -1).sum(-1)
        return values, total

    def unconstrain(self, values: Mapping[str, Any]) -> Tensor:
        """Return parameters ``(*sample, *shape)`` as vectors ``(*sample, dim)``."""
        missing = [block.name for block in self.blocks if block.name not in values]
        if missing:
            raise ValueError(f"values are missing for the parameters {', '.join(map(repr, missing))}")
        parts = []
        for block in self.blocks:
            value = torch.as_tensor(values[block.name])
            inner = block.transform.inv(value)
            parts.append(inner.reshape(*inner.shape[: inner.ndim - len(block.inner_shape)], -1))
        return torch.cat(parts, -1)

    def violations(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return which draws are outside of their constraints, of shape ``(draws,)``.

        Rounding puts them there, at the ends of the scale.
        """
        outside = None
        for block in self.blocks:
            if block.constraint is constraints.real:
                continue
            inside = block.constraint.check(values[block.name])
            inside = inside.reshape(len(inside), -1).all(-1)
            outside = ~inside if outside is None else outside | ~inside
        if outside is None:
            first = values[self.blocks[0].name]
            return torch.zeros(len(first), dtype=torch.bool, device=first.device)
        return outside

    def entries(self) -> list[str]:
        """Return the name of each number on the parameters' own scale: ``"beta[2]"``, ``"tau"``."""
        return [entry for block in self.blocks for entry in _entries(block.name, block.shape)]


def _part(block: Block, x: Tensor) -> Tensor:
    return x[..., block.where].reshape(*x.shape[:-1], *block.inner_shape)


def _entries(name: str, shape: torch.Size) -> list[str]:
    if not shape:
        return [name]
    places = torch.cartesian_prod(*[torch.arange(size) for size in shape]).reshape(-1, len(shape)).tolist()
    return [f"{name}[{','.join(map(str, place))}]" for place in places]


def _shape_and_constraint(name: str, specification: Specification) -> tuple[torch.Size, Constraint]:
    constraint: Any = constraints.real
    shape: Any = specification
    if _is_constraint(specification):
        shape, constraint = (), specification
    elif isinstance(specification, tuple) and len(specification) == 2 and _is_constraint(specification[1]):
        shape, constraint = specification
    try:
        size = torch.Size([shape] if isinstance(shape, int) else shape)
    except TypeError:
        raise TypeError(
            f"parameters[{name!r}] must be a shape, a constraint or a pair of both, such as "
            f"((3,), constraints.positive), got {specification!r}"
        ) from None
    return size, constraint


def _is_constraint(value: object) -> bool:
    return isinstance(value, Constraint)


def _transform(name: str, constraint: Constraint) -> Transform:
    try:
        return biject_to(constraint)
    except NotImplementedError:
        raise ValueError(
            f"parameters[{name!r}] has the constraint {constraint}, for which torch.distributions.biject_to knows no "
            "map from unconstrained numbers; parameters must be continuous"
        ) from None


def _inner_shape(name: str, transform: Transform, shape: torch.Size) -> torch.Size:
    try:
        return torch.Size(transform.inverse_shape(shape))
    except ValueError as error:
        raise ValueError(
            f"parameters[{name!r}] has shape {tuple(shape)}, which its constraint refuses: {error}"
        ) from None
