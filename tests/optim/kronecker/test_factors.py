"""The Kronecker factors: the update of Fig. matDL_opt against its formula, structures, fixed point."""

from dataclasses import replace

import pytest
import torch

from gnomon import groups
from gnomon.optim.factors import Curvature, KroneckerFactors, Sight
from gnomon.testing import random_element

F64 = torch.float64


def setting(left, right, blocks=2, n=40):
    torch.manual_seed(0)
    factors = KroneckerFactors(left, right)
    k, c = random_element(left, (blocks,)), random_element(right, (blocks,))
    x = torch.randn(blocks, n, left.k, dtype=F64) @ torch.randn(left.k, left.k, dtype=F64)
    g = torch.randn(blocks, n, right.k, dtype=F64) @ torch.randn(right.k, right.k, dtype=F64) / n
    return factors, k, c, x, g


def test_dense_pressure_is_the_figure():
    """b1/(2d) ( tr(H_C) H_K + c^2 K^T K - d I ) at b1 = 1, and its twin, with non-symmetric factors."""
    factors, k, c, x, g = setting(groups.Dense(4), groups.Dense(3))
    in_k, in_c = factors.pressure(k, c, factors.curvature(k, c, factors.statistics(k, c, x, g, terms=40)), damping=0.1)
    K, C = k[0], c[0]
    mu_aa, mu_gg = x.mT @ x / 40, 40 * g.mT @ g
    H_K, H_C = K.mT @ mu_aa @ K, C.mT @ mu_gg @ C
    trace = lambda m: m.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]  # noqa: E731
    c2, k2 = 0.1 * trace(C.mT @ C), 0.1 * trace(K.mT @ K)
    wanted_k = (trace(H_C) * H_K + c2 * K.mT @ K - 3 * torch.eye(4, dtype=F64)) / 6
    wanted_c = (trace(H_K) * H_C + k2 * C.mT @ C - 4 * torch.eye(3, dtype=F64)) / 8
    torch.testing.assert_close(in_k[0], wanted_k)
    torch.testing.assert_close(in_c[0], wanted_c)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (groups.Triangular(5), groups.Dense(3)),
        (groups.Arrow(5, 2), groups.Heisenberg(6, 1, 2)),
        (groups.BlockDiagonal(5, 2), groups.Diagonal(4)),
        (groups.Toeplitz(5), groups.Toeplitz(4, upper=True)),
    ],
    ids=repr,
)
def test_structured_pressure_is_the_projection_of_the_dense_one(left, right):
    factors, k, c, x, g = setting(left, right)
    in_k, _ = factors.pressure(k, c, factors.curvature(k, c, factors.statistics(k, c, x, g, terms=40)), damping=0.1)
    dense = KroneckerFactors(groups.Dense(left.k), groups.Dense(right.k))
    K, C = (left.to_dense(k),), (right.to_dense(c),)
    full, _ = dense.pressure(K, C, dense.curvature(K, C, dense.statistics(K, C, x, g, terms=40)), damping=0.1)
    restricted = left.restrict(torch.eye(left.k, dtype=F64).expand_as(full[0]), full[0])
    wanted = tuple(4 * block for block in left.scale(left.scale(restricted)))
    for actual, expected in zip(in_k, wanted, strict=True):
        torch.testing.assert_close(actual, expected)


def test_parts_add_up_to_the_whole():
    factors, k, c, x, g = setting(groups.Arrow(5), groups.Dense(3))
    whole = factors.statistics(k, c, x, g, terms=40)
    parts = [factors.statistics(k, c, x[:, rows], g[:, rows], terms=20) for rows in (slice(0, 20), slice(20, 40))]
    seen = [factors.curvature(k, c, s) for s in (whole, factors.total(k, c, *parts))]
    pressures = [factors.pressure(k, c, curvature, damping=0.1) for curvature in seen]
    for a, b in zip(*pressures, strict=True):
        for actual, expected in zip(a, b, strict=True):
            torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(seen[0].mean, seen[1].mean)


def short_move(group, a, pressure):
    """A fifth of the pressure, and no further than a spectral norm of a fifth."""
    share = 0.2 / group.norm_bound(pressure).clamp(min=1).item()
    return group.move(a, tuple(-share * block for block in pressure), 2)


