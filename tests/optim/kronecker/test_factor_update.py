"""The update of Kronecker factors: Fig. matDL_opt against its formula, structures, fixed points."""

import math

import pytest
import torch

from gnomon import groups
from gnomon.linalg import align
from gnomon.optim.kronecker.factor_forms import Projection
from gnomon.optim.kronecker.factor_update import Curvature, UpdateSettings, curvature, gradient_curvature, update
from gnomon.optim.kronecker.statistics import statistics_of, total
from gnomon.testing import random_element
from support.factors import pair_of, tangents

F64 = torch.float64


def setting(left, right, blocks=2, n=40):
    torch.manual_seed(0)
    pair = pair_of(left, right)
    k, c = random_element(left, (blocks,)), random_element(right, (blocks,))
    x = torch.randn(blocks, n, left.k, dtype=F64) @ torch.randn(left.k, left.k, dtype=F64)
    g = torch.randn(blocks, n, right.k, dtype=F64) @ torch.randn(right.k, right.k, dtype=F64) / n
    return pair, k, c, x, g


def tangents_of_rows(pair, k, c, x, g, damping, terms=40):
    seen = curvature(pair, k, c, statistics_of(pair, (k, c), x, g, terms))
    return tangents(pair, k, c, seen.absolute(), damping)


def test_dense_tangents_are_those_of_the_figure():
    """b1/(2d) ( tr(H_C) H_K + c^2 K^T K - d I ) at b1 = 1, and its twin, with non-symmetric factors."""
    pair, k, c, x, g = setting(groups.Dense(4), groups.Dense(3))
    m_k, m_c = tangents_of_rows(pair, k, c, x, g, damping=0.1)
    K, C = k[0], c[0]
    mu_aa, mu_gg = x.mT @ x / 40, 40 * g.mT @ g
    H_K, H_C = K.mT @ mu_aa @ K, C.mT @ mu_gg @ C
    trace = lambda m: m.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]  # noqa: E731
    c2, k2 = 0.1 * trace(C.mT @ C), 0.1 * trace(K.mT @ K)
    wanted_k = (trace(H_C) * H_K + c2 * K.mT @ K - 3 * torch.eye(4, dtype=F64)) / 6
    wanted_c = (trace(H_K) * H_C + k2 * C.mT @ C - 4 * torch.eye(3, dtype=F64)) / 8
    torch.testing.assert_close(m_k[0], wanted_k)
    torch.testing.assert_close(m_c[0], wanted_c)


STRUCTURED = [
    (groups.Triangular(5), groups.Dense(3)),
    (groups.Arrow(5, 2), groups.Heisenberg(6, 1, 2)),
    (groups.BlockDiagonal(5, 2), groups.Diagonal(4)),
    (groups.Toeplitz(5), groups.Toeplitz(4, upper=True)),
]


@pytest.mark.parametrize(("left", "right"), STRUCTURED, ids=repr)
def test_structured_tangents_are_projections_of_dense_ones(left, right):
    pair, k, c, x, g = setting(left, right)
    found, _ = tangents_of_rows(pair, k, c, x, g, damping=0.1)
    dense = pair_of(groups.Dense(left.k), groups.Dense(right.k))
    full, _ = tangents_of_rows(dense, (left.to_dense(k),), (right.to_dense(c),), x, g, damping=0.1)
    restricted = left.restrict(torch.eye(left.k, dtype=F64).expand_as(full[0]), full[0])
    wanted = tuple(4 * block for block in left.scale(left.scale(restricted)))
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("left", "right"), [(groups.Dense(4), groups.Dense(3)), *STRUCTURED], ids=repr)
def test_an_update_moves_factors_along_their_tangents(left, right):
    """The factors stay in balance, so that no power of two goes from one to the other."""
    pair, k, c, x, g = setting(left, right)
    settings = UpdateSettings(a1=0.0, b1=0.1, damping=0.1, bound=math.inf, order=1, inside=True)
    statistics = statistics_of(pair, (k, c), x, g, 40)
    new = update(pair, settings, k, c, (None, None), None, statistics, torch.tensor(True), 2)
    wanted = tangents(pair, k, c, curvature(pair, k, c, statistics).absolute(), 0.1, rate=0.1)
    assert new.finite.tolist() == [True, True]
    for form, a, m, found in zip(pair, (k, c), wanted, (new.k, new.c), strict=True):
        K, M = form.to_dense(a), form.to_dense(m)
        torch.testing.assert_close(form.to_dense(form.unpack(found)), K - K @ M)


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    pair, k, c, x, g = setting(groups.Arrow(5), groups.Dense(3))
    whole = statistics_of(pair, (k, c), x, g, terms=40)
    parts = [statistics_of(pair, (k, c), x[:, i], g[:, i], terms=20) for i in (slice(0, 20), slice(20, 40))]
    seen = [curvature(pair, k, c, s) for s in (whole, total(pair, (k, c), *parts))]
    for a, b in zip(*(tangents(pair, k, c, s.absolute(), damping=0.1) for s in seen), strict=True):
        for actual, expected in zip(a, b, strict=True):
            torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(seen[0].absolute_mean, seen[1].absolute_mean)


