"""Operations that a structure has in a shorter form than any group."""

import functools

import pytest
import torch

from gnomon import groups
from gnomon.groups import Group
from gnomon.optim.structures import NAMES
from gnomon.testing import random_element
from support.matrices import F64, all_close, close


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("k", [1, 4, 33, 50])
def test_short_forms_of_dense_matrices(k):
    """Against those that any group has, for symmetric arguments."""
    group = groups.Dense(k)
    a = (torch.eye(k, dtype=F64) + torch.randn(2, k, k, dtype=F64) / k,)
    s = torch.randn(2, k, k, dtype=F64) / k
    s = s + s.mT
    covector = (s,)
    close(group.trace(covector), Group.trace(group, covector))
    close(group.squared_norm(a), Group.squared_norm(group, a))
    fresh = lambda: (s.clone(),)  # noqa: E731  # some work in the memory of what they are given
    all_close(group.steepest(fresh()), Group.steepest(group, fresh()))
    all_close(group.subtract_identity(fresh()), Group.subtract_identity(group, fresh()))
    half = (s @ a[0],)
    all_close(group.half_seen(a, s), half)
    all_close(group.congruent(a, half), Group.congruent(group, a, half))
    rows = torch.randn(2, 3, k, dtype=F64)
    all_close(group.gram(a, rows), Group.gram(group, a, rows))
    close(group.squared(a)[0], a[0] @ a[0].mT)
    for order in (1, None):
        all_close(group.advance(a, fresh(), order), Group.advance(group, a, fresh(), order))
    kept = fresh()
    close(group.advance(a, kept, 2, -0.5)[0], a[0] @ (torch.eye(k, dtype=F64) - 0.5 * s + 0.3 * 0.25 * s @ s))
    assert torch.equal(kept[0], s)


@pytest.mark.parametrize("structure", NAMES)
def test_short_forms_of_structures(structure):
    """Against those that any group has, for what factors see of symmetric matrices."""
    for k in (7, 40, 70):
        group = NAMES[structure](k)
        a = random_element(group)
        x = torch.randn(5, k, dtype=F64)
        fresh = functools.partial(group.gram, a, x)
        close(group.trace(fresh()), Group.trace(group, fresh()))
        close(group.squared_norm(a), Group.squared_norm(group, a))
        all_close(group.steepest(fresh()), Group.steepest(group, fresh()))
        all_close(group.subtract_identity(fresh()), Group.subtract_identity(group, fresh()))


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
