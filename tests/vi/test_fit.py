"""Fits from end to end: accuracy, interfaces, failures."""

import math
import re

import pytest
import torch
from torch.distributions import constraints
from torch.utils.data import DataLoader, TensorDataset

import gnomon
from gnomon.groups import (
    Arrow,
    BlockDiagonal,
    BlockTriangular,
    Dense,
    Diagonal,
    Fixed,
    Heisenberg,
    LowRank,
    Toeplitz,
    Triangular,
)
from gnomon.vi.start import fit_quadratic

torch.manual_seed(0)
D = 5
ROOT = torch.randn(D, D, dtype=torch.float64)
PRECISION = ROOT @ ROOT.mT + 0.1 * torch.eye(D, dtype=torch.float64)
MEAN = 3 * torch.randn(D, dtype=torch.float64)
COVARIANCE = torch.linalg.inv(PRECISION)
STRUCTURES = [
    Diagonal(D),
    Fixed(D),
    Triangular,
    Triangular(D, upper=True),
    Arrow(D, 2),
    Toeplitz(D),
    Heisenberg(D, 1, 1),
    BlockDiagonal(D, 3),
    BlockTriangular((Dense(1), BlockDiagonal(4, 2))),
    LowRank(D, 2),
]
EVIDENCE = 0.5 * D * math.log(2 * math.pi) - 0.5 * float(torch.logdet(PRECISION))


def gaussian(x):
    return -0.5 * ((x - MEAN) @ PRECISION * (x - MEAN)).sum(-1)


def logistic(d=6, n=200):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = (torch.rand(n, generator=generator, dtype=torch.float64) < torch.sigmoid(x[:, 0] - x[:, 1])).double()
    return x, y


def log_likelihood(w, x, y):
    a = w @ x.mT
    return (y * a - torch.nn.functional.softplus(a)).sum(-1)


def log_prior(w):
    return -0.5 * w.square().sum(-1)


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("start", ["mode", "zero"])
@pytest.mark.parametrize("structure", ["full", "triangular", "auto"])
def test_a_gaussian_target_is_found_exactly(structure, form, start):
    fit = gnomon.vi.fit(gaussian, D, structure=structure, form=form, start=start, seed=0, tolerance=1e-6)
    assert fit.converged
    assert fit.elbo == pytest.approx(EVIDENCE, abs=1e-4)
    torch.testing.assert_close(fit.posterior.loc, MEAN, atol=1e-2, rtol=0)
    torch.testing.assert_close(fit.posterior.covariance(), COVARIANCE, atol=0, rtol=0.05)
    assert fit.khat < 0.5


@pytest.mark.parametrize("gradients", ["path", "price"])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_options_lead_to_the_same_optimum(gradients, momentum):
    fit = gnomon.vi.fit(gaussian, D, gradients=gradients, momentum=momentum, start="zero", seed=0)
    assert fit.elbo == pytest.approx(EVIDENCE, abs=0.02)


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_structures_come_to_their_own_optimum(structure, form):
    fit = gnomon.vi.fit(gaussian, D, structure=structure, form=form, seed=0)
    q = fit.posterior
    assert fit.elbo == pytest.approx(exact_bound(q), abs=6 * fit.elbo_error + 1e-6)
    if structure == Diagonal(D) and form == "covariance":  # mean field: variances are those given all others
        torch.testing.assert_close(q.covariance().diagonal(), 1 / PRECISION.diagonal(), rtol=0.1, atol=0)
    best = gnomon.Gaussian(q.structure, loc=MEAN, form=form, dtype=torch.float64)
    fit_quadratic(best, PRECISION)
    assert exact_bound(best) - exact_bound(q) < 0.01


@torch.no_grad()
def exact_bound(q):
    """The ELBO of a Gaussian for the Gaussian target, in closed form."""
    difference = q.loc - MEAN
    return float(-0.5 * (PRECISION * q.covariance()).sum() - 0.5 * difference @ PRECISION @ difference + q.entropy())


