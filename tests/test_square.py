"""The dense factor by its square, against the update of the factor itself."""

import pytest
import torch
from torch import nn

from gnomon import groups
from gnomon.optim import INGD, forms
from gnomon.optim.factors import Covariance, KroneckerFactors, Rows, Statistics
from gnomon.optim.square import CURVED, Square

F64 = torch.float64


def root(matrix):
    """The symmetric square root."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.sqrt().unsqueeze(-2) @ vectors.mT


def moved(a, m):
    """``A q(M)^(1/2)`` with ``q(M) = (I - M)^2 + M^2 / 4``: its square is what a step along M gives."""
    eye = torch.eye(m.shape[-1], dtype=m.dtype)
    change = eye - m
    return a @ root(change @ change + 0.25 * m @ m)


def random_factor(k, generator, blocks=2):
    return torch.eye(k, dtype=F64) + 0.3 * torch.randn(blocks, k, k, dtype=F64, generator=generator)


@pytest.mark.parametrize("form", [Rows, Covariance])
@pytest.mark.parametrize("limit", [0.05, float("inf")])
def test_updates_are_those_of_the_factor(form, limit):
    """Five updates with momentum of a pair of factors; both sides, a batch of blocks, with and without the bound."""
    generator = torch.Generator().manual_seed(0)
    plain, square = KroneckerFactors(*map(groups.Dense, (7, 4))), KroneckerFactors(Square(7), Square(4))
    a = [random_factor(7, generator), random_factor(4, generator)]
    p = [x @ x.mT for x in a]
    m, n = [torch.zeros_like(x) for x in a], [torch.zeros_like(x) for x in a]
    for _ in range(5):
        rows = [0.5 * torch.randn(2, 9, k, dtype=F64, generator=generator) for k in (7, 4)]
        moments = [form(x if form is Rows else x.mT @ x) for x in rows]
        s = Statistics(*moments, 9, 9)
        pushes = []
        for factors, (k, c) in ((plain, a), (square, p)):
            curvature = factors.curvature((k,), (c,), s)
            pushes.append([x[0] for x in factors.pressure((k,), (c,), curvature, 0.3, limit)])
        m = [0.5 * old + 0.1 * new for old, new in zip(m, pushes[0], strict=True)]
        n = [0.5 * old + 0.1 * new for old, new in zip(n, pushes[1], strict=True)]
        a = [moved(x, y) for x, y in zip(a, m, strict=True)]
        groups_ = (square.left, square.right)
        p = [g.advance((x,), (-y,), 2)[0] for g, x, y in zip(groups_, p, n, strict=True)]
        # The bound comes from a power method with another start; without it all is exact.
        tolerance = 1e-10 if limit == float("inf") else 1e-3
        for i in (0, 1):
            torch.testing.assert_close(p[i], a[i] @ a[i].mT, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(n[i], a[i] @ m[i] @ torch.linalg.inv(a[i]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kinds", [(Square, Square), (Square, groups.Dense), (groups.Dense, Square)])
def test_curvature_of_a_gradient(kinds):
    """``P G^T Q G`` for what a factor sees as ``K^T G^T Q G K``."""
    generator = torch.Generator().manual_seed(1)
    factors, gradient = KroneckerFactors(kinds[0](5), kinds[1](3)), torch.randn(2, 3, 5, dtype=F64, generator=generator)
    a = [random_factor(5, generator).tril(), random_factor(3, generator).tril()]
    elements = [(x @ x.mT,) if kind is Square else (x,) for x, kind in zip(a, kinds, strict=True)]
    plain = KroneckerFactors(*(groups.Dense(k) for k in (5, 3))).gradient_curvature((a[0],), (a[1],), gradient)
    found = factors.gradient_curvature(*elements, gradient)
    for x, kind, ours, theirs in zip(a, kinds, (found.in_k, found.in_c), (plain.in_k, plain.in_c), strict=True):
        wanted = x @ theirs.seen[0] @ torch.linalg.inv(x) if kind is Square else theirs.seen[0]
        torch.testing.assert_close(ours.seen[0], wanted)
        torch.testing.assert_close(ours.trace, theirs.trace)
    torch.testing.assert_close(found.mean, plain.mean)


def test_the_norm_of_a_step():
    generator = torch.Generator().manual_seed(2)
    a, m = random_factor(30, generator, 4), torch.randn(4, 30, 30, dtype=F64, generator=generator)
    m = (m + m.mT) * torch.tensor([1e-100, 1e-3, 1.0, 1e100], dtype=F64).view(-1, 1, 1)
    n = a @ m @ torch.linalg.inv(a)
    found, true = Square(30).step_norm((a @ a.mT,), (n,)), torch.linalg.matrix_norm(m, 2)
    assert (found <= true * (1 + 1e-6)).all()
    assert (found >= 0.7 * true).all()
    assert Square(30).step_norm((a @ a.mT,), (0 * n,)).abs().max() < 1e-12


def test_a_move_of_any_length_is_positive_definite():
    m = torch.linspace(-5, 5, 1001, dtype=F64)
    assert (1 - 2 * m + CURVED * m**2).min() >= 0.2 - 1e-12


@pytest.mark.parametrize("spectrum", [torch.logspace(0, -5, 80), torch.tensor([1.0] + 79 * [1e-6])])
def test_a_square_in_float32_stays_positive_definite(spectrum):
    """At a tenth of the damping that ``keep_square`` asks for, with noise from batches of 20 rows."""
    k, eps = 80, torch.finfo(torch.float32).eps
    damping = 80 * (eps / 0.1) ** (2 / 3) * (1 + 1e-6)
    assert forms.keep_square(k, damping, eps)
    assert not forms.keep_square(k + 1, damping, eps)
    damping, group, generator = damping / 10, Square(k), torch.Generator().manual_seed(3)
    scale = spectrum / spectrum.square().mean().sqrt()
    turn, p, n = torch.linalg.qr(torch.randn(k, k, generator=generator))[0], torch.eye(k)[None], torch.zeros(1, k, k)
    for _ in range(1000):
        x = scale * torch.randn(1, 20, k, generator=generator) @ turn
        push = (group.seen((p,), x)[0] / 20 + damping * p - torch.eye(k)) / 2
        cut = (5 / group.step_norm((p,), (push,))).clamp(max=1)
        n = 0.5 * n + 0.1 * cut * push
        (p,) = group.advance((p,), (-n,), 2)
    assert torch.equal(p, p.mT)
    values = torch.linalg.eigvalsh(p[0].double())
    assert values.min() > 1e-3
    assert values.max() < 2 / damping


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, "KK"),
        ({"memory": "low"}, "KK"),
        ({"curvature": "gradient"}, "KK"),
        ({"precond_dtype": torch.float64, "damping": 1e-6}, "K"),  # computed in float32
        ({"precond_dtype": torch.bfloat16}, "K"),
        ({"precond_dtype": torch.float16, "damping": 1.0}, "K"),  # rounded at random: not symmetric
        ({"damping": 1e-6}, "K"),
        ({"damping": lambda step: 0.2}, "K"),
        ({"order": 1}, "K"),
        ({"relative": False}, "K"),
        ({"preset": "paper"}, "K"),
        ({"structure": "triangular"}, "K"),
    ],
)
def test_where_the_square_is_kept(settings, kept):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = INGD(model, update_every=1, **settings)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(20, 6)).square().mean().backward()
        optimizer.step()
    state = optimizer.state[model[0].weight]
    assert kept in state
    assert {"K": "KK", "KK": "K"}[kept] not in state
    K, C = optimizer.factors("0")
    assert K.shape == (7, 7)
    assert C.shape == (5, 5)
    if kept == "KK":
        square = Square(7, packed=settings.get("memory") == "low")
        torch.testing.assert_close(K @ K.mT, square.unpack(state["KK"])[0][0] * state["level"] ** -0.5)
