"""The dense factor A by its product A A^T, against the update of A itself."""

import pytest
import torch
from torch import nn

from gnomon.linalg import probe
from gnomon.optim import INGD
from gnomon.optim.kronecker.dense_factor import DenseFactor
from gnomon.optim.kronecker.factor_forms import FactorPair
from gnomon.optim.kronecker.factor_update import curvature, gradient_curvature
from gnomon.optim.kronecker.gram_factor import (
    SECOND_ORDER,
    GramFactor,
    is_safe,
    largest_eigenvalue,
    largest_eigenvalue_by_rows,
)
from gnomon.optim.kronecker.inverse_free_factor import FORMS
from gnomon.optim.kronecker.statistics import MatrixMoment, RowMoment, Statistics
from support.factors import tangents

F64 = torch.float64


def random_factor(k, generator, blocks=2):
    return torch.eye(k, dtype=F64) + 0.3 * torch.randn(blocks, k, k, dtype=F64, generator=generator)


def plainly_moved(a, s, damping, b):
    """``A (I - 2 b H + 7/5 b^2 H^2) A^T`` with ``H = A^T S A``, then ``(1 + 2 b) P - 2 b damping P P``."""
    h, eye = a.mT @ s @ a, torch.eye(a.shape[-1], dtype=a.dtype)
    p = a @ (eye - 2 * b * h + 1.4 * b**2 * h @ h) @ a.mT
    return (1 + 2 * b) * p - 2 * b * damping.view(-1, 1, 1) * p @ p


def estimate(matrix):
    """The power method, normalized at every step."""
    row = probe(matrix.shape[-1], F64, matrix.device).expand(len(matrix), 1, -1)
    for _ in range(9):
        row = (row / row.norm(dim=-1, keepdim=True)) @ matrix
    return row.norm(dim=(-2, -1))


def moment_of(kind, x):
    """The moment of rows, as they are or as a matrix."""
    return kind(x if kind is RowMoment else x.mT @ x, x.new_ones(len(x)))


@pytest.mark.parametrize("kind", [RowMoment, MatrixMoment])
@pytest.mark.parametrize("limit", [0.05, 0.5])
def test_updates_are_those_of_the_factor(kind, limit):
    """Five updates of a pair of factors; both sides, a batch of blocks, with and without the bound."""
    generator = torch.Generator().manual_seed(0)
    pair, rate = FactorPair(GramFactor(7), GramFactor(4)), 0.3
    p = [a @ a.mT for a in (random_factor(7, generator), random_factor(4, generator))]
    for _ in range(5):
        rows = [0.5 * torch.randn(2, 9, k, dtype=F64, generator=generator) for k in (7, 4)]
        seen = curvature(pair, (p[0],), (p[1],), Statistics(*(moment_of(kind, x) for x in rows), 9, 9))
        found = tangents(pair, (p[0],), (p[1],), seen.absolute(), 0.3, limit, rate)
        traces = [torch.einsum("bij,bji->b", x.mT @ x, y) for x, y in zip(rows, p, strict=True)]
        wanted = []
        for i, k in enumerate((7, 4)):
            other = 11 - k
            weight = (traces[1 - i] / other).view(-1, 1, 1)
            s = rows[i].mT @ rows[i] * weight
            damping = 0.3 * p[1 - i].diagonal(dim1=-2, dim2=-1).sum(-1) / other
            excess = (damping * estimate(p[i]) - 1).clamp(min=0)
            b = torch.minimum(limit / estimate(s @ p[i]), 0.25 / excess).clamp(max=rate / 2).view(-1, 1, 1)
            wanted.append(plainly_moved(torch.linalg.cholesky(p[i]), s, damping, b))
        p = [form.moved((x,), m, 2, -1.0)[0] for form, x, m in zip(pair, p, found, strict=True)]
        for new, expected in zip(p, wanted, strict=True):
            torch.testing.assert_close(new, expected, rtol=1e-10, atol=1e-10)
            assert torch.equal(new, new.mT)
        p = wanted