def short_move(form, group, a, tangent):
    """A fifth of the tangent, and no further than a spectral norm of a fifth."""
    share = 0.2 / group.norm_bound(tangent).clamp(min=1).item()
    return form.moved(a, tangent, 2, -share)


@pytest.mark.slow
def test_the_fixed_point():
    """tr(H_C)/d H_K + (c2/d) K^T K = I and its twin, reached by bounded steps."""
    left, right = groups.Dense(4), groups.Dense(3)
    pair, _, _, x, g = setting(left, right, blocks=1)
    k, c = left.identity((1,), dtype=F64), right.identity((1,), dtype=F64)
    for _ in range(600):
        m_k, m_c = tangents_of_rows(pair, k, c, x, g, damping=1e-3)
        k, c = short_move(pair.left, left, k, m_k), short_move(pair.right, right, c, m_c)
    m_k, m_c = tangents_of_rows(pair, k, c, x, g, damping=1e-3)
    assert m_k[0].abs().max() < 1e-8
    assert m_c[0].abs().max() < 1e-8


@pytest.mark.parametrize(("left", "right"), [(groups.Arrow(5), groups.Dense(3)), (groups.Dense(2), groups.Toeplitz(4))])
def test_preconditioning_is_the_product_of_both_sides(left, right):
    pair, k, c, _, _ = setting(left, right)
    matrix = torch.randn(2, right.k, left.k, dtype=F64)
    K, C = left.to_dense(k), right.to_dense(c)
    wanted = C @ C.mT @ matrix @ K @ K.mT

    def apply(form, a, rows):
        return form.apply_square(form.square(a), rows)

    torch.testing.assert_close(apply(pair.right, c, apply(pair.left, k, matrix).mT).mT, wanted)


@pytest.mark.slow
def test_the_fixed_point_of_gradient_curvature():
    """The two equations of the nearest Kronecker product, exactly, for the mean over a set of gradients."""
    torch.manual_seed(0)
    left, right = groups.Dense(4), groups.Dense(3)
    pair = pair_of(left, right)
    gradients = torch.randn(50, 3, 3, dtype=F64) @ torch.randn(50, 3, 4, dtype=F64) @ torch.randn(4, 4, dtype=F64)
    k, c = left.identity(dtype=F64), right.identity(dtype=F64)

    def mean_tangents():
        seen = gradient_curvature(pair, k, c, gradients)
        sides = [
            Projection((side.trace * seen.unit).mean(), ((side.covector[0] * align(seen.unit, gradients)).mean(0),))
            for side in (seen.in_k, seen.in_c)
        ]
        one = torch.ones((), dtype=F64)
        mean = Curvature(*sides, seen.weight_k, seen.weight_c, seen.absolute_mean.mean(), one)
        return tangents(pair, k, c, mean, damping=0.0)

    for _ in range(800):
        m_k, m_c = mean_tangents()
        k, c = short_move(pair.left, left, k, m_k), short_move(pair.right, right, c, m_c)
    S_a, S_b = torch.linalg.inv(c[0] @ c[0].T), torch.linalg.inv(k[0] @ k[0].T)
    torch.testing.assert_close(S_a, (gradients @ torch.linalg.inv(S_b) @ gradients.mT).mean(0) / 4)
    torch.testing.assert_close(S_b, (gradients.mT @ torch.linalg.inv(S_a) @ gradients).mean(0) / 3)


def test_indices_are_unit_vectors():
    pair, k, c, _, g = setting(groups.Diagonal(5), groups.Dense(3), blocks=1)
    indices = torch.randint(6, (1, 40))  # 5 stands for the zero vector
    rows = torch.nn.functional.one_hot(indices, 6)[..., :5].to(F64)
    ours, theirs = (curvature(pair, k, c, statistics_of(pair, (k, c), x, g, terms=40)) for x in (indices, rows))
    torch.testing.assert_close(ours.absolute_mean, theirs.absolute_mean)
    both = (tangents(pair, k, c, seen.absolute(), 0.1) for seen in (ours, theirs))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one[0], other[0])


@pytest.mark.parametrize(
    "group", [groups.Dense(6), groups.Triangular(6), groups.Heisenberg(6, 2, 2)], ids=["d", "t", "h"]
)
def test_a_limit_on_the_norm(group):
    torch.manual_seed(0)
    pair = pair_of(group, group)
    a = group.identity((1,), dtype=F64)
    rows = torch.randn(1, 2, 6, dtype=F64)
    one = torch.ones(1, dtype=F64)
    sides = [Projection(one, group.restrict(r, r)) for r in (1e3 * rows, rows)]
    seen = Curvature(*sides, one, one, one, one)
    limited, short = tangents(pair, a, a, seen, damping=0.0, limit=50.0)
    whole, same = tangents(pair, a, a, seen, damping=0.0)
    assert torch.linalg.matrix_norm(group.to_dense(limited), 2).item() == pytest.approx(50.0, rel=0.1)
    share = limited[0].flatten()[0] / whole[0].flatten()[0]
    for one, other in zip(limited + short, tuple(share * block for block in whole) + same, strict=True):
        torch.testing.assert_close(one, other)