def test_functions_of_one_draw_are_mapped():
    batched = gnomon.vi.fit(gaussian, D, seed=0)
    single = gnomon.vi.fit(lambda x: -0.5 * (x - MEAN) @ PRECISION @ (x - MEAN), D, seed=0)
    assert single.elbo == pytest.approx(batched.elbo, abs=1e-6)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_any_rate_comes_near_the_optimum(rate):
    x, y = logistic()
    best = gnomon.vi.fit(lambda w: log_likelihood(w, x, y) + log_prior(w), 6, seed=1, tolerance=1e-3)
    fit = gnomon.vi.fit(lambda w: log_likelihood(w, x, y) + log_prior(w), 6, seed=0, rate=rate)
    assert fit.elbo == pytest.approx(best.elbo, abs=0.05)


@pytest.mark.slow
def test_breast_cancer_comes_near_the_optimum_at_any_rate():
    """The example of README.md: the bound is within 0.05 of the optimum from a rate of 0.01 to one of 0.5."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = map(torch.tensor, datasets.load_breast_cancer(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0)

    def log_density(w):
        likelihood = torch.distributions.Bernoulli(logits=w[:, 1:] @ x.T + w[:, :1])
        return likelihood.log_prob(y.double()).sum(-1) - w.square().sum(-1) / 2

    best = gnomon.vi.fit(log_density, 31, seed=9, tolerance=2e-3, max_steps=2000, evaluation_draws=20000)
    assert best.converged
    for rate in (0.01, 0.03, 0.1, 0.3, 0.5):
        fit = gnomon.vi.fit(log_density, 31, seed=0, rate=rate, evaluation_draws=20000)
        assert fit.elbo == pytest.approx(best.elbo, abs=0.05)


def test_batches_in_a_list_need_their_number_and_estimate_the_whole():
    """With all data in every batch the fit is that of the whole; without num_data nobody knows how many there are."""
    x, y = logistic(d=3, n=60)
    whole = gnomon.vi.fit(lambda w: log_likelihood(w, x, y) + log_prior(w), 3, seed=0, start="zero")
    halves = [(x[:30], y[:30]), (x[30:], y[30:])]
    options = {"log_prior": log_prior, "seed": 0, "max_steps": 200, "tolerance": 0.5}
    twice = gnomon.vi.fit(log_likelihood, 3, data=[(x, y)] * 2, num_data=60, **options)
    torch.testing.assert_close(twice.posterior.loc, whole.posterior.loc, atol=0.1, rtol=0)
    tempered = gnomon.vi.fit(log_likelihood, 3, data=halves, num_data=60, temperature=4.0, **options)
    assert float(tempered.posterior.covariance().logdet()) > float(whole.posterior.covariance().logdet()) + 2
    with pytest.raises(ValueError, match="pass num_data="):
        gnomon.vi.fit(log_likelihood, 3, data=halves, log_prior=log_prior)


def test_batches_of_data_come_to_the_same_posterior():
    x, y = logistic(d=3, n=400)
    whole = gnomon.vi.fit(lambda w: log_likelihood(w, x, y) + log_prior(w), 3, seed=0)
    loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
    fit = gnomon.vi.fit(log_likelihood, 3, data=loader, log_prior=log_prior, seed=0, max_steps=400, tolerance=0.5)
    torch.testing.assert_close(fit.posterior.loc, whole.posterior.loc, atol=0.08, rtol=0)
    assert fit.elbo == pytest.approx(whole.elbo, abs=0.2)
    with pytest.warns(UserWarning, match="take larger batches"):
        early = gnomon.vi.fit(log_likelihood, 3, data=loader, log_prior=log_prior, seed=0, max_steps=8)
    assert "take larger batches" in early.summary()


def test_temperature_scales_the_covariance():
    cold = gnomon.vi.fit(gaussian, D, temperature=0.25, seed=0, tolerance=1e-5)
    torch.testing.assert_close(cold.posterior.covariance(), 0.25 * COVARIANCE, rtol=0.05, atol=0)


def test_a_seed_repeats_a_fit_and_none_follows_torch():
    first, second = (gnomon.vi.fit(gaussian, D, seed=3) for _ in range(2))
    assert torch.equal(first.posterior.frame, second.posterior.frame)
    torch.manual_seed(5)
    third = gnomon.vi.fit(gaussian, D)
    torch.manual_seed(5)
    assert torch.equal(third.posterior.frame, gnomon.vi.fit(gaussian, D).posterior.frame)


def test_a_fit_goes_on_from_another_and_leaves_that_alone():
    first = gnomon.vi.fit(gaussian, D, seed=0)
    before = first.posterior.frame.clone()
    second = gnomon.vi.fit(gaussian, D, structure=first.posterior.structure, start=first.posterior, seed=1)
    assert len(second.history) == 4
    assert torch.equal(first.posterior.frame, before)
    with pytest.raises(ValueError, match="does not fit"):
        gnomon.vi.fit(gaussian, D, structure="full", start=gnomon.Gaussian(3))


def test_history_has_an_entry_for_each_step():
    fit = gnomon.vi.fit(gaussian, D, seed=0)
    lengths = {name: len(values) for name, values in vars(fit.history).items()}
    assert set(lengths.values()) == {len(fit.history)}
    assert fit.history.gradient_evaluations[-1] <= fit.counts.gradient_evaluations


def test_two_modes_the_better_is_taken_and_told():
    def two(x):
        far = torch.stack([-0.5 * (x - c).square().sum(-1) / s**2 for c, s in ((-8.0, 0.5), (1.5, 0.02))], -1)
        return (far + torch.tensor([40.0, 0.0], dtype=x.dtype)).logsumexp(-1)

    fit = gnomon.vi.fit(two, 2, start="mode", seed=0, searches=20)
    assert float(fit.posterior.loc.mean()) == pytest.approx(-8.0, abs=0.3)


def test_summary_has_names_numbers_and_a_verdict():
    fit = gnomon.vi.fit(
        lambda v: -0.5 * v["beta"].square().sum(-1) - v["tau"] ** 2,
        parameters={"beta": 2, "tau": constraints.positive},
        seed=0,
    )
    text = fit.summary()
    for word in ("beta[0]", "tau", "mean", "95%", "Converged", "k-hat"):
        assert word in text
    assert "and 2 more" in fit.summary(most=1)
    assert re.search(r"elbo=-?\d", repr(fit))


def test_resampled_draws_correct_a_skewed_posterior():
    # An exponential distribution on the log scale: skewed.
    fit = gnomon.vi.fit(lambda v: -v["t"], parameters={"t": constraints.positive}, seed=0, evaluation_draws=20000)
    plain, corrected = (float(fit.draws(20000, resample=flag)["t"].mean()) for flag in (False, True))
    assert abs(corrected - 1) < 0.06
    assert abs(plain - 1) > abs(corrected - 1)


def test_progress_is_told():
    seen = []
    gnomon.vi.fit(gaussian, D, seed=0, start="zero", progress=lambda *report: seen.append(report))
    steps, elbo, khat, seconds = seen[-1]
    assert steps % 4 == 0
    assert elbo == pytest.approx(EVIDENCE, abs=1)
    assert seconds > 0
    assert not math.isnan(khat)


def test_a_bar_is_shown(capsys):
    pytest.importorskip("rich")
    gnomon.vi.fit(gaussian, D, seed=0, progress=True)
    assert "elbo" in capsys.readouterr().err


def test_lines_are_shown_without_rich(capsys, monkeypatch):
    monkeypatch.setattr("gnomon.vi.progress.importlib.util.find_spec", lambda name: None)
    gnomon.vi.fit(gaussian, D, seed=0, progress=True)
    assert "k-hat" in capsys.readouterr().err


@pytest.mark.slow
def test_draws_go_to_arviz():
    pytest.importorskip("arviz")
    fit = gnomon.vi.fit(
        lambda v: -0.5 * v["b"].square().sum((-1, -2)) - v["t"],
        parameters={"b": (2, 3), "t": constraints.positive},
        seed=0,
    )
    data = fit.to_arviz(50)
    assert data.posterior["b"].shape == (1, 50, 2, 3)
    assert data.posterior["t"].shape == (1, 50)


# ---------------------------------------------------------------------- failures
def test_draws_without_a_density_are_left_out_and_counted():
    def half_line(x):
        return torch.where(x[:, 0] > -1, -0.5 * x.square().sum(-1), torch.nan)

    fit = gnomon.vi.fit(half_line, 2, structure="diagonal", seed=0, max_steps=40, start="zero")
    assert fit.counts.nonfinite_draws > 0
    assert "not finite" in fit.summary()
    assert bool(fit.posterior.frame.isfinite().all())


def test_draws_beyond_their_constraints_are_left_out_and_counted():
    """In single precision ``exp(-104)`` is 0, which is not positive."""
    fit = gnomon.vi.fit(
        lambda v: -0.5 * (v["tau"].log() / 60).square() - v["tau"].log(),
        parameters={"tau": constraints.positive},
        dtype=torch.float32,
        seed=0,
        start="zero",
        max_steps=60,
    )
    assert fit.counts.violating_draws > 0
    assert "left their constraints" in fit.summary()
    assert bool(fit.posterior.frame.isfinite().all())


def test_a_density_that_is_never_finite_is_an_error():
    with pytest.raises(gnomon.vi.DensityError, match="not finite at zero"):
        gnomon.vi.fit(lambda x: (x.sum(-1) - 1e6).log(), 2)
    with pytest.raises(gnomon.vi.DensityError, match="not finite at any draw"):
        gnomon.vi.fit(lambda x: torch.where((x == 0).all(-1), x.sum(-1), torch.nan), 2, start="zero")

    with pytest.raises(gnomon.vi.DensityError, match="not finite at any draw"):
        gnomon.vi.fit(lambda x: x.exp().sum(-1), 2, seed=0)


def test_a_density_without_a_gradient_is_an_error():
    for density in (lambda x: -x.detach().square().sum(-1), lambda x: torch.zeros(len(x), dtype=x.dtype)):
        with pytest.raises(gnomon.vi.DensityError, match="has no gradient"):
            gnomon.vi.fit(density, 2)


@pytest.mark.parametrize("start", ["zero", "mode"])
def test_an_improper_posterior_runs_away(start):
    with pytest.raises(gnomon.vi.RunawayError, match="coordinate 1"):
        gnomon.vi.fit(lambda x: -0.5 * x[:, 0].square() + 0 * x[:, 1], 2, start=start, structure="diagonal", seed=0)
    with pytest.raises(gnomon.vi.RunawayError, match="runs away"):
        gnomon.vi.fit(lambda x: x.sum(-1), 2, start=start, seed=0)


def test_the_smallest_rates_of_single_precision_are_taken():
    options = {"dtype": torch.float32, "start": "zero", "max_steps": 3}
    with pytest.warns(UserWarning, match="max_steps"):
        fit = gnomon.vi.fit(lambda x: -x.square().sum(-1), 3, rate=1e-39, **options)
    assert bool(fit.posterior.frame.isfinite().all())


def test_a_fit_that_does_not_converge_warns_and_says_so():
    with pytest.warns(UserWarning, match="max_steps=4"):
        fit = gnomon.vi.fit(gaussian, D, start="zero", max_steps=4, seed=0)
    assert not fit.converged
    assert "NOT converged" in fit.summary()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either dim or parameters"),
        ({"dim": 2, "parameters": {"a": 2}}, "either dim or parameters"),
        ({"dim": 0}, "dim must be a positive integer"),
        ({"dim": D, "rate": 3.0}, "rate must be above 0"),
        ({"dim": D, "momentum": 1.0}, "momentum must be"),
        ({"dim": D, "draws": 2}, "draws must be at least 4"),
        ({"dim": D, "form": "other"}, "form must be"),
        ({"dim": D, "gradients": "finite"}, "gradients must be"),
        ({"dim": D, "start": "end"}, "start must be"),
        ({"dim": D, "start": torch.zeros(2)}, "start has shape"),
        ({"dim": D, "temperature": 0.0}, "temperature must be positive"),
        ({"dim": D, "num_data": 3}, "log_prior and num_data"),
        ({"dim": D, "data": [1]}, "needs log_prior"),
        ({"dim": D, "tolerance": 0.0}, "tolerance must be positive"),
        ({"dim": D, "max_steps": 0}, "max_steps must be"),
        ({"dim": D, "structure": "square"}, "structure must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        gnomon.vi.fit(gaussian, **arguments)


def test_an_unknown_setting_is_named():
    with pytest.raises(TypeError, match="does not know the setting 'lr'; the settings are form, start"):
        gnomon.vi.fit(gaussian, D, lr=0.1)


@pytest.mark.parametrize(
    ("density", "message"),
    [
        (lambda x: x, "one number for each draw"),
        (lambda x: x.float() @ PRECISION, "pass dtype="),
        (lambda x: 1.0, "must return a tensor"),
    ],
)
def test_bad_densities_are_named(density, message):
    with pytest.raises(ValueError, match=message):
        gnomon.vi.fit(density, D)