def forms_of(optimizer, layer):
    """The forms in which K and C of a layer are stored."""
    numbers = optimizer.state[layer.weight]["forms"].tolist()
    return [FORMS[number] if number < len(FORMS) else "factor" for number in numbers]


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_small_updates_are_those_of_the_factor_itself(structure):
    """To first order in b1 the product moves as its factor does: at half of b1 they differ by a quarter as much."""

    def after(precond_lr, momentum, steps=6):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        # With a schedule of the momentum the factor itself is stored.
        build = {"precond_momentum": momentum, "max_factor_step": 1.0, "structure": (structure, "dense")}
        optimizer = INGD(model, lr=0.0, update_every=1, precond_lr=precond_lr, **build)
        x = torch.randn(20, 6, dtype=F64)
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert forms_of(optimizer, model[0])[1] == ("gram" if momentum == 0.0 else "factor")
        return [f @ f.mT for f in optimizer.factors("0")]

    differences = []
    for b1 in (4e-3, 2e-3):
        pairs = zip(after(b1, 0.0), after(b1, lambda step: 0.0), strict=True)
        differences.append(sum(float((x - y).norm()) for x, y in pairs))
    assert differences[0] < 2e-3
    assert differences[0] / differences[1] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)], ids=str)
@pytest.mark.parametrize("kinds", [(GramFactor, GramFactor), (GramFactor, DenseFactor), (DenseFactor, GramFactor)])
def test_curvature_of_a_gradient(kinds, shape):
    """The curvature of K is ``G^T C C^T G``: from rows where they are few, and elsewhere from that matrix."""
    (d, p), generator = shape, torch.Generator().manual_seed(1)
    pair, gradient = FactorPair(kinds[0](p), kinds[1](d)), torch.randn(2, d, p, dtype=F64, generator=generator)
    a = [random_factor(p, generator).tril(), random_factor(d, generator).tril()]
    elements = [(x @ x.mT,) if kind is GramFactor else (x,) for x, kind in zip(a, kinds, strict=True)]
    plain = gradient_curvature(FactorPair(DenseFactor(p), DenseFactor(d)), (a[0],), (a[1],), gradient)
    found = gradient_curvature(pair, *elements, gradient)
    assert torch.equal(found.unit, plain.unit)
    assert (found.weight_k, found.weight_c) == (plain.weight_k, plain.weight_c) == (1 / d, 1 / p)
    for x, kind, ours, theirs in zip(a, kinds, (found.in_k, found.in_c), (plain.in_k, plain.in_c), strict=True):
        torch.testing.assert_close(ours.trace, theirs.trace)
        if kind is DenseFactor:
            torch.testing.assert_close(ours.covector[0], theirs.covector[0])
            continue
        inverse = torch.linalg.inv(x)
        s = inverse.mT @ theirs.covector[0] @ inverse
        assert (ours.covector is None) == (ours.half is not None)
        if ours.covector is None:
            torch.testing.assert_close(ours.half[0], s)
        else:
            y, z, zx, _ = ours.covector
            gram = x @ x.mT
            torch.testing.assert_close(y.mT @ z, gram @ s @ gram)
            torch.testing.assert_close(y.mT @ zx @ z, gram @ s @ gram @ s @ gram)
    torch.testing.assert_close(found.mean, plain.mean)


def test_the_largest_eigenvalue():
    """Against its plain form and the truth, for matrices of any size of numbers."""
    generator = torch.Generator().manual_seed(2)
    a, x = random_factor(30, generator, 4), torch.randn(4, 12, 30, dtype=F64, generator=generator)
    for scale in (1e-100, 1.0, 1e100):
        s = x.mT @ x * scale
        true = torch.linalg.matrix_norm(a.mT @ s @ a, 2)
        found = largest_eigenvalue(s @ a @ a.mT)
        torch.testing.assert_close(found, estimate(s @ a @ a.mT), rtol=1e-10, atol=0)
        assert (found <= 1.1 * true).all()
        assert (found >= 0.7 * true).all()
        *_, z, zx, rx = GramFactor(30).project_rows((a @ a.mT,), x * scale**0.5)
        torch.testing.assert_close(largest_eigenvalue_by_rows(zx, rx, z), found, rtol=1e-10, atol=0)
    assert largest_eigenvalue(0 * a).abs().max() == 0
    assert largest_eigenvalue_by_rows(0 * zx, 0 * rx, 0 * z).abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e30, 1e34])
