"""What is stored of symmetric matrices and of momenta is all of them."""

import pytest
import torch

from gnomon import groups
from gnomon.groups import symmetric
from gnomon.testing import random_algebra
from support.matrices import F64, all_close, laid_out
from support.structures import SMALL_GROUPS


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("k", range(1, 10))
def test_packed_symmetric_matrices(k, batch):
    m = torch.randn(*batch, k, k, dtype=F64)
    m = m + m.mT
    packed = symmetric.pack(m)
    assert packed.shape == (*batch, symmetric.packed_size(k))
    assert k * (k + 1) // 2 <= symmetric.packed_size(k) <= k * (k + 1) // 2 + k
    assert torch.equal(symmetric.unpack(packed, k), m)
    assert torch.equal(symmetric.pack(laid_out(m, "strided")), packed)
    group = groups.Dense(k)
    assert group.compress((m,)).shape == (*batch, *group.compressed_shape)
    assert torch.equal(group.expand(group.compress((m,)))[0], m)


@pytest.mark.parametrize("group", SMALL_GROUPS, ids=repr)
def test_compressed_elements(group):
    """What is kept of a momentum is all of it."""
    n = group.scale(random_algebra(group, (2,)))
    compressed = group.compress(n)
    assert compressed.shape == (2, *group.compressed_shape)
    all_close(group.expand(compressed), n, 1e-14)
