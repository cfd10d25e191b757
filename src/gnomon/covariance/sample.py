"""Weighted rows of data, and the second moments that fits ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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


@dataclass(frozen=True)
class Sample:
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

    @cached_property
    def complete(self) -> bool:
        return not bool(self.rows.isnan().any())

    @cached_property
    def observed(self) -> Tensor:
        return ~self.rows.isnan()

    @cached_property
    def size(self) -> float:
        """The number of samples; with unequal weights the effective one, ``1 / sum w^2``."""
        return 1 / float(self.weights.square().sum())

    # ------------------------------------------------------------------ first and second moments of what is observed
    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows in float64 and their weights, some at a time."""
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
        variances = torch.stack(parts).sum(0) / self._shares
        scale = float(variances.mean()) or 1.0
        return variances.clamp(min=SMALLEST_VARIANCE * scale)

    @cached_property
    def _fourth(self) -> Tensor:
        """The average of ``((x - mean)^2 - variance)^2`` of each feature."""
        parts = [
            (weights * ((rows - self.mean).square() - self.variances).square()).nansum(0)
            for rows, weights in self._parts()
        ]
        return torch.stack(parts).sum(0) / self._shares

    def target(self, kind: Target) -> Tensor:
        """The diagonal that the moments are shrunk towards.

        ``"identity"`` is the mean variance for every feature. ``"diagonal"`` are the features' own variances v,
        themselves shrunk towards their mean m by the share ``sum Var(v_i) / sum (v_i - m)^2``, at most 1, that
        minimizes the expected squared error (Opgen-Rhein and Strimmer 2007): where all are equal but for noise they
        become so, and where the units differ they hardly change.
        """
        common = self.variances.mean()
        if kind == "identity":
            return common.expand(self.k)
        noise = float(self._fourth.sum()) / max(self.size - 1, 1)
        spread = float((self.variances - common).square().sum())
        share = 1.0 if spread <= noise else noise / spread
        return (1 - share) * self.variances + share * common

    @cached_property
    def matrix(self) -> Tensor:
        """``sum_i w_i (x_i - mean) (x_i - mean)^T`` of complete rows."""
        total = torch.zeros(self.k, self.k, dtype=torch.float64)
        for rows, weights in self._parts():
            deviations = rows - self.mean
            total += (weights * deviations).mT @ deviations
        total.diagonal().copy_(self.variances)
        return total

    def moments(self, shrinkage: float, target: Target) -> Moments:
        """``(1 - shrinkage) S + shrinkage Diag(target)``."""
        if self.k <= LARGEST_DENSE:
            return shrunk(self.matrix, shrinkage, self.target(target))
        scale = math.sqrt(1 - shrinkage) * self.weights.sqrt().unsqueeze(-1)
        added = shrinkage * self.target(target)
        # Nothing is added to features that vary, but for those that do not.
        least = (1 - shrinkage) * SMALLEST_VARIANCE * self.variances.mean()
        return RowMoments(scale * (self.rows.double() - self.mean), added.clamp(min=float(least)))


def shrunk(matrix: Tensor, shrinkage: float, target: Tensor) -> DenseMoments:
    """``(1 - shrinkage) S + shrinkage Diag(target)``."""
    return DenseMoments((1 - shrinkage) * matrix + shrinkage * torch.diag(target))
