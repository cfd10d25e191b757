"""The fast INGD against the plain one, and the update of factors against the plain figure in every form."""

import math

import pytest
import torch
from torch import nn

from gnomon import groups
from gnomon.optim import INGD
from gnomon.optim.kronecker.dense_factor import DenseFactor
from gnomon.optim.kronecker.factor_forms import FactorPair
from gnomon.optim.kronecker.factor_update import UpdateSettings, update
from gnomon.optim.kronecker.gram_factor import GramFactor
from gnomon.optim.kronecker.reference import ReferenceINGD, update_factors
from gnomon.optim.kronecker.statistics import statistics_of
from gnomon.optim.kronecker.structured_factor import StructuredFactor

F64 = torch.float64
P, D = 6, 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("rows", [4, 40], ids=["few rows", "many rows"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_paper_preset_is_the_reference(rows, every):
    """Weights and factors agree to rounding, where updates change all of them noticeably."""
    options = {"lr": 0.05, "damping": 0.02, "update_every": every, "precond_lr": lambda step: 0.02}
    plain, fast = network(), network()
    reference, ingd = ReferenceINGD(plain, **options), INGD(fast, preset="paper", **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(25):
        x = torch.randn(rows, 5, dtype=F64, generator=generator)
        for model, optimizer in ((plain, reference), (fast, ingd)):
            model.zero_grad()
            (model(x) - x[:, :3].sin()).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Linear):
            for ours, key in zip(ingd.factors(name), "KC", strict=True):
                torch.testing.assert_close(ours, reference.layers[layer][key], rtol=1e-10, atol=1e-12)
                assert (ours - torch.eye(len(ours), dtype=F64)).norm() > 0.05


def setting(n, seed=0):
    """Factors that are not symmetric, momenta that are, and rows."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, dtype=F64, generator=generator)

    K, C = (torch.eye(k, dtype=F64) + 0.2 * random(k, k) for k in (P, D))
    m_K, m_C = (0.05 * (m + m.T) for m in (random(P, P), random(D, D)))
    return K, C, m_K, m_C, random(n, P) @ random(P, P), random(n, D) @ random(D, D) / n


@pytest.mark.parametrize("n", [3, 30])
@pytest.mark.parametrize("a1", [0.0, 0.5])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_one_update_of_dense_factors(n, a1, damping):
    K, C, m_K, m_C, x, g = setting(n)
    wanted = update_factors(K, C, m_K, m_C, x, g, a1, 0.03, damping)
    pair = FactorPair(DenseFactor(P), DenseFactor(D))
    numbers = UpdateSettings(a1, 0.03, damping, math.inf, order=1, inside=True)
    statistics = statistics_of(pair, (None, None), x[None], g[None], terms=n)
    momenta = (pair.left.pack_momentum((m_K[None],)), pair.right.pack_momentum((m_C[None],)))
    ok = torch.tensor(True)
    new = update(pair, numbers, (K[None],), (C[None],), momenta, None, statistics, ok, layers=1)
    found = (new.k, new.c, pair.left.unpack_momentum(new.m_k)[0], pair.right.unpack_momentum(new.m_c)[0])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=1e-11, atol=1e-12)


STRUCTURES = [
    groups.Triangular,
    lambda k: groups.Triangular(k, upper=True),
    groups.Diagonal,
    lambda k: groups.BlockDiagonal(k, 2),
    lambda k: groups.Arrow(k, 2),
    lambda k: groups.Heisenberg(k, 1, 1),
    groups.Toeplitz,
]
NAMES = ["lower", "upper", "diagonal", "block", "arrow", "heisenberg", "toeplitz"]


@pytest.mark.parametrize("n", [3, 30])
@pytest.mark.parametrize("structure", STRUCTURES, ids=NAMES)
def test_one_update_of_structured_factors(structure, n):
    """``m = b1/2 P(...)`` and ``K (I - m)``, where P of a dense matrix is 4 D . D . <E_j, .>."""
    left, right = structure(P), structure(D)
    _, _, _, _, x, g = setting(n)
    generator = torch.Generator().manual_seed(3)
    dense = [torch.eye(k, dtype=F64) + 0.2 * torch.randn(k, k, dtype=F64, generator=generator) for k in (P, D)]
    k, c = (group.from_dense(m[None]) for group, m in zip((left, right), dense, strict=True))
    K, C = left.to_dense(k)[0], right.to_dense(c)[0]
    mu_aa, mu_gg, b1, damping = x.T @ x / n, n * g.T @ g, 0.03, 0.1
    H_K, H_C = K.T @ mu_aa @ K, C.T @ mu_gg @ C
    full = (
        H_C.trace() / D * H_K + damping * (C.T @ C).trace() / D * K.T @ K - torch.eye(P, dtype=F64),
        H_K.trace() / P * H_C + damping * (K.T @ K).trace() / P * C.T @ C - torch.eye(D, dtype=F64),
    )
    pair = FactorPair(StructuredFactor(left, False), StructuredFactor(right, False))
    numbers = UpdateSettings(0.0, b1, damping, math.inf, order=1, inside=True)
    statistics = statistics_of(pair, (k, c), x[None], g[None], terms=n)
    new = update(pair, numbers, k, c, (None, None), None, statistics, torch.tensor(True), layers=1)
    for group, old, matrix, packed in zip((left, right), (K, C), full, (new.k, new.c), strict=True):
        covector = group.restrict(torch.eye(group.k, dtype=F64)[None], matrix[None])
        m = group.to_dense(tuple(2 * block for block in group.scale(group.scale(covector))))[0]
        found = group.to_dense(group.unpack(packed))[0]
        torch.testing.assert_close(found, old - b1 * old @ m, rtol=1e-10, atol=1e-11)


def test_the_gram_form_is_the_factor_to_first_order():
    """The difference of ``P`` to ``K K^T`` is of second order in b1: a quarter is left at half of b1."""
    K, C, _, _, x, g = setting(30)
    differences = []
    for b1 in (2e-3, 1e-3):
        new = update_factors(K, C, torch.zeros_like(K), torch.zeros_like(C), x, g, 0.0, b1, 0.1)
        pair = FactorPair(GramFactor(P), GramFactor(D))
        statistics = statistics_of(pair, (None, None), x[None], g[None], terms=30)
        numbers = UpdateSettings(0.0, b1, 0.1, math.inf, order=2, inside=True)
        k, c = ((m @ m.T)[None] for m in (K, C))
        found = update(pair, numbers, (k,), (c,), (None, None), None, statistics, torch.tensor(True), layers=1)
        pairs = ((found.k[0], new[0]), (found.c[0], new[1]))
        differences.append(sum(float((p - a @ a.T).norm()) for p, a in pairs))
    assert differences[0] / differences[1] == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("form", [DenseFactor, GramFactor, lambda k: StructuredFactor(groups.Triangular(k), False)])
def test_nothing_changes_where_it_may_not(form):
    """A layer whose curvature is not finite stays bit for bit, while another in the same stack moves."""
    pair = FactorPair(form(P), form(D))
    a = [f.unpack(f.identity(2, F64, "cpu")) for f in pair]
    generator = torch.Generator().manual_seed(5)
    x, g = (torch.randn(2, 9, k, dtype=F64, generator=generator) for k in (P, D))
    g[0, 0, 0] = math.nan
    numbers = UpdateSettings(0.0, 0.3, 0.1, 0.5, order=2, inside=True)
    level = torch.ones(2, dtype=F64)
    statistics = statistics_of(pair, (None, None), x, g, terms=9)
    momenta = tuple(torch.zeros(2, *f.momentum_shape, dtype=F64) if f.has_momentum else None for f in pair)
    new = update(pair, numbers, *a, momenta, level, statistics, torch.tensor(True), layers=2)
    assert new.finite.tolist() == [False, True]
    for f, old, packed in zip(pair, a, (new.k, new.c), strict=True):
        moved = f.unpack(packed)
        assert all(torch.equal(after[0], before[0]) for after, before in zip(moved, old, strict=True))
        assert not all(torch.equal(after[1], before[1]) for after, before in zip(moved, old, strict=True))
    assert new.level[0] == 1
    stays = update(pair, numbers, *a, momenta, level, statistics, torch.tensor(False), layers=2)
    assert torch.equal(stays.k, pair.left.pack(a[0]))
