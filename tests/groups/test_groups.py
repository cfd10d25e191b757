"""Every structure is a group, at the cost it promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon import groups as g
from gnomon.testing import check_group, check_storage, random_algebra, random_element
from support.marks import slow_where
from support.structures import SMALL_GROUPS

BRIEF = (g.Dense, g.Triangular, g.Diagonal)
"""Structures of one part; the suite takes a second or more for each of the others."""


@pytest.mark.parametrize("group", slow_where(SMALL_GROUPS, lambda group: not isinstance(group, BRIEF)), ids=repr)
def test_conformance(group):
    check_group(group)


def _leaves():
    size = st.integers(1, 3)
    return st.one_of(
        st.builds(g.Dense, size),
        st.builds(g.Triangular, size, st.booleans()),
        st.builds(g.Diagonal, size),
        st.builds(g.Toeplitz, size, st.booleans()),
        st.builds(g.BlockDiagonal, st.integers(1, 4), size),
        st.builds(g.Arrow, st.integers(2, 4)),
    )


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(_leaves(), min_size=2, max_size=3), st.booleans(), st.integers(0, 2**16))
def test_random_compositions_conform(parts, upper, seed):
    check_group(g.BlockTriangular(parts, upper), batch_shape=(2, 1), seed=seed)


@pytest.mark.parametrize(
    "group",
    [
        g.Diagonal(200_000),
        g.BlockDiagonal(200_000, 3),
        g.Arrow(200_000, rank=3),
        pytest.param(g.Heisenberg(200_000, 3, 2), marks=pytest.mark.slow),
        pytest.param(g.Toeplitz(200_000), marks=pytest.mark.slow),
        g.BlockTriangular((g.Diagonal(100_000), g.Dense(2), g.Toeplitz(3)), upper=True),
        g.Kronecker(g.Arrow(500), g.Diagonal(400)),
    ],
    ids=repr,
)
def test_no_operation_of_a_sparse_structure_is_dense(group):
    """One k x k matrix would need 320 GB here."""
    a = random_element(group)
    n = random_algebra(group, size=0.1)
    x = torch.randn(2, group.k, dtype=torch.float64)
    for order in (1, 2, None):
        a = group.move(a, n, order)
    group.matvec(a, x), group.rmatvec(a, x), group.logabsdet(a), group.squared_norm(a)
    torch.testing.assert_close(group.solve(a, group.matvec(a, x)), x)
    torch.testing.assert_close(group.rsolve(a, group.rmatvec(a, x)), x)
    group.gram(a, x), group.pullback(a, n), group.pullback(a, n, left=True), group.bracket(n, n)
    group.ldiv(a, a), group.unscale(group.scale(n)), group.from_diagonal(torch.ones(group.k))


def test_triangular_products_of_any_size():
    for k in (1, 63, 65, 150):
        for upper in (False, True):
            group = g.Triangular(k, upper)
            a, b = random_element(group), random_element(group)
            torch.testing.assert_close(group.to_dense(group.mul(a, b)), group.to_dense(a) @ group.to_dense(b))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_toeplitz_solves_keep_the_precision(dtype, tolerance):
    """A slowly decaying inverse, (1 - 0.95 z)^-2, against substitution in float64."""
    group = g.Toeplitz(512)
    a = torch.zeros(512, dtype=dtype)
    a[:3] = torch.tensor([1.0, -1.9, 0.9025], dtype=dtype)
    x = torch.randn(512, dtype=dtype)
    dense = group.to_dense((a.double(),))
    wanted = torch.linalg.solve_triangular(dense, x.double().unsqueeze(-1), upper=False).squeeze(-1)
    error = (group.solve((a,), x).double() - wanted).norm() / wanted.norm()
    assert error < tolerance


def test_exponentials_of_a_batch_do_not_spoil_each_other():
    for group in (g.Dense(4), g.Arrow(4), g.Toeplitz(4)):
        n = random_algebra(group, (2,), size=0.1, dtype=torch.float32)
        large = tuple(torch.stack([block[0], -500 * block[1].abs()]) for block in n)
        together = group.to_dense(group.exp(large))[0]
        alone = group.to_dense(group.exp(tuple(block[0] for block in n)))
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


def test_degrees_of_freedom():
    assert g.Dense(5).dim == g.Triangular(5).dim == g.Triangular(5).numel == 15
    assert g.Dense(5).numel == 25
    assert g.Arrow(10).dim == 19
    assert g.Arrow(10).numel == 19
    assert g.Heisenberg(10, 2, 3).dim == 3 + 6 + 5 + 2 * 8 + 5 * 3
    assert g.Kronecker(g.Dense(2), g.Dense(3)).dim == 3 + 6 - 1


@pytest.mark.parametrize("group", [s for s in SMALL_GROUPS if not isinstance(s, g.Affine)], ids=repr)
def test_scalar_multiples_of_the_identity_are_in_every_structure(group):
    twice = group.from_diagonal(torch.full((group.k,), 2.0))
    torch.testing.assert_close(group.to_dense(twice), 2 * torch.eye(group.k))


def test_groups_are_values():
    assert g.Arrow(5) == g.Arrow(5, rank=1) != g.Arrow(6)
    assert g.Triangular(3) != g.Triangular(3, upper=True)
    assert len({g.Dense(3), g.Dense(3), g.Diagonal(3)}) == 2
    assert repr(g.Kronecker(g.Dense(2), g.Arrow(3))) == "Kronecker(Dense(2), Arrow(3, rank=1))"


def test_gradients_pass_through_elements():
    group = g.Heisenberg(5, 1, 1)
    a = tuple(b.requires_grad_() for b in random_element(group))
    x = torch.randn(5, dtype=torch.float64)

    def loss(*blocks):
        return group.solve(blocks, group.rmatvec(group.mul(blocks, blocks), x)).sum() + group.logabsdet(blocks)

    assert torch.autograd.gradcheck(loss, a)


def test_storage_check_runs_on_its_own():
    check_storage(g.Dense(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: g.Dense(0), "k must be a positive integer, got 0"),
        (lambda: g.Diagonal(2.0), "k must be a positive integer, got 2.0"),
        (lambda: g.BlockDiagonal(4, -1), "block must be a positive integer, got -1"),
        (lambda: g.Arrow(4, rank=4), r"rank must be below k = 4, got 4; the full manifold is Dense\(4\)"),
        (lambda: g.Heisenberg(4, 2, 2), r"head \+ tail must be below k = 4"),
        (lambda: g.BlockTriangular((g.Dense(2),)), "at least two groups"),
        (lambda: g.BlockTriangular((2, 3)), r"for a plain size use Dense\(2\)"),
        (lambda: g.BlockTriangular((g.Dense(2), g.Kronecker(g.Dense(2), g.Dense(2)))), "inside the Kronecker factors"),
        (lambda: g.Kronecker(g.Dense(2), 3), r"right must be a group, got 3; for a plain size use Dense\(3\)"),
        (lambda: g.Dense(3).exp(g.Dense(3).identity(), 3), "order must be 1, 2 or None"),
        (lambda: g.Dense(3).matvec(g.Dense(3).identity(), torch.ones(4)), "vectors of length 3"),
        (lambda: g.Dense(3).matvec(g.Dense(3).identity((2,)), torch.ones(5, 3)), r"batch shape \(2,\)"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()
