"""Marginals and conditionals of Gaussians, beside those of the dense covariance."""

import itertools

import pytest
import torch
from torch.distributions import Independent, LowRankMultivariateNormal, MultivariateNormal, Normal
from torch.distributions import kl_divergence as torch_divergence

import gnomon
from gnomon import groups as g
from gnomon.testing import random_element

FORMS = ("covariance", "precision")
STRUCTURES = [
    g.Dense(5),
    g.Triangular(5),
    g.Triangular(5, upper=True),
    g.Diagonal(5),
    g.BlockDiagonal(6, 2),
    g.BlockDiagonal(5, 3),
    g.Arrow(5),
    g.Arrow(6, rank=2),
    g.Heisenberg(6, 1, 2),
    g.Heisenberg(6, 2, 1),
    g.Toeplitz(5),
    g.Toeplitz(5, upper=True),
    g.BlockTriangular((g.Dense(2), g.Toeplitz(2), g.Diagonal(2))),
    g.BlockTriangular((g.BlockDiagonal(4, 2), g.Triangular(2)), upper=True),
    g.LowRank(5),
    g.LowRank(6, 2),
]


def random_gaussian(group, form, batch=(), spread=1.0):
    """With a condition number of the factor of about the spread."""
    q = gnomon.Gaussian(group, form=form, batch_shape=batch, dtype=torch.float64, loc=torch.randn(*batch, group.k))
    scales = torch.logspace(0, -1, group.k, base=spread, dtype=torch.float64)
    if isinstance(group, g.LowRank):
        loadings = torch.randn(*batch, group.k, group.rank, dtype=torch.float64)
        factor = group.element(loadings, scales.expand(*batch, -1))
    else:
        factor = random_element(group, batch, dtype=torch.float64)
        if not isinstance(group, g.Toeplitz):
            factor = group.from_dense(group.to_dense(factor) * scales)
    q.frame.copy_(q.group.pack(q.affine.join(factor, q.loc.detach())))
    return q


def dense_conditional(q, given, values):
    covariance, loc = q.covariance(), q.loc
    rest = [i for i in range(q.d) if i not in given]
    precision = torch.linalg.inv(covariance)
    sigma = torch.linalg.inv(precision[..., rest, :][..., rest])
    shift = (values - loc[..., given]).unsqueeze(-1)
    return loc[..., rest] - (sigma @ (precision[..., rest, :][..., given] @ shift)).squeeze(-1), sigma


