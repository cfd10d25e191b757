"""Statistics of a batch: rows, their covariance, or what a factor sees of them."""

import itertools

import pytest
import torch

from gnomon import groups
from gnomon.optim.factors import Covariance, KroneckerFactors, Rows, Seen, Statistics, moment
from gnomon.testing import random_element
from support.matrices import F64, all_close, close


def in_form(form, group, a, rows):
    if form is Rows:
        return Rows(rows)
    return Covariance(rows.mT @ rows) if form is Covariance else Seen(group.gram(a, rows), rows.square().sum((-2, -1)))


def side_by_side(left, right, n):
    k, c = random_element(left, (2,)), random_element(right, (2,))
    return k, c, torch.randn(2, n, left.k, dtype=F64), torch.randn(2, n, right.k, dtype=F64) / n


def same_curvature(factors, k, c, one, other, limit=float("inf")):
    seen = [factors.curvature(k, c, s) for s in (one, other)]
    close(seen[0].mean, seen[1].mean)
    level = torch.ones_like(seen[0].mean)
    for ours, theirs in (seen, [s.relative_to(s.mean) for s in seen], [s.relative_to(3 * level) for s in seen]):
        for a, b in zip(*(factors.pressure(k, c, s, 0.1, limit) for s in (ours, theirs)), strict=True):
            all_close(a, b)


PAIRS = [
    (groups.Dense(5), groups.Dense(4)),
    (groups.Triangular(5), groups.Triangular(4, upper=True)),
    (groups.Dense(5), groups.Triangular(4)),
]


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize(("left", "right"), PAIRS, ids=repr)
def test_forms_of_the_same_rows(left, right, n):
    factors = KroneckerFactors(left, right)
    k, c, x, g = side_by_side(left, right, n)
    plain = Statistics(Rows(x), Rows(g), n, 7)
    for inputs, outputs in itertools.product((Rows, Covariance, Seen), repeat=2):
        other = Statistics(in_form(inputs, left, k, x), in_form(outputs, right, c, g), n, 7)
        same_curvature(factors, k, c, plain, other)
        same_curvature(factors, k, c, plain, other, limit=0.2)
    same_curvature(factors, k, c, plain, factors.statistics(k, c, x, g, terms=7))


def test_the_form_that_is_kept():
    rows = lambda n: torch.randn(1, n, 5)  # noqa: E731
    for group in (groups.Dense(5), groups.Triangular(5)):
        a = group.identity((1,))
        assert [type(moment(group, a, rows(n))) for n in (1, 5, 6)] == [Rows, Rows, Covariance]
    for group in (groups.Arrow(5), groups.Diagonal(5), groups.Toeplitz(5)):
        assert isinstance(moment(group, group.identity((1,)), rows(3)), Seen)


@pytest.mark.parametrize("cuts", [(2, 1), (4, 4), (2, 9), (9, 2), (9, 8)], ids=str)
@pytest.mark.parametrize(("left", "right"), [*PAIRS, (groups.Arrow(5), groups.Dense(4))], ids=repr)
def test_sums_of_batches_in_mixed_forms(left, right, cuts):
    """Few rows stay rows, join those of others, or are added to a sum of squares."""
    factors = KroneckerFactors(left, right)
    k, c, x, g = side_by_side(left, right, sum(cuts))
    parts = [
        factors.statistics(k, c, a, b, terms=n)
        for n, a, b in zip(cuts, x.split(list(cuts), 1), g.split(list(cuts), 1), strict=True)
    ]
    whole = factors.total(k, c, *parts)
    same_curvature(factors, k, c, whole, Statistics(Rows(x), Rows(g), sum(cuts), sum(cuts)))
    mean = factors.normalized(k, c, whole)
    same_curvature(factors, k, c, mean, whole)
    for m in (mean.inputs, mean.outputs):
        assert not isinstance(m, Rows)


def test_means_without_factors():
    """As KFAC takes them."""
    factors = KroneckerFactors(groups.Dense(5), groups.Diagonal(4))
    x, g = torch.randn(1, 3, 5, dtype=F64), torch.randn(1, 3, 4, dtype=F64)
    mean = factors.normalized(None, None, factors.statistics(None, None, x, g, terms=2))
    close(mean.inputs.tensors[0], x.mT @ x / 3)
    close(mean.outputs.tensors[0], 2 * g.square().sum(1))
