"""Operations that a structure has in a shorter form than any group, and the defaults that they stand for."""

import functools

import pytest
import torch

from gnomon import groups
from gnomon.groups import Group
from gnomon.optim.kronecker.structures import NAMES
from gnomon.testing import random_algebra, random_element
from support.matrices import F64, all_close, close
from support.structures import SMALL_GROUPS


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("k", [1, 4, 33, 50])
def test_short_forms_of_dense_matrices(k):
    """Against those that any group has, for symmetric arguments."""
    group = groups.Dense(k)
    a = (torch.eye(k, dtype=F64) + torch.randn(2, k, k, dtype=F64) / k,)
    s = torch.randn(2, k, k, dtype=F64) / k
    s = s + s.mT
    close(group.trace((s,)), Group.trace(group, (s,)))
    close(group.squared_norm(a), Group.squared_norm(group, a))
    # metric_dual works in the memory of what it is given.
    all_close(group.metric_dual((s.clone(),)), Group.metric_dual(group, (s.clone(),)))
    rows = torch.randn(2, 3, k, dtype=F64)
    all_close(group.gram(a, rows), Group.gram(group, a, rows))
    close(group.squared(a)[0], a[0] @ a[0].mT)


@pytest.mark.parametrize("structure", NAMES)
def test_short_forms_of_structures(structure):
    """Against those that any group has, for covectors of symmetric matrices."""
    for k in (7, 40, 70):
        group = NAMES[structure](k)
        a = random_element(group)
        x = torch.randn(5, k, dtype=F64)
        fresh = functools.partial(group.gram, a, x)
        close(group.trace(fresh()), Group.trace(group, fresh()))
        close(group.squared_norm(a), Group.squared_norm(group, a))
        all_close(group.metric_dual(fresh()), Group.metric_dual(group, fresh()))


LINEAR = [group for group in SMALL_GROUPS if group.is_algebra]
"""Structures that are linear spaces of matrices, for which every default holds that has no further condition."""
HOLD_NUMBERS = [group for group in LINEAR if not isinstance(group, groups.Affine)]
"""All numbers of these are coordinates; the corner of an affine matrix is not."""


@pytest.mark.parametrize("group", LINEAR, ids=repr)
def test_defaults_are_what_structures_override(group):
    """Each default against the override, on elements that are not symmetric."""
    a, b, n = random_element(group, (2,)), random_element(group, (2,)), random_algebra(group, (2,))
    x, y = torch.randn(2, 2, 3, group.k, dtype=F64).unbind()
    close(Group.to_dense(group, a), group.to_dense(a))
    all_close(Group.restrict(group, x, y), group.restrict(x, y))
    for left in (False, True):
        all_close(Group.pullback(group, a, n, left), group.pullback(a, n, left))
    for transpose in (False, True):
        close(Group.apply_inverse(group, a, x, transpose), group.apply_inverse(a, x, transpose))
    all_close(Group.dual(group, n), group.dual(n))
    all_close(Group.unscale(group, n), group.unscale(n))
    close(Group.logabsdet(group, a), group.logabsdet(a))
    close(Group.squared_norm(group, a), group.squared_norm(a))
    all_close(Group.bracket(group, a, b), group.bracket(a, b))


@pytest.mark.parametrize("group", HOLD_NUMBERS, ids=repr)
def test_default_projections_and_factors(group):
    matrix = torch.randn(2, group.k, group.k, dtype=F64)
    all_close(Group.from_dense(group, matrix), group.from_dense(matrix))
    diagonal = torch.rand(2, group.k, dtype=F64)
    all_close(Group.from_diagonal(group, diagonal), group.from_diagonal(diagonal))
    dense = 10 * group.to_dense(random_element(group, (2,)))
    tau = dense @ dense.mT
    found = group.to_dense(Group.factor(group, tau))
    close(found @ found.mT, tau, 1e-9)


@pytest.mark.parametrize("group", [groups.Triangular(4), groups.Diagonal(3), groups.Toeplitz(5, upper=True)], ids=repr)
def test_default_coordinates(group):
    """The default scales each number by itself; structures with symmetric blocks override it."""
    eta = random_algebra(group, (2,))
    all_close(Group.scale(group, eta), group.scale(eta))


@pytest.mark.parametrize("group", [groups.Diagonal(4), groups.Toeplitz(4), groups.Arrow(4)], ids=repr)
def test_the_default_factor_is_the_nearest_one(group):
    """Off the submanifold: no step in the algebra comes nearer to tau."""
    half = torch.randn(4, 4, dtype=F64)
    tau = half @ half.mT + 0.1 * torch.eye(4, dtype=F64)

    def distance(a):
        whitened = torch.linalg.solve(group.to_dense(a), torch.linalg.cholesky(tau))
        return torch.linalg.svdvals(whitened).log().norm()

    a = Group.factor(group, tau)
    for _ in range(10):
        assert distance(group.move(a, random_algebra(group, size=1e-3))) >= distance(a) - 1e-9
    assert distance(a) <= distance(group.factor(tau)) + 1e-9


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("structure", NAMES)
def test_the_norm_of_an_algebra_element(structure, scale):
    """Near the largest singular value, whatever the units; zero for nothing."""
    for k in (7, 40, 100):
        group = NAMES[structure](k)
        blocks = [torch.randn(3, *shape, generator=torch.Generator().manual_seed(k)) for shape in group.shapes]
        n = group.scale(tuple(scale * block for block in blocks))
        true = torch.linalg.matrix_norm(group.to_dense(n).double(), 2)
        found = group.norm_estimate(n).double()
        assert (found >= 0.8 * true).all()
        assert (found <= 2 * true).all()
        nothing = group.norm_estimate(tuple(torch.zeros_like(block) for block in blocks))
        assert nothing.abs().max() < 1e-30
