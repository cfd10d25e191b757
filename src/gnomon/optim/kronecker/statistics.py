"""Second moments of the rows of a batch, in the form that is cheapest to store and to sum.

The moments of a layer's inputs x and output gradients g are ``x^T x`` and ``g^T g``, sums over the rows. Rows are
stored in a unit of their own, a power of two near their largest entry, so that no square and no product of squares
overflows or vanishes, whatever the scale of the inputs and of the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...groups import Element
from ...linalg import align, power_of_two, promoted, symmetric_product


class MomentForm(Protocol):
    """What a factor says about the moments that it is updated from."""

    @property
    def size(self) -> int: ...

    @property
    def keeps_matrix(self) -> bool:
        """Whether a moment of many rows is stored as the k x k matrix; otherwise it is projected when the rows come."""

    def project_rows(self, a: Element | None, rows: Tensor) -> Element:
        """Return ``<E_j, A^T x^T x A>`` for every generator of the structure; A is I where it is None."""


# ---------------------------------------------------------------------- moments


class Moment(ABC):
    """A sum of squares ``x^T x`` over rows, for each block of a layer."""

    unit: Tensor
    """The unit of the rows of each block: the moment is ``unit^2`` times what is stored."""

    @property
    @abstractmethod
    def energy(self) -> Tensor:
        """The trace of the moment of each block."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors, each with the blocks along the first dimension."""

    @abstractmethod
    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> Moment:
        """Return a moment of the same form from other tensors."""

    def in_unit(self, unit: Tensor) -> Moment:
        """Return the same moment in another unit."""
        factor = (self.unit / unit).square()
        return self.of([t * align(factor, t) for t in self.tensors], unit)


@dataclass(frozen=True)
class RowMoment(Moment):
    """The rows themselves, ``(blocks, n, k)``, where they are few."""

    rows: Tensor
    unit: Tensor

    @property
    def energy(self) -> Tensor:
        return squared_length(self.rows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,)

    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> RowMoment:
        return RowMoment(tensors[0], unit)

    def in_unit(self, unit: Tensor) -> RowMoment:
        return RowMoment(self.rows * align(self.unit / unit, self.rows), unit)


@dataclass(frozen=True)
class MatrixMoment(Moment):
    """The matrix ``x^T x``, ``(blocks, k, k)``, where rows are many."""

    matrix: Tensor
    unit: Tensor

    @property
    def energy(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).sum(-1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> MatrixMoment:
        return MatrixMoment(tensors[0], unit)


@dataclass(frozen=True)
class ProjectedMoment(Moment):
    """``<E_j, A^T x^T x A>`` for the factor A at the time when the rows came; A has not moved since."""

    covector: Element
    total: Tensor
    """The trace of ``x^T x``."""
    unit: Tensor

    @property
    def energy(self) -> Tensor:
        return self.total

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.covector, self.total)

    def of(self, tensors: Sequence[Tensor], unit: Tensor) -> ProjectedMoment:
        return ProjectedMoment(tuple(tensors[:-1]), tensors[-1], unit)


def squared_length(rows: Tensor) -> Tensor:
    """Return the sum of the squares of all entries, for each block."""
    return torch.linalg.vector_norm(rows, dim=(-2, -1)).square()


