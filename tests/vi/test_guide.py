"""The guide for Pyro models."""

import pytest
import torch

import gnomon
from gnomon.groups import Arrow, Dense

pytestmark = pytest.mark.slow
pyro = pytest.importorskip("pyro")
dist = pyro.distributions

Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
S = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(sigma, y=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.LogNormal(1.0, 0.5))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        return pyro.sample("y", dist.Normal(mu + tau * theta, sigma), obs=y)


def regression(x, y=None):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ weights, scale), obs=y)


def test_plates_give_the_arrow_and_the_guide_is_one_of_pyro():
    guide = gnomon.vi.AutoStructured(schools, seed=0, dtype=torch.float64)
    result = guide.fit(S, Y)
    assert result.posterior.structure == Arrow(10, 2)
    elbo = -pyro.infer.Trace_ELBO(num_particles=200, vectorize_particles=False).loss(schools, guide, S, Y)
    assert elbo == pytest.approx(result.elbo, abs=0.3)
    draws = pyro.infer.Predictive(schools, guide=guide, num_samples=400)(S)
    assert draws["y"].shape == (400, 8)
    assert set(guide.median()) == {"mu", "tau", "theta"}
    assert guide.quantiles([0.1, 0.9])["theta"].shape[-1] == 8


def test_regression_is_that_of_its_density():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(60, generator=generator)
    guide = gnomon.vi.AutoStructured(regression, seed=0)
    fit = guide.fit(x, y)
    assert fit.posterior.structure == Dense(4)
    assert fit.posterior.dtype == torch.float32

    def density(v):
        normal = dist.Normal((x @ v["weights"].mT).mT, v["scale"].unsqueeze(-1))
        prior = dist.Normal(0.0, 1.0).log_prob(v["weights"]).sum(-1) + dist.HalfNormal(1.0).log_prob(v["scale"])
        return normal.log_prob(y).sum(-1) + prior

    constraints = torch.distributions.constraints
    plain = gnomon.vi.fit(
        density, parameters={"weights": 3, "scale": constraints.positive}, dtype=torch.float32, seed=0
    )
    assert fit.elbo == pytest.approx(plain.elbo, abs=0.05)


def test_a_plate_that_subsamples_is_refused():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=4) as rows:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[rows])

    with pytest.raises(ValueError, match="plate 'data' draws 4 of 8 rows"):
        gnomon.vi.AutoStructured(model, seed=0).fit(Y)


def test_a_guide_must_be_fitted_first():
    guide = gnomon.vi.AutoStructured(schools)
    with pytest.raises(RuntimeError, match="has not been fitted"):
        guide(S, Y)