@pytest.mark.slow
def test_the_fixed_point():
    """tr(H_C)/d H_K + (c2/d) K^T K = I and its twin, reached by bounded steps."""
    left, right = groups.Dense(4), groups.Dense(3)
    factors, _, _, x, g = setting(left, right, blocks=1)
    k, c = left.identity((1,), dtype=F64), right.identity((1,), dtype=F64)
    for _ in range(600):
        in_k, in_c = factors.pressure(
            k, c, factors.curvature(k, c, factors.statistics(k, c, x, g, terms=40)), damping=1e-3
        )
        k, c = short_move(left, k, in_k), short_move(right, c, in_c)
    in_k, in_c = factors.pressure(k, c, factors.curvature(k, c, factors.statistics(k, c, x, g, terms=40)), damping=1e-3)
    assert in_k[0].abs().max() < 1e-8
    assert in_c[0].abs().max() < 1e-8


@pytest.mark.parametrize(("left", "right"), [(groups.Arrow(5), groups.Dense(3)), (groups.Dense(2), groups.Toeplitz(4))])
def test_preconditioning_is_the_product_of_both_sides(left, right):
    _, k, c, _, _ = setting(left, right)
    matrix = torch.randn(2, right.k, left.k, dtype=F64)
    K, C = left.to_dense(k), right.to_dense(c)
    torch.testing.assert_close(
        right.apply_squared(c, left.apply_squared(k, matrix).mT).mT, C @ C.mT @ matrix @ K @ K.mT
    )


@pytest.mark.slow
def test_the_fixed_point_of_gradient_curvature():
    """The two equations of the nearest Kronecker product, exactly, for the mean over a set of gradients."""
    torch.manual_seed(0)
    left, right = groups.Dense(4), groups.Dense(3)
    factors = KroneckerFactors(left, right)
    gradients = torch.randn(50, 3, 3, dtype=F64) @ torch.randn(50, 3, 4, dtype=F64) @ torch.randn(4, 4, dtype=F64)
    k, c = left.identity(dtype=F64), right.identity(dtype=F64)

    def mean_pressure():
        seen = factors.gradient_curvature(k, c, gradients)
        sides = [replace(side, seen=(side.seen[0].mean(0),)) for side in (seen.in_k, seen.in_c)]
        mean = Curvature(*sides, seen.mean.mean())
        return factors.pressure(k, c, mean, damping=0.0)

    for _ in range(800):
        in_k, in_c = mean_pressure()
        k, c = short_move(left, k, in_k), short_move(right, c, in_c)
    S_a, S_b = torch.linalg.inv(c[0] @ c[0].T), torch.linalg.inv(k[0] @ k[0].T)
    torch.testing.assert_close(S_a, (gradients @ torch.linalg.inv(S_b) @ gradients.mT).mean(0) / 4)
    torch.testing.assert_close(S_b, (gradients.mT @ torch.linalg.inv(S_a) @ gradients).mean(0) / 3)


def test_indices_are_unit_vectors():
    left, right = groups.Diagonal(5), groups.Dense(3)
    factors, k, c, _, g = setting(left, right, blocks=1)
    indices = torch.randint(6, (1, 40))  # 5 stands for the zero vector
    rows = torch.nn.functional.one_hot(indices, 6)[..., :5].to(F64)
    ours = factors.curvature(k, c, factors.statistics(k, c, indices, g, terms=40))
    theirs = factors.curvature(k, c, factors.statistics(k, c, rows, g, terms=40))
    torch.testing.assert_close(ours.mean, theirs.mean)
    for one, other in zip(factors.pressure(k, c, ours, 0.1), factors.pressure(k, c, theirs, 0.1), strict=True):
        torch.testing.assert_close(one[0], other[0])


@pytest.mark.parametrize(
    "group", [groups.Dense(6), groups.Triangular(6), groups.Heisenberg(6, 2, 2)], ids=["d", "t", "h"]
)
def test_a_limit_on_the_norm(group):
    torch.manual_seed(0)
    factors = KroneckerFactors(group, group)
    a = group.identity((1,), dtype=F64)
    rows = torch.randn(1, 2, 6, dtype=F64)
    one = torch.ones(1, dtype=F64)
    sights = [Sight(group.restrict(r, r), None, one, one) for r in (1e3 * rows, rows)]
    seen = Curvature(*sights, one)
    limited, short = factors.pressure(a, a, seen, damping=0.0, limit=50.0)
    whole, same = factors.pressure(a, a, seen, damping=0.0)
    assert torch.linalg.matrix_norm(group.to_dense(limited), 2).item() == pytest.approx(50.0, rel=0.1)
    share = limited[0].flatten()[0] / whole[0].flatten()[0]
    for one, other in zip(limited + short, tuple(share * block for block in whole) + same, strict=True):
        torch.testing.assert_close(one, other)
