"""Posteriors: transforms, the registry, errors of draws, generated data, and what is missing or wrong."""

import math

import pytest
import torch
from scipy import stats

from gnomon.problems import posteriors
from gnomon.problems.posteriors import Parameter, Posterior, Reference, item_response_model, poisson_mixed_model
from gnomon.problems.posteriors.transforms import (
    FREE,
    ORDERED,
    POSITIVE,
    POSITIVE_ORDERED,
    SIMPLEX,
    interval,
)
from support.posteriors import needs_posteriordb

TRANSFORMS = {
    "free": (FREE, lambda v: True),
    "positive": (POSITIVE, lambda v: (v > 0).all()),
    "simplex": (SIMPLEX, lambda v: (v > 0).all() and torch.allclose(v.sum(-1), torch.ones(()).double())),
    "ordered": (ORDERED, lambda v: (v.diff() > 0).all()),
    "positive ordered": (POSITIVE_ORDERED, lambda v: (v > 0).all() and (v.diff() > 0).all()),
    "interval": (interval(-3, 5), lambda v: ((v > -3) & (v < 5)).all()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_meet_their_constraint_and_have_the_determinant_of_their_jacobian(name):
    transform, holds = TRANSFORMS[name]
    x = 2 * torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value, log_determinant = transform.apply(x)
    assert value.shape == (6, 4 + transform.lost)
    assert holds(value)
    for row, expected in zip(x, log_determinant, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda r: transform.apply(r[None])[0][0, :4], row)
        assert torch.allclose(torch.linalg.slogdet(jacobian).logabsdet, expected)


def test_zero_is_the_middle_of_a_simplex():
    assert torch.allclose(SIMPLEX.apply(torch.zeros(1, 3).double())[0], torch.full((1, 4), 0.25).double())


def standard_normal(reference=None):
    parameters = [Parameter("a"), Parameter("b", (2, 2)), Parameter("s", (), POSITIVE)]
    return Posterior("toy", parameters, lambda v: -0.5 * v["a"].square(), reference=reference)


def test_entries_have_the_names_of_stan_and_values_have_their_shapes():
    values = standard_normal().to_constrained(torch.arange(12.0).double().view(2, 6))
    assert {key: tuple(value.shape) for key, value in values.items()} == {"a": (2,), "b": (2, 2, 2), "s": (2,)}
    reference = Reference(("b[2,1]", "a"), torch.tensor([0.0, 0.0]).double(), torch.ones(2).double())
    values["b"][:, 1, 0] = torch.tensor([-1.0, 1.0])
    values["a"] = torch.tensor([5.0, 7.0]).double()
    assert reference.error(values) == 6


def test_error_is_the_largest_of_means_and_log_standard_deviations():
    reference = Reference(("a",), torch.tensor([1.0]).double(), torch.tensor([2.0]).double())
    posterior = standard_normal(reference)
    draws, signs = torch.zeros(4, 6).double(), torch.tensor([-1, 1, -1, 1]).double()
    draws[:, 0] = 1.0 + 0.6 + signs * 2 * math.sqrt(3 / 4)
    assert math.isclose(posterior.error(draws), 0.3)
    draws[:, 0] = 1.0 + 0.5 * signs * 2 * math.sqrt(3 / 4)
    assert math.isclose(posterior.error(draws), math.log(2))
    draws[0, 0] = math.nan
    assert posterior.error(draws) == math.inf


def test_wrong_arguments_are_named():
    posterior = standard_normal()
    with pytest.raises(ValueError, match=r"x must have the shape \(draws, 6\), got \(6,\)"):
        posterior.log_density(torch.zeros(6))
    with pytest.raises(ValueError, match="'toy' has no reference draws"):
        posterior.error(torch.zeros(2, 6).double())
    with pytest.raises(ValueError, match="global_parameters must be the first parameters"):
        Posterior("toy", [Parameter("a"), Parameter("b")], lambda v: v["a"], global_parameters=["b"])
    with pytest.raises(ValueError, match="'none' is not known; give one of GLMM"):
        posteriors.load("none")
    with pytest.raises(ValueError, match="dim must be above the number of global unknowns, 5, got 5"):
        poisson_mixed_model(5)


def test_missing_data_says_where_it_was_searched(monkeypatch, tmp_path):
    monkeypatch.setenv("GNOMON_DATA", str(tmp_path))
    assert not posteriors.is_available()
    with pytest.raises(posteriors.PosteriorDataMissingError, match="set GNOMON_DATA to the folder that holds"):
        posteriors.load("arK-arK")


@needs_posteriordb
def test_every_reference_has_a_posterior_with_its_entries():
    assert set(posteriors.with_reference()) <= set(posteriors.names())
    assert len(posteriors.with_reference()) >= 30
    for name in posteriors.with_reference():
        posterior = posteriors.load(name)
        assert posterior.error(torch.randn(50, posterior.dim, dtype=torch.float64)) > 0


# ---------------------------------------------------------------------- generated
def test_generated_counts_have_the_density_of_scipy():
    """The counts are found from the gradient: ``y = d log_density / d alpha`` and two terms that are known."""
    posterior = poisson_mixed_model(40, seed=3)
    assert (posterior.dim, posterior.globals) == (40, 5)
    x = 0.3 * torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(3)
    covariates = torch.randn(3, 35, dtype=torch.float64, generator=generator).numpy()
    x.requires_grad_()
    density = posterior.log_density(x)
    gradient = torch.autograd.grad(density.sum(), x)[0].numpy()
    values = {key: value.detach().numpy() for key, value in posterior.to_constrained(x).items()}
    center = values["mu"][:, None] + values["beta"] @ covariates
    rate, sigma = 4 * torch.from_numpy(values["alpha"]).exp().numpy(), values["sigma"][:, None]
    counts = (gradient[:, 5:] + rate + (values["alpha"] - center) / sigma**2).round()
    assert (counts[0] == counts[1]).all()
    expected = stats.poisson.logpmf(counts, rate).sum(1) + stats.norm.logpdf(values["alpha"], center, sigma).sum(1)
    expected += stats.norm.logpdf(x.detach().numpy()[:, :5]).sum(1)
    assert torch.allclose(density.detach().diff(), torch.from_numpy(expected).diff(), rtol=1e-10)


@pytest.mark.parametrize("make", [poisson_mixed_model, item_response_model])
def test_generated_posteriors_are_reproducible_and_their_local_unknowns_independent(make):
    posterior = make(30, seed=1)
    x = 0.1 * torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hessian = torch.autograd.functional.hessian(lambda row: posterior.log_density(row[None]).sum(), x)
    local = hessian[posterior.globals :, posterior.globals :]
    assert torch.equal(local, local.diagonal().diag())
    assert torch.equal(posterior.log_density(x[None]), make(30, seed=1).log_density(x[None]))
    assert not torch.equal(posterior.log_density(x[None]), make(30, seed=2).log_density(x[None]))


def test_the_largest_generated_posterior_has_a_finite_gradient():
    posterior = posteriors.load("generated-poisson-100000")
    x = torch.zeros(1, posterior.dim, dtype=torch.float64, requires_grad=True)
    posterior.log_density(x).sum().backward()
    assert bool(x.grad.isfinite().all())
