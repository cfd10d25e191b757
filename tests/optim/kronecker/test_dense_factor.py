"""The dense form of a factor: how it moves, and how its momentum is stored."""

import pytest
import torch

from gnomon import groups
from gnomon.optim import INGD
from gnomon.optim.kronecker.dense_factor import DenseFactor
from gnomon.optim.kronecker.gram_factor import GramFactor
from gnomon.optim.kronecker.statistics import MatrixMoment, RowMoment
from gnomon.optim.kronecker.structured_factor import StructuredFactor

F64 = torch.float64
SIZES = [1, 4, 33, 150]


def random(k, *shape):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(k))


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("factor", [-1.0, -0.5])
def test_moves_of_first_and_second_order(k, factor):
    """``A (I + f m)`` and ``A (I + f m + 0.3 (f m)^2)``; the momentum stays as it is."""
    a, m = random(k, 2, k, k), random(k + 1, 2, k, k)
    m, eye = m + m.mT, torch.eye(k, dtype=F64)
    kept, form = m.clone(), DenseFactor(k)
    torch.testing.assert_close(form.moved((a,), (m,), 1, factor)[0], a @ (eye + factor * m))
    second = a @ (eye + factor * m + 0.3 * factor**2 * m @ m)
    torch.testing.assert_close(form.moved((a,), (m,), 2, factor)[0], second)
    assert torch.equal(m, kept)


@pytest.mark.parametrize("k", [*range(1, 10), 64])
def test_a_momentum_is_stored_once(k):
    m = random(k, 3, k, k)
    m, form = m + m.mT, DenseFactor(k)
    stored = form.pack_momentum((m,))
    assert stored.shape == (3, *form.momentum_shape)
    assert stored.shape[-1] <= k * (k + 1) // 2 + k
    assert torch.equal(form.unpack_momentum(stored)[0], m)


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_tangents_from_rows_and_from_their_matrix(k, limit):
    """``rate/2 (w A^T S A + damping A^T A - I)``, scaled back to the limit where it is longer."""
    a, x = random(k, 2, k, k), random(k + 1, 2, 5, k)
    weight, damping = torch.tensor([0.5, 2.0], dtype=F64), torch.tensor([0.1, 0.3], dtype=F64)
    w, d = weight[:, None, None], damping[:, None, None]
    s, form = x.mT @ x, DenseFactor(k)
    whole = 0.5 * (w * a.mT @ s @ a + d * a.mT @ a - torch.eye(k, dtype=F64))
    found = [
        form.tangent((a,), form.project((a,), moment), weight, damping, limit, 0.2)[0]
        for moment in (RowMoment(x, torch.ones(2, dtype=F64)), MatrixMoment(s, torch.ones(2, dtype=F64)))
    ]
    torch.testing.assert_close(found[0], found[1])
    if limit > 1:
        torch.testing.assert_close(found[0], 0.2 * whole)
    else:
        norms = torch.linalg.matrix_norm(found[0], 2)
        assert ((norms > 0.7 * limit) & (norms < 1.5 * limit)).all()
        direction = found[0] / found[0].flatten(1).norm(dim=1)[:, None, None]
        torch.testing.assert_close(direction, whole / whole.flatten(1).norm(dim=1)[:, None, None])


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("memory", ["none", "as the rows", "transposed"])
def test_the_square_is_applied(k, memory):
    """``A A^T x`` by the stored product, in given memory too, and by A twice."""
    a, x = random(k, 2, k, k), random(k + 1, 2, 7, k)
    form, wanted = DenseFactor(k), x @ a @ a.mT
    rows = x if memory != "transposed" else x.mT.contiguous().mT
    scratch = None if memory == "none" else torch.empty_like(rows)
    found = form.apply_square(form.square((a,)), rows, scratch=scratch)
    torch.testing.assert_close(found, wanted)
    assert scratch is None or found.data_ptr() == scratch.data_ptr()
    torch.testing.assert_close(form.apply_twice((a,), x), wanted)
    gram = GramFactor(k)
    torch.testing.assert_close(gram.apply_square(gram.from_dense(a), x), wanted)


def test_structures_whose_squares_leave_them_are_refused():
    """A Kronecker product is not a structure of one factor; the error says what to give instead."""
    side = lambda k: groups.Kronecker(groups.Dense(2), groups.Dense(k // 2))  # noqa: E731
    with pytest.raises(ValueError, match=r"structure cannot be Kronecker.*structures of its two factors as a pair"):
        INGD(torch.nn.Linear(6, 4, bias=False), structure=(side, "dense"))
    assert StructuredFactor(groups.Arrow(5)).has_scale
