"""Products of large matrices, in panels where one side of the result is enough."""

import pytest
import torch

from gnomon import linalg
from support.matrices import F64, LAYOUTS, close, laid_out


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (5, 7, 3), (17, 33, 19), (33, 4, 35)], ids=str)
def test_products(shape, batch, layout):
    n, k, m = shape
    a, b = torch.randn(*batch, n, k, dtype=F64), torch.randn(*batch, k, m, dtype=F64)
    close(linalg.product(laid_out(a, layout), laid_out(b, layout)), a @ b)


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("k", [1, 5, 33, 64, 97])
def test_symmetric_products(k, batch, layout):
    """Of thin and of square matrices, and both sides of the diagonal alike."""
    rows, s = torch.randn(*batch, 7, k, dtype=F64), torch.randn(*batch, k, k, dtype=F64)
    a, s = torch.randn(*batch, k, k, dtype=F64), s + s.mT
    for left, right in ((rows.mT, rows), (a.mT, s @ a), (s, s)):
        found = linalg.symmetric_product(laid_out(left, layout), laid_out(right, layout))
        close(found, left @ right, 1e-10)
    assert torch.equal(found[..., :16, 16:], found[..., 16:, :16].mT)


@pytest.mark.usefixtures("small_panels")
def test_products_of_batches_of_different_shapes():
    a, b = torch.randn(3, 1, 37, 5, dtype=F64), torch.randn(2, 5, 4, dtype=F64)
    close(linalg.product(a, b), a @ b)
    rows = torch.randn(37, 5, dtype=F64)
    close(linalg.symmetric_product(rows.expand(2, 37, 5), rows.mT), (rows @ rows.mT).expand(2, 37, 37))


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("multiply", [linalg.product, linalg.symmetric_product], ids=["plain", "symmetric"])
def test_gradients_pass_through_products(multiply):
    a = torch.randn(40, 3, dtype=F64, requires_grad=True)
    grad = torch.randn(40, 40, dtype=F64)
    (ours,) = torch.autograd.grad(multiply(a, a.mT), a, grad)
    (theirs,) = torch.autograd.grad(a @ a.mT, a, grad)
    close(ours, theirs)
    b = torch.randn(3, 40, dtype=F64, requires_grad=True)
    (ours,) = torch.autograd.grad(multiply(a.detach(), b), b, grad)
    close(ours, a.detach().mT @ grad)