def test_the_largest_eigenvalue_of_numbers_at_the_ends_of_float32(scale):
    flat, steep = torch.ones(2000), torch.logspace(0, -30, 100)
    for spectrum in (flat, steep):
        matrix = torch.diag(spectrum * scale)[None]
        found, x = estimate(matrix.double()), torch.diag(spectrum.sqrt() * scale**0.5)[None]
        torch.testing.assert_close(largest_eigenvalue(matrix).double(), found, rtol=1e-5, atol=0)
        *_, z, zx, rx = GramFactor(len(spectrum)).project_rows((torch.eye(len(spectrum))[None],), x)
        torch.testing.assert_close(largest_eigenvalue_by_rows(zx, rx, z).double(), found, rtol=1e-5, atol=0)


def test_a_move_of_any_length_is_positive_definite():
    h = torch.linspace(0, 5, 1001, dtype=F64)
    moved = 1 - 2 * h + SECOND_ORDER * h**2
    assert moved.min() >= 0.28
    assert (moved - (-2 * h).exp())[h <= 0.6].abs().max() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RowMoment, MatrixMoment])
@pytest.mark.parametrize("spectrum", [torch.logspace(0, -5, 80), torch.tensor([1.0] + 79 * [1e-6])])
def test_a_gram_factor_in_float32_stays_positive_definite(spectrum, kind):
    """At a tenth of the damping that ``is_safe`` asks for, with noise from batches of 20 rows."""
    k, eps = 80, torch.finfo(torch.float32).eps
    damping = 80 * (eps / 0.1) ** (2 / 3) * (1 + 1e-6)
    assert is_safe(k, damping, eps)
    assert not is_safe(k + 1, damping, eps)
    damping, form, generator = damping / 10, GramFactor(k), torch.Generator().manual_seed(3)
    scale = spectrum / spectrum.square().mean().sqrt()
    turn, p = torch.linalg.qr(torch.randn(k, k, generator=generator))[0], torch.eye(k)[None]
    for _ in range(1000):
        x = scale * torch.randn(1, 20, k, generator=generator) @ turn
        numbers = torch.tensor([1 / 20]), torch.tensor([damping])
        tangent = form.tangent((p,), form.project((p,), moment_of(kind, x)), *numbers, limit=0.5, rate=0.2)
        (p,) = form.moved((p,), tangent, 2, -1.0)
    assert torch.equal(p, p.mT)
    values = torch.linalg.eigvalsh(p[0].double())
    assert values.min() > 1e-3
    assert values.max() < 2 / damping


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({}, "gram"),
        ({"memory": "low"}, "packed gram"),
        ({"curvature": "gradient"}, "gram"),
        ({"precond_momentum": 0.5}, "factor"),
        ({"precond_momentum": lambda step: 0.0}, "factor"),
        ({"convention": "outside"}, "factor"),
        ({"precond_dtype": torch.float64, "damping": 1e-6}, "factor"),  # computed in float32
        ({"precond_dtype": torch.bfloat16}, "factor"),
        ({"precond_dtype": torch.float16, "damping": 1.0}, "factor"),  # rounded at random: not symmetric
        ({"damping": 1e-6}, "factor"),
        ({"damping": lambda step: 0.2}, "factor"),
        ({"order": 1}, "factor"),
        ({"relative": False}, "factor"),
        ({"preset": "paper"}, "factor"),
        ({"structure": "triangular"}, "factor"),
    ],
)
def test_where_the_product_is_stored(settings, form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = INGD(model, update_every=1, **settings)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(20, 6)).square().mean().backward()
        optimizer.step()
    state = optimizer.state[model[0].weight]
    assert forms_of(optimizer, model[0]) == [form, form]
    assert {"K", "C"} <= state.keys()
    K, C = optimizer.factors("0")
    assert K.shape == (7, 7)
    assert C.shape == (5, 5)
    if form != "factor":
        gram = GramFactor(7, packed=form == "packed gram")
        torch.testing.assert_close(K @ K.mT, gram.unpack(state["K"])[0][0] * state["level"].float() ** -0.5)