def subsets(k):
    return [list(chosen) for m in range(1, k) for chosen in itertools.combinations(range(k), m)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_every_choice_is_as_the_dense_one(group, form):
    torch.manual_seed(0)
    q = random_gaussian(group, form, spread=20.0)
    covariance, loc = q.covariance(), q.loc
    for where in subsets(group.k)[:: 2 if group.k > 5 else 1]:
        marginal = q.marginal(where)
        sigma = covariance[where][:, where]
        torch.testing.assert_close(marginal.mean, loc[where], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(marginal.covariance_matrix, sigma, rtol=1e-9, atol=1e-9)
        values = torch.randn(len(where), dtype=torch.float64)
        mean, sigma = dense_conditional(q, where, values)
        conditional = q.conditional(where, values)
        torch.testing.assert_close(conditional.mean, mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(conditional.covariance_matrix, sigma, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_any_order(group, form):
    torch.manual_seed(1)
    q = random_gaussian(group, form)
    where = torch.randperm(group.k)
    for chosen in (where, where[:-1], where[:2]):
        sigma = q.covariance()[chosen][:, chosen]
        torch.testing.assert_close(q.marginal(chosen).covariance_matrix, sigma, rtol=1e-9, atol=1e-9)
        if len(chosen) < group.k:
            values = torch.randn(len(chosen), dtype=torch.float64)
            mean, _ = dense_conditional(q, chosen.tolist(), values)
            torch.testing.assert_close(q.conditional(chosen, values).mean, mean, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_derivatives(group, form):
    """In the coordinates and in the values, of a density."""
    torch.manual_seed(2)
    q = random_gaussian(group, form)
    for given in ([0], [1, 2], list(range(1, group.k - 1)), [group.k - 1]):
        values = torch.randn(len(given), dtype=torch.float64, requires_grad=True)
        rest = [i for i in range(group.k) if i not in given]
        x = torch.randn(len(rest), dtype=torch.float64)
        mean, sigma = dense_conditional(q, given, values)
        wanted = torch.autograd.grad(MultivariateNormal(mean, sigma).log_prob(x), (q.eta, values))
        found = torch.autograd.grad(q.conditional(given, values).log_prob(x), (q.eta, values))
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)
        part = MultivariateNormal(q.loc[rest], q.covariance()[rest][:, rest])
        wanted = torch.autograd.grad(part.log_prob(x), q.eta)
        found = torch.autograd.grad(q.marginal(rest).log_prob(x), q.eta)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_batches_and_many_values(group, form):
    torch.manual_seed(3)
    q = random_gaussian(group, form, (2,))
    given = [0, group.k - 1]
    values = torch.randn(7, 2, 2, dtype=torch.float64)
    mean, sigma = dense_conditional(q, given, values)
    found = q.conditional(given, values)
    assert found.batch_shape == (7, 2)
    torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.covariance_matrix, sigma.expand(7, -1, -1, -1), rtol=1e-8, atol=1e-8)
    x = torch.randn(4, 7, 2, group.k - 2, dtype=torch.float64)
    torch.testing.assert_close(found.log_prob(x), MultivariateNormal(mean, sigma).log_prob(x), rtol=1e-8, atol=1e-8)
    where = [group.k - 1, 1]
    sigma = q.covariance()[:, where][..., where]
    torch.testing.assert_close(q.marginal(where).covariance_matrix, sigma, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_single_precision_at_large_condition_numbers(group, form):
    """Relative to the standard deviations that are left, at a condition number of the covariance of about 1e6."""
    torch.manual_seed(4)
    q = random_gaussian(group, form, spread=1e3).float()
    twin = gnomon.Gaussian(group, form=form, dtype=torch.float64)
    twin.frame.copy_(q.frame)
    for given in subsets(group.k)[:: 3 if group.k > 5 else 2]:
        values = twin.sample()[given].float()
        mean, sigma = dense_conditional(twin, given, values.double())
        found, deviations = q.conditional(given, values), sigma.diagonal().sqrt()
        assert found.mean.dtype == torch.float32
        assert ((found.mean - mean) / deviations).abs().max() < 1e-2
        errors = (found.covariance_matrix - sigma) / torch.outer(deviations, deviations)
        assert errors.abs().max() < 1e-2


def test_structures_are_kept():
    """What a part is, so that it costs no more than the whole."""

    def kept(group, form, where):
        q = random_gaussian(group, form)
        values = torch.zeros(group.k - len(where), dtype=torch.float64)
        others = [i for i in range(group.k) if i not in where]
        return repr(q.marginal(where).structure), repr(q.conditional(others, values).structure)

    assert kept(g.Diagonal(9), "covariance", [7, 2, 4]) == ("Diagonal(3)",) * 2
    assert kept(g.Toeplitz(9), "covariance", [0, 1, 2])[0] == "Toeplitz(3)"
    assert kept(g.Toeplitz(9), "precision", [6, 7, 8])[0] == "Toeplitz(3)"
    assert kept(g.BlockDiagonal(9, 3), "covariance", [1, 2, 4, 3, 8]) == ("BlockDiagonal(5, block=2)",) * 2
    assert kept(g.LowRank(9, 2), "covariance", [8, 3, 5]) == ("LowRank(3, rank=2)",) * 2
    assert kept(g.LowRank(9, 2), "precision", [8, 3, 5]) == ("LowRank(3, rank=2)",) * 2
    assert kept(g.Arrow(9, rank=2), "covariance", [3, 5, 8])[0] == "LowRank(3, rank=2)"
    assert kept(g.Arrow(9, rank=2), "precision", [3, 5, 8]) == ("Diagonal(3)", "LowRank(3, rank=2)")
    arrow = "BlockTriangular((Dense(2), Diagonal(2)), upper=False)"
    assert kept(g.Arrow(9, rank=2), "covariance", [0, 1, 5, 8])[0] == arrow
    assert kept(g.Arrow(9, rank=2), "precision", [0, 1, 5, 8])[1] == arrow
    assert kept(g.Heisenberg(9, 2, 1), "covariance", [2, 3, 4])[0] == "LowRank(3, rank=1)"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["diagonal", "arrow:2", "heisenberg:2,2", "lowrank:3", "block:4"])
def test_nothing_large_is_formed(structure, form):
    k = 200_000
    q = gnomon.Gaussian(structure, form=form, loc=torch.zeros(k), init=4.0)
    given = slice(100, k - 100, 2) if structure != "block:4" else slice(100, k - 100)
    conditional = q.conditional(given, torch.zeros(len(range(k)[given])))
    assert conditional.log_prob(conditional.rsample()).isfinite()
    torch.testing.assert_close(conditional.variance, torch.full_like(conditional.mean, 4.0), rtol=0.05, atol=0.0)
    some = q.marginal([3, 77, k - 1])
    torch.testing.assert_close(some.variance, torch.full((3,), 4.0), rtol=0.05, atol=0.0)
    some.entropy().backward()
    assert bool(q.eta.grad.isfinite().all())


def test_a_part_without_a_structure_is_refused_where_it_is_large():
    q = gnomon.Gaussian("toeplitz", loc=torch.zeros(100_000))
    with pytest.raises(
        ValueError, match=r"90000 of the 100000 coordinates of Toeplitz\(100000\), in this order.*fewer"
    ):
        q.marginal(slice(10_000, None))
    assert q.marginal([5, 3]).variance.shape == (2,)


# ---------------------------------------------------------------------- as a distribution of torch
def test_as_a_distribution(monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # other packages turn it off
    torch.manual_seed(5)
    q = random_gaussian(g.Arrow(6, rank=2), "precision")
    whole = q.marginal(slice(None))
    x = q.sample((3,))
    torch.testing.assert_close(whole.log_prob(x), q.log_prob(x))
    torch.testing.assert_close(whole.entropy(), q.entropy())
    torch.testing.assert_close(whole.precision_matrix, q.precision())
    torch.testing.assert_close(whole.mode, q.loc)
    draws = whole.sample((40_000,))
    assert not draws.requires_grad
    torch.testing.assert_close(draws.mT.cov(), q.covariance(), rtol=0.05, atol=0.05)
    assert whole.rsample((2, 3)).shape == (2, 3, 6)
    many = whole.expand((4,))
    assert many.batch_shape == (4,)
    assert many.log_prob(x[0]).shape == (4,)
    assert repr(q.marginal([0, 1, 4])) == (
        "StructuredNormal(BlockTriangular((Triangular(2), Diagonal(1)), upper=True), form='covariance')"
    )
    with pytest.raises(ValueError, match="event_shape"):
        whole.log_prob(torch.zeros(5, dtype=torch.float64))


def test_parts_of_parts():
    torch.manual_seed(6)
    q = random_gaussian(g.Heisenberg(6, 1, 2), "covariance")
    values = torch.randn(2, dtype=torch.float64)
    mean, sigma = dense_conditional(q, [1, 4], values)
    found = q.conditional([1, 4], values).marginal([-1, 0])
    torch.testing.assert_close(found.mean, mean[[3, 0]])
    torch.testing.assert_close(found.covariance_matrix, sigma[[3, 0]][:, [3, 0]])
    again = q.conditional([1], values[:1]).conditional([3], values[1:])
    torch.testing.assert_close(again.mean, mean)
    torch.testing.assert_close(again.covariance_matrix, sigma)


def test_divergences():
    torch.manual_seed(7)
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    others = [
        Independent(Normal(zeros, ones), 1),
        MultivariateNormal(zeros, torch.eye(3, dtype=torch.float64)),
        LowRankMultivariateNormal(zeros, ones.unsqueeze(-1), ones),
    ]
    for group, form in itertools.product(STRUCTURES, FORMS):
        p = random_gaussian(group, form).marginal([0, 2, 3])
        dense = MultivariateNormal(p.mean, p.covariance_matrix)
        for other in others:
            twin = MultivariateNormal(other.mean, other.variance.diag_embed())
            if not isinstance(other, Independent):
                twin = MultivariateNormal(other.mean, other.covariance_matrix)
            torch.testing.assert_close(torch_divergence(p, other), torch_divergence(dense, twin))
            torch.testing.assert_close(torch_divergence(other, p), torch_divergence(twin, dense))
        q = random_gaussian(g.Arrow(5), "precision").marginal([4, 1, 0])
        wanted = torch_divergence(dense, MultivariateNormal(q.mean, q.covariance_matrix))
        torch.testing.assert_close(torch_divergence(p, q), wanted)
        torch.testing.assert_close(gnomon.kl_divergence(p, q), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    q = gnomon.Gaussian(g.Arrow(6, rank=2), dtype=dtype, init=2.0)
    part = q.conditional([0, 5], [1.0, 2.0])
    assert part.mean.dtype == dtype
    torch.testing.assert_close(part.covariance_matrix, 2 * torch.eye(4, dtype=dtype), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------- indices
def test_ways_to_name_coordinates():
    np = pytest.importorskip("numpy")
    q = random_gaussian(g.Triangular(5), "covariance")
    wanted = q.marginal([1, 4]).mean
    ways = [
        (1, 4),
        [-4, -1],
        range(1, 5, 3),
        slice(1, None, 3),
        torch.tensor([1, 4], dtype=torch.int32),
        np.array([1, 4], dtype=np.uint8),
        [False, True, False, False, True],
        np.array([False, True, False, False, True]),
        torch.tensor([False, True, False, False, True]),
    ]
    for way in ways:
        torch.testing.assert_close(q.marginal(way).mean, wanted)
        torch.testing.assert_close(q.conditional(way, np.array([1.0, 2.0])).mean.shape, torch.Size([3]))
    torch.testing.assert_close(q.marginal(slice(None, None, -1)).mean, q.loc.flip(0))
    torch.testing.assert_close(q.marginal(np.int64(2)).mean, q.loc[2:3])


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 5], ValueError, "indices holds 5, but there are 5 coordinates: 0 to 4, or -5 to -1"),
        ([-6], ValueError, "indices holds -6"),
        ([1, -4], ValueError, "indices names coordinate 1 more than once"),
        ([True, False], ValueError, r"indices is a mask of shape \(2,\); a mask must have 5 entries"),
        ([], ValueError, "indices names no coordinate"),
        (slice(3, 3), ValueError, "indices names no coordinate"),
        ([False] * 5, ValueError, "indices names no coordinate"),
        ([0.0, 1.0], TypeError, "indices must be integers, a mask or a slice, got numbers of type torch.float32"),
        ([[0, 1]], ValueError, r"indices has shape \(1, 2\)"),
        ("first", TypeError, "indices must be a number"),
    ],
)
def test_coordinates_that_are_refused(indices, error, message):
    q = gnomon.Gaussian(5)
    for name in (lambda: q.marginal(indices), lambda: q.conditional(indices, 0.0)):
        with pytest.raises(error, match=message):
            name()


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        ([0, 1], [1.0], r"values has shape \(1,\), but indices name 2 coordinates"),
        ([0], 1.0, r"values has shape \(\), but indices name 1 coordinates; give \(\*batch, 1\)"),
        ([0], [float("nan")], "values holds nan; name only coordinates that are known"),
        (slice(None), [0.0] * 5, "indices name all 5 coordinates"),
    ],
)
def test_values_that_are_refused(indices, values, message):
    with pytest.raises(ValueError, match=message):
        gnomon.Gaussian(5).conditional(indices, values)
