"""Statistics of a batch: rows, their second moment as a matrix, or its projection by a factor; each in a unit."""

import itertools

import pytest
import torch

from gnomon import groups
from gnomon.linalg import align
from gnomon.optim.kronecker.factor_update import curvature
from gnomon.optim.kronecker.statistics import (
    MatrixMoment,
    ProjectedMoment,
    RowMoment,
    Statistics,
    mean_moments,
    moment,
    statistics_of,
    total,
)
from gnomon.testing import random_element
from support.factors import form_of, pair_of, tangents
from support.matrices import F64, all_close, close

UNITS = torch.tensor([4.0, 0.125], dtype=F64)


def as_moment(kind, form, a, rows):
    """The moment of rows as one of the given kind, in other units than it would have."""
    rows = rows / align(UNITS, rows)
    if kind is RowMoment:
        return RowMoment(rows, UNITS)
    if kind is MatrixMoment:
        return MatrixMoment(rows.mT @ rows, UNITS)
    return ProjectedMoment(form.project_rows(a, rows), rows.square().sum((-2, -1)), UNITS)


def kinds_for(group):
    """Moments of a dense factor are never projected, those of a sparse one never a matrix."""
    if isinstance(group, groups.Dense):
        return RowMoment, MatrixMoment
    kinds = RowMoment, ProjectedMoment
    return (*kinds, MatrixMoment) if isinstance(group, groups.Triangular) else kinds


def side_by_side(left, right, n):
    k, c = random_element(left, (2,)), random_element(right, (2,))
    return k, c, torch.randn(2, n, left.k, dtype=F64), torch.randn(2, n, right.k, dtype=F64) / n


def same_curvature(pair, k, c, one, other, limit=float("inf")):
    seen = [curvature(pair, k, c, s) for s in (one, other)]
    close(seen[0].absolute_mean, seen[1].absolute_mean)
    level = 3 * torch.ones_like(seen[0].absolute_mean)
    absolute, own, given = (
        [s.absolute() for s in seen],
        [s.relative_to() for s in seen],
        [s.relative_to(level) for s in seen],
    )
    for ours, theirs in (absolute, own, given):
        for a, b in zip(*(tangents(pair, k, c, s, 0.1, limit) for s in (ours, theirs)), strict=True):
            all_close(a, b)


PAIRS = [
    (groups.Dense(5), groups.Dense(4)),
    (groups.Triangular(5), groups.Triangular(4, upper=True)),
    (groups.Dense(5), groups.Triangular(4)),
]
WITH_ARROW = [*PAIRS, (groups.Arrow(5), groups.Dense(4))]


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize(("left", "right"), WITH_ARROW, ids=repr)
def test_forms_of_the_same_rows(left, right, n):
    pair = pair_of(left, right)
    k, c, x, g = side_by_side(left, right, n)
    one = torch.ones(2, dtype=F64)
    plain = Statistics(RowMoment(x, one), RowMoment(g, one), n, 7)
    for inputs, outputs in itertools.product(kinds_for(left), kinds_for(right)):
        moments = as_moment(inputs, pair.left, k, x), as_moment(outputs, pair.right, c, g)
        other = Statistics(*moments, n, 7)
        same_curvature(pair, k, c, plain, other)
        same_curvature(pair, k, c, plain, other, limit=0.2)
    same_curvature(pair, k, c, plain, statistics_of(pair, (k, c), x, g, terms=7))


def test_the_form_that_is_stored():
    rows = lambda n: torch.randn(1, n, 5)  # noqa: E731
    for group in (groups.Dense(5), groups.Triangular(5)):
        a = group.identity((1,))
        found = [type(moment(form_of(group), a, rows(n))) for n in (1, 5, 6)]
        assert found == [RowMoment, RowMoment, MatrixMoment]
    for group in (groups.Arrow(5), groups.Diagonal(5), groups.Toeplitz(5)):
        assert isinstance(moment(form_of(group), group.identity((1,)), rows(3)), ProjectedMoment)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("group", [groups.Dense(5), groups.Triangular(5), groups.Arrow(5)], ids=repr)
def test_the_unit_of_rows_at_any_scale(group, scale):
    """A power of two for each block; what is stored is of order one, also where squares overflow or vanish."""
    for n in (3, 12):
        rows = torch.randn(2, n, 5) * torch.tensor([1.0, 1e-3]).view(2, 1, 1) * scale
        found = moment(form_of(group), group.identity((2,)), rows)
        peak = rows.abs().amax((1, 2))
        assert ((found.unit >= peak) & (found.unit <= 2 * peak)).all()
        assert (torch.frexp(found.unit)[0] == 0.5).all()
        energy = found.energy.double() * found.unit.double().square()
        torch.testing.assert_close(energy, rows.double().square().sum((1, 2)), rtol=1e-5, atol=0)
        assert ((found.energy >= 0.25) & (found.energy <= 5 * n)).all()


@pytest.mark.parametrize("cuts", [(2, 1), (4, 4), (2, 9), (9, 2), (9, 8)], ids=str)
@pytest.mark.parametrize(("left", "right"), WITH_ARROW, ids=repr)
def test_sums_of_batches_in_mixed_forms(left, right, cuts):
    """Few rows stay rows, join those of others, or are added to a matrix; the batches have different units."""
    pair = pair_of(left, right)
    k, c, x, g = side_by_side(left, right, sum(cuts))
    x[:, : cuts[0]] *= 100
    parts = [
        statistics_of(pair, (k, c), a, b, terms=n)
        for n, a, b in zip(cuts, x.split(list(cuts), 1), g.split(list(cuts), 1), strict=True)
    ]
    assert not torch.equal(parts[0].inputs.unit, parts[1].inputs.unit)
    whole, one = total(pair, (k, c), *parts), torch.ones(2, dtype=F64)
    plain = Statistics(RowMoment(x, one), RowMoment(g, one), sum(cuts), sum(cuts))
    same_curvature(pair, k, c, whole, plain)
    means = mean_moments(pair, (k, c), whole)
    same_curvature(pair, k, c, Statistics(*means, 1, 1), whole)
    assert not any(isinstance(m, RowMoment) for m in means)


def test_means_without_factors():
    """As KFAC takes them."""
    pair = pair_of(groups.Dense(5), groups.Diagonal(4))
    x, g = torch.randn(1, 3, 5, dtype=F64), torch.randn(1, 3, 4, dtype=F64)
    inputs, outputs = mean_moments(pair, (None, None), statistics_of(pair, (None, None), x, g, terms=2))
    close(inputs.tensors[0] * inputs.unit**2, x.mT @ x / 3)
    close(outputs.tensors[0] * outputs.unit**2, 2 * g.square().sum(1))
