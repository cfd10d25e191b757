"""Weighted rows of data, and the second moments that fits ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..groups.moments import DenseMoments, Moments, RowMoments

Target = Literal["diagonal", "identity"]

LARGEST_DENSE = 2000
"""Up to so many features second moments are kept as a matrix."""
CHUNK = 2**22
"""Numbers that are converted to float64 at a time: 32 MiB."""
SMALLEST_VARIANCE = 1e-12
"""Of a feature, as a share of the mean variance of all."""


class Summary(Protocol):
    """What a fit with a given shrinkage asks of data."""

    @property
    def k(self) -> int: ...
    @property
    def count(self) -> int:
        """The number of rows."""

    @property
    def size(self) -> float:
        """The number of samples; with unequal weights w that sum to one the effective one, ``1 / sum w^2``."""

    @property
    def mean(self) -> Tensor: ...
    @property
    def variances(self) -> Tensor: ...
    @property
    def fourth(self) -> Tensor:
        """The average of ``((x - mean)^2 - variance)^2`` of each feature."""

    @property
    def matrix(self) -> Tensor:
        """``sum_i w_i (x_i - mean) (x_i - mean)^T``."""

    def target(self, kind: Target) -> Tensor:
        """Return the diagonal that the moments are shrunk towards.

        ``"identity"`` is the mean variance for every feature. ``"diagonal"`` are the features' own variances v,
        themselves shrunk towards their mean m by the share ``sum Var(v_i) / sum (v_i - m)^2``, at most 1, that
        minimizes the expected squared error (Opgen-Rhein and Strimmer 2007): where all are equal but for noise they
        become so, and where the units differ they hardly change.
        """
        common = self.variances.mean()
        if kind == "identity":
            return common.expand(self.k)
        noise = float(self.fourth.sum()) / max(self.size - 1, 1)
        spread = float((self.variances - common).square().sum())
        share = 1.0 if spread <= noise else noise / spread
        return (1 - share) * self.variances + share * common

    def moments(self, shrinkage: float, target: Target) -> Moments:
        """Return ``(1 - shrinkage) S + shrinkage Diag(target)``."""
        return shrunk(self.matrix, shrinkage, self.target(target))


@dataclass(frozen=True)
class Sample(Summary):
    """Rows with weights that sum to one, and NaN where a value is missing."""

    rows: Tensor
    weights: Tensor
    centered: bool
    """Whether the mean is known to be zero."""

    @classmethod
    def of(cls, rows: Tensor, weights: Tensor | None, centered: bool) -> Sample:
        if weights is None:
            weights = torch.ones(len(rows), dtype=torch.float64)
        return cls(rows, weights / weights.sum(), centered)

    def subset(self, index: Tensor) -> Sample:
        return Sample.of(self.rows[index], self.weights[index], self.centered)

    @property
    def k(self) -> int:
        return self.rows.shape[1]

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def extremes(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest value of each feature."""
        return self.rows.nan_to_num(nan=math.inf).amin(0), self.rows.nan_to_num(nan=-math.inf).amax(0)

    @cached_property
    def complete(self) -> bool:
        return not bool(self.rows.isnan().any())

    @cached_property
    def observed(self) -> Tensor:
        return ~self.rows.isnan()

    @cached_property
    def size(self) -> float:
        return 1 / float(self.weights.square().sum())

    # ------------------------------------------------------------------ first and second moments of what is observed
    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows in float64 and their weights, some at a time."""
        size = max(1, CHUNK // self.k)
        for rows, weights in zip(self.rows.split(size), self.weights.split(size), strict=True):
            yield rows.double(), weights.unsqueeze(-1)

    @cached_property
    def mean(self) -> Tensor:
        """Of what is observed of each feature; zero for centred data."""
        if self.centered:
            return torch.zeros(self.k, dtype=torch.float64)
        total = sum((weights * rows).nansum(0) for rows, weights in self._parts())
        return total / self._shares

    @cached_property
    def _shares(self) -> Tensor:
        """The weight of the rows in which each feature is observed."""
        return torch.stack([(weights * ~rows.isnan()).sum(0) for rows, weights in self._parts()]).sum(0)

    @cached_property
    def variances(self) -> Tensor:
        """Of what is observed of each feature, not below a tiny share of their mean."""
        parts = [(weights * (rows - self.mean).square()).nansum(0) for rows, weights in self._parts()]
        return _not_tiny(torch.stack(parts).sum(0) / self._shares)

    @cached_property
    def fourth(self) -> Tensor:
        parts = [
            (weights * ((rows - self.mean).square() - self.variances).square()).nansum(0)
            for rows, weights in self._parts()
        ]
        return torch.stack(parts).sum(0) / self._shares

    @cached_property
    def matrix(self) -> Tensor:
        """The average over complete rows."""
        total = torch.zeros(self.k, self.k, dtype=torch.float64)
        for rows, weights in self._parts():
            deviations = rows - self.mean
            total += (weights * deviations).mT @ deviations
        total.diagonal().copy_(self.variances)
        return total

    def moments(self, shrinkage: float, target: Target) -> Moments:
        if self.k <= LARGEST_DENSE:
            return super().moments(shrinkage, target)
        scale = math.sqrt(1 - shrinkage) * self.weights.sqrt().unsqueeze(-1)
        added = shrinkage * self.target(target)
        # Nothing is added to features that vary, but for those that do not.
        least = (1 - shrinkage) * SMALLEST_VARIANCE * self.variances.mean()
        return RowMoments(scale * (self.rows.double() - self.mean), added.clamp(min=float(least)))


@dataclass(frozen=True)
class RunningSums(Summary):
    """Sums over complete rows that come in parts: enough for a fit, however many rows there are."""

    centre: Tensor
    """The mean of the first part, or zero where the mean is known to be: sums of deviations from it lose no digits."""
    seen: int
    """The number of rows."""
    weight: float
    squared_weights: float
    powers: Tensor
    """``sum_i w_i d_i^p`` for p from 1 to 4, of shape ``(4, k)``."""
    products: Tensor
    """``sum_i w_i d_i d_i^T``."""
    extremes: tuple[Tensor, Tensor]
    """The lowest and the highest value of each feature."""
    centered: bool

    @classmethod
    def empty(cls, rows: Tensor, weights: Tensor, centered: bool) -> RunningSums:
        """Return sums over no rows yet, for data that begin with these rows."""
        k = rows.shape[1]
        zero = torch.zeros(k, dtype=torch.float64)
        centre = zero if centered else (weights @ rows.double()) / weights.sum()
        extremes = torch.full_like(zero, math.inf), torch.full_like(zero, -math.inf)
        return cls(centre, 0, 0.0, 0.0, zero.repeat(4, 1), zero.repeat(k, 1), extremes, centered)

    def plus(self, rows: Tensor, weights: Tensor) -> RunningSums:
        """Return the sums over these rows and the earlier ones."""
        powers, products, (lowest, highest) = self.powers.clone(), self.products.clone(), self.extremes
        size = max(1, CHUNK // self.k)
        for part, each in zip(rows.split(size), weights.split(size), strict=True):
            deviations = part.double() - self.centre
            weighted = each.unsqueeze(-1) * deviations
            products.addmm_(weighted.mT, deviations)
            lowest, highest = lowest.minimum(part.amin(0)), highest.maximum(part.amax(0))
            for power in powers:
                power += weighted.sum(0)
                weighted.mul_(deviations)
        return replace(
            self,
            seen=self.seen + len(rows),
            weight=self.weight + float(weights.sum()),
            squared_weights=self.squared_weights + float(weights.square().sum()),
            powers=powers,
            products=products,
            extremes=(lowest, highest),
        )

    @property
    def k(self) -> int:
        return len(self.centre)

    @property
    def count(self) -> int:
        return self.seen

    @property
    def size(self) -> float:
        return self.weight**2 / self.squared_weights

    @property
    def _shift(self) -> Tensor:
        """The mean of the deviations."""
        return torch.zeros_like(self.centre) if self.centered else self.powers[0] / self.weight

    @property
    def mean(self) -> Tensor:
        return self.centre + self._shift

    @cached_property
    def variances(self) -> Tensor:
        return _not_tiny(self.powers[1] / self.weight - self._shift.square())

    @property
    def fourth(self) -> Tensor:
        shift, (_, second, third, fourth) = self._shift, self.powers / self.weight
        central = fourth - 4 * shift * third + 6 * shift**2 * second - 3 * shift**4
        return (central - self.variances.square()).clamp(min=0)

    @property
    def matrix(self) -> Tensor:
        matrix = self.products / self.weight - torch.outer(self._shift, self._shift)
        matrix.diagonal().copy_(self.variances)
        return matrix


def _not_tiny(variances: Tensor) -> Tensor:
    """Return the variances, with those below a tiny share of their mean raised to it."""
    scale = float(variances.mean()) or 1.0
    return variances.clamp(min=SMALLEST_VARIANCE * scale)


def shrunk(matrix: Tensor, shrinkage: float, target: Tensor) -> DenseMoments:
    """Return ``(1 - shrinkage) S + shrinkage Diag(target)``."""
    return DenseMoments((1 - shrinkage) * matrix + shrinkage * torch.diag(target))
