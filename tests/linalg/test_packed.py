"""What is stored of a symmetric matrix is all of it."""

import pytest
import torch

from gnomon import linalg
from support.matrices import F64, laid_out


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("k", range(1, 10))
def test_packed_symmetric_matrices(k, batch):
    m = torch.randn(*batch, k, k, dtype=F64)
    m = m + m.mT
    packed = linalg.pack_symmetric(m)
    assert packed.shape == (*batch, linalg.packed_size(k))
    assert k * (k + 1) // 2 <= linalg.packed_size(k) <= k * (k + 1) // 2 + k
    assert torch.equal(linalg.unpack_symmetric(packed, k), m)
    assert torch.equal(linalg.pack_symmetric(laid_out(m, "strided")), packed)