def in_units(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of each block in a unit of their own, and that unit."""
    if rows[0].numel() == 0:
        return rows, rows.new_ones(len(rows))
    flat = rows.flatten(1)
    unit = power_of_two(torch.maximum(flat.amax(1), -flat.amin(1)))  # aminmax along a dimension takes ten times as long
    return rows / align(unit, rows), unit


def moment(form: MomentForm, a: Element | None, rows: Tensor) -> Moment:
    """Return the moment of rows ``(blocks, n, k)``, or of unit vectors given by their indices, ``(blocks, n)``."""
    if not rows.is_floating_point():
        return _index_moment(form, a, rows)
    return _cheapest_moment(form, a, *in_units(rows))


def _cheapest_moment(form: MomentForm, a: Element | None, rows: Tensor, unit: Tensor) -> Moment:
    """Return the form of a moment that makes its projection cheapest; few rows stay as they are.

    ``A^T (x^T x + damping I) A`` takes ``2 n k^2 + k^3`` multiplications from rows, as ``(x A)^T (x A) + damping A^T
    A``, and ``n k^2 + 2 k^3`` from their matrix. The results agree to rounding.
    """
    if form.keeps_matrix and rows.shape[-2] <= form.size:
        return RowMoment(rows, unit)
    return summed_moment(form, a, rows, unit)


def summed_moment(form: MomentForm, a: Element | None, rows: Tensor, unit: Tensor) -> Moment:
    """Return the moment of rows in a form that sums over batches and ranks."""
    if form.keeps_matrix:
        return MatrixMoment(symmetric_product(rows.mT, rows), unit)
    return ProjectedMoment(form.project_rows(a, rows), squared_length(rows), unit)


def _index_moment(form: MomentForm, a: Element | None, indices: Tensor) -> Moment:
    """Return the moment of unit vectors, for a diagonal factor.

    An index equal to the size stands for the zero vector.
    """
    dtype = promoted(torch.get_default_dtype(), torch.float32) if a is None else a[0].dtype
    counts = torch.zeros(indices.shape[0], form.size + 1, dtype=dtype, device=indices.device)
    counts = counts.scatter_add_(1, indices, torch.ones_like(indices, dtype=dtype))[:, :-1]
    covector = counts if a is None else a[0].square() * counts
    return ProjectedMoment((covector,), counts.sum(-1), counts.new_ones(len(counts)))


def summable(form: MomentForm, a: Element | None, m: Moment) -> Moment:
    """Return a moment in a form that sums over batches and ranks."""
    return summed_moment(form, a, m.rows, m.unit) if isinstance(m, RowMoment) else m


def _sum(form: MomentForm, a: Element | None, one: Moment, other: Moment) -> Moment:
    unit = torch.maximum(one.unit, other.unit)
    one, other = one.in_unit(unit), other.in_unit(unit)
    if isinstance(one, RowMoment) and isinstance(other, RowMoment):
        return _cheapest_moment(form, a, torch.cat([one.rows, other.rows], -2), unit)
    one, other = summable(form, a, one), summable(form, a, other)
    return one.of([s + t for s, t in zip(one.tensors, other.tensors, strict=True)], unit)


# ---------------------------------------------------------------------- statistics of a layer
Forms = tuple[MomentForm, MomentForm]
"""The forms of the input factor K and of the output factor C."""
Factors = tuple[Element | None, Element | None]
"""The factors through which rows are projected; None where a form stores moments as they are."""


@dataclass(frozen=True)
class Statistics:
    """The moments of a layer's inputs and output gradients over one or several batches."""

    inputs: Moment
    outputs: Moment
    rows: int
    """The number of input rows, over which their moment is averaged."""
    terms: int
    """The number of terms of the loss. Its gradients are those of a mean, so their squares count as many times."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Statistics of one kind can be joined."""
        shapes = tuple(t.shape for m in (self.inputs, self.outputs) for t in m.tensors)
        return type(self.inputs), type(self.outputs), shapes, self.rows, self.terms


def statistics_of(forms: Forms, factors: Factors, x: Tensor, g: Tensor, terms: int) -> Statistics:
    """Return the statistics of rows x, ``(blocks, n, p)`` or indices ``(blocks, n)``, and g, ``(blocks, n, d)``."""
    inputs, outputs = (moment(*side) for side in zip(forms, factors, (x, g), strict=True))
    return Statistics(inputs, outputs, x.shape[1], terms)


def total(forms: Forms, factors: Factors, one: Statistics, other: Statistics) -> Statistics:
    """Return the statistics of two batches together."""
    return Statistics(
        _sum(forms[0], factors[0], one.inputs, other.inputs),
        _sum(forms[1], factors[1], one.outputs, other.outputs),
        one.rows + other.rows,
        one.terms + other.terms,
    )


def mean_moments(forms: Forms, factors: Factors, s: Statistics) -> tuple[Moment, Moment]:
    """Return the means ``mu_AA`` and ``mu_GG``."""
    inputs, outputs = summable(forms[0], factors[0], s.inputs), summable(forms[1], factors[1], s.outputs)
    return (
        inputs.of([t / max(s.rows, 1) for t in inputs.tensors], inputs.unit),
        outputs.of([t * s.terms for t in outputs.tensors], outputs.unit),
    )


def joined(parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of several layers of one kind, block after block."""
    if len(parts) == 1:
        return parts[0]
    inputs, outputs = (
        moments[0].of(
            [torch.cat(tensors) for tensors in zip(*(m.tensors for m in moments), strict=True)],
            torch.cat([m.unit for m in moments]),
        )
        for moments in ([s.inputs for s in parts], [s.outputs for s in parts])
    )
    return replace(parts[0], inputs=inputs, outputs=outputs)
