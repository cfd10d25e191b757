"""Products with the square of an element, and derivatives through them."""

import itertools
import math

import pytest
import torch

from gnomon import groups
from gnomon.testing import random_element
from support.matrices import F64, LAYOUTS, close, laid_out
from support.structures import SMALL_GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True], ids=["kept", "overwritten"])
@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_squares_are_applied(group, overwrite):
    for batch, layout in itertools.product([(2,), (1,), (), (2, 3)], LAYOUTS):
        a = random_element(group, batch)
        rows = laid_out(torch.randn(*batch, 5, group.k, dtype=F64), layout)
        before, dense = rows.clone(), group.to_dense(a)
        found = group.apply_squared(a, rows, overwrite)
        close(found, before @ dense @ dense.mT)
        if not overwrite:
            assert torch.equal(rows, before)
            found.add_(1)  # not in the rows' memory either
            assert torch.equal(rows, before)


@pytest.mark.parametrize("overwrite", [False, True], ids=["kept", "overwritten"])
@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_kept_squares_are_applied_in_given_memory(group, overwrite):
    for batch, layout in itertools.product([(2,), (1,)], ["plain", "transposed"]):
        a = random_element(group, batch)
        before, dense = torch.randn(*batch, 5, group.k, dtype=F64), group.to_dense(a)
        rows, scratch = (laid_out(x, layout) for x in (before.clone(), torch.full_like(before, math.nan)))
        square = group.squared(a)
        close(group.times_square(square, rows, overwrite, scratch), before @ dense @ dense.mT)
        assert overwrite or torch.equal(rows, before)
        close(group.times_square(square, before, scratch=scratch), before @ dense @ dense.mT)


@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_gradients_pass_through_squares(group):
    a = tuple(block.requires_grad_() for block in random_element(group, (2,)))
    rows = torch.randn(2, 4, group.k, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows, *a: group.apply_squared(a, rows), (rows, *a), fast_mode=True)


def test_forward_derivatives_pass_through_squares():
    group = groups.Dense(4)
    a, x, v = random_element(group), torch.randn(3, 4, dtype=F64), torch.randn(3, 4, dtype=F64)
    _, ours = torch.func.jvp(lambda x: group.gram(a, x)[0], (x,), (v,))
    xa, va = x @ a[0], v @ a[0]
    close(ours, xa.mT @ va + va.mT @ xa)
