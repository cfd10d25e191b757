"""Divergences between Gaussians of any two structures, and of torch's, at the cost of the structure."""

from copy import deepcopy

import pytest
import torch
from torch.distributions import Independent, LowRankMultivariateNormal, MultivariateNormal, Normal
from torch.distributions import kl_divergence as dense_divergence

import gnomon
from gnomon import groups as g
from gnomon.testing import random_element

STRUCTURES = [
    g.Dense(6),
    g.Triangular(6),
    g.Diagonal(6),
    g.BlockDiagonal(6, 4),
    g.Arrow(6, rank=2),
    g.Heisenberg(6, 1, 2),
    g.Toeplitz(6, upper=True),
    g.BlockTriangular((g.Dense(2), g.Toeplitz(2), g.Diagonal(2))),
    g.LowRank(6, 2),
]


def random_gaussian(group, form, batch=(), dtype=torch.float64):
    q = gnomon.Gaussian(group, form=form, batch_shape=batch, dtype=dtype, loc=torch.randn(*batch, group.k))
    if isinstance(group, g.LowRank):
        with torch.no_grad():
            q.eta.copy_(0.7 * torch.randn_like(q.eta))
        q.fold()
    else:
        q.frame.copy_(q.group.pack(q.affine.join(random_element(group, batch, dtype=dtype), q.loc.detach())))
    return q


def random_distributions(batch=()):
    def normal(*shape):
        return torch.randn(*batch, *shape, dtype=torch.float64)

    root = torch.eye(6, dtype=torch.float64) + 0.3 * normal(6, 6).tril(-1)
    yield Normal(normal(6), normal(6).exp())
    yield Independent(Normal(normal(6), normal(6).exp()), 1)
    yield MultivariateNormal(normal(6), scale_tril=root)
    yield LowRankMultivariateNormal(normal(6), normal(6, 2), normal(6).exp())
    yield LowRankMultivariateNormal(normal(6), normal(6, 7), normal(6).exp())


def as_dense(p):
    if isinstance(p, gnomon.Gaussian):
        return p.to_distribution()
    if isinstance(p, Normal):
        return MultivariateNormal(p.loc, torch.diag_embed(p.scale.square()))
    return MultivariateNormal(
        p.mean, p.base_dist.variance.diag_embed() if isinstance(p, Independent) else p.covariance_matrix
    )


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_every_pair_is_as_the_dense_one(group, form):
    p = random_gaussian(group, form)
    others = [random_gaussian(other, way) for other in STRUCTURES for way in ("covariance", "precision")]
    for q in [*others, *random_distributions()]:
        for one, two in ((p, q), (q, p)):
            wanted = dense_divergence(as_dense(one), as_dense(two))
            torch.testing.assert_close(gnomon.kl_divergence(one, two), wanted, rtol=1e-8, atol=1e-8)
    assert p.kl_divergence(p).abs().item() < 1e-10


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_two_precisions_meet_in_the_higher_one(group, form):
    """Data frames and arrays make points in float64, and a prior is in float32 unless one says otherwise."""
    p = random_gaussian(group, form)
    others = [random_gaussian(other, way).float() for other in STRUCTURES for way in ("covariance", "precision")]
    torchs = [Normal(torch.zeros(6), torch.ones(6)), MultivariateNormal(torch.zeros(6), torch.eye(6))]
    for q in [*others, *torchs, LowRankMultivariateNormal(torch.zeros(6), torch.ones(6, 2), torch.ones(6))]:
        exact = deepcopy(q).double() if isinstance(q, gnomon.Gaussian) else q
        for one, two, first, second in ((p, q, p, exact), (q, p, exact, p)):
            found = gnomon.kl_divergence(one, two)
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, gnomon.kl_divergence(first, second), rtol=1e-5, atol=1e-5)
            found.backward()


@pytest.mark.parametrize("group", [g.Diagonal(6), g.Arrow(6), g.Heisenberg(6, 1, 1), g.LowRank(6, 2)], ids=repr)
def test_batches(group):
    p = random_gaussian(group, "covariance", (2, 3))
    for batch in ((), (2, 3)):
        for q in [random_gaussian(g.Arrow(6, rank=2), "precision", batch), *random_distributions(batch)]:
            for one, two in ((p, q), (q, p)):
                found, wanted = gnomon.kl_divergence(one, two), dense_divergence(as_dense(one), as_dense(two))
                torch.testing.assert_close(found, wanted.expand(2, 3), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_derivatives_in_both(group, form):
    p, q = random_gaussian(group, form), random_gaussian(g.Arrow(6, rank=2), "covariance")
    scale = torch.rand(6, dtype=torch.float64, requires_grad=True)
    for one, two in ((p, q), (q, p), (p, Normal(torch.zeros(6, dtype=torch.float64), scale))):
        leaves = [x.eta if isinstance(x, gnomon.Gaussian) else scale for x in (one, two)]
        found = torch.autograd.grad(gnomon.kl_divergence(one, two), leaves)
        wanted = torch.autograd.grad(dense_divergence(as_dense(one), as_dense(two)), leaves)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)


def test_nothing_large_is_formed():
    """An arrow, Heisenberg and low-rank Gaussian of a hundred thousand dimensions against a diagonal prior."""
    k = 100_000
    prior = Independent(Normal(torch.zeros(k), torch.ones(k)), 1)
    for group in (g.Arrow(k), g.Heisenberg(k, 2, 2), g.LowRank(k, 3)):
        for form in ("covariance", "precision"):
            q = gnomon.Gaussian(group, form=form, init=4.0)
            q.kl_divergence(prior).backward()
            assert bool(q.eta.grad.isfinite().all())
    torch.testing.assert_close(gnomon.kl_divergence(prior, q).detach(), torch.tensor(k * 0.318), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (
            torch.distributions.Laplace(0.0, 1.0),
            TypeError,
            "q must be a gnomon.Gaussian or one of torch's .* got Laplace",
        ),
        (Normal(0.0, 1.0), TypeError, "with a vector of means"),
        (gnomon.Gaussian(4), ValueError, "p has dimension 6 and q has dimension 4"),
    ],
)
def test_what_has_no_divergence_is_refused(other, error, message):
    with pytest.raises(error, match=message):
        gnomon.Gaussian(6).kl_divergence(other)
