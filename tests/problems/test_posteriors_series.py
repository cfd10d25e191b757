"""Hidden Markov models, Gaussian processes, differential equations: log densities against SciPy's and plain loops."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import solve_ivp

from gnomon.problems.posteriors import load
from gnomon.problems.posteriors.markov import log_evidence
from support.posteriors import assert_twin_agrees, needs_posteriordb


# ---------------------------------------------------------------------- hidden Markov models
@pytest.mark.parametrize("times", [2, 3, 6, 7])
def test_evidence_is_the_sum_over_all_paths(times):
    generator = torch.Generator().manual_seed(times)
    transition = torch.rand(3, 3, 3, dtype=torch.float64, generator=generator)
    emission = torch.rand(3, times, 3, dtype=torch.float64, generator=generator)
    for draw, value in enumerate(log_evidence(transition.log(), emission.log())):
        total = 0.0
        for path in itertools.product(range(3), repeat=times):
            product = math.prod(float(emission[draw, t, state]) for t, state in enumerate(path))
            total += product * math.prod(float(transition[draw, a, b]) for a, b in itertools.pairwise(path))
        assert math.isclose(float(value), math.log(total), rel_tol=1e-12)


def forward(transition, log_emission):
    """The forward algorithm with scaled probabilities, one time after another."""
    log_density, state = 0.0, np.ones(2)
    for t, row in enumerate(log_emission):
        state = (state if t == 0 else state @ transition) * np.exp(row - row.max())
        log_density += np.log(state.sum()) + row.max()
        state = state / state.sum()
    return log_density


def hmm_example(d, v):
    emission = stats.norm.logpdf(d["y"][:, None], v["mu"], 1)
    return forward(np.stack([v["theta1"], v["theta2"]]), emission) + stats.norm.logpdf(v["mu"], [3, 10], 1).sum()


def drive_prior(d, v):
    log_prior = stats.norm.logpdf(v["phi"], [0, 3]).sum() + stats.norm.logpdf(v["lambda"], [0, 3]).sum()
    return log_prior + sum(stats.dirichlet.logpdf(v[f"theta{k + 1}"], d["alpha"][k]) for k in (0, 1))


def drive_exponential(d, v):
    emission = stats.expon.logpdf(d["u"][:, None], scale=1 / v["phi"])
    emission = emission + stats.expon.logpdf(d["v"][:, None], scale=1 / v["lambda"])
    return forward(np.stack([v["theta1"], v["theta2"]]), emission) + drive_prior(d, v)


def drive_normal(d, v):
    emission = stats.norm.logpdf(d["u"][:, None], v["phi"], d["tau"])
    emission = emission + stats.norm.logpdf(d["v"][:, None], v["lambda"], d["rho"])
    return forward(np.stack([v["theta1"], v["theta2"]]), emission) + drive_prior(d, v)


# ---------------------------------------------------------------------- Gaussian processes
def process_covariance(d, v):
    x = d["x"]
    return v["alpha"] ** 2 * np.exp(-0.5 * ((x[:, None] - x) / v["rho"]) ** 2)


def process_prior(v):
    return stats.gamma.logpdf(v["rho"], 25, scale=1 / 4) + stats.halfnorm.logpdf(v["alpha"], scale=2)


def process_regression(d, v):
    covariance = process_covariance(d, v) + v["sigma"] * np.eye(d["N"])
    log_likelihood = stats.multivariate_normal.logpdf(d["y"], cov=covariance)
    return log_likelihood + process_prior(v) + stats.halfnorm.logpdf(v["sigma"])


def process_counts(d, v):
    f = np.linalg.cholesky(process_covariance(d, v) + 1e-10 * np.eye(d["N"])) @ v["f_tilde"]
    return stats.poisson.logpmf(d["k"], np.exp(f)).sum() + process_prior(v) + stats.norm.logpdf(v["f_tilde"]).sum()


TWINS = {
    "hmm_example-hmm_example": hmm_example,
    "bball_drive_event_0-hmm_drive_0": drive_exponential,
    "bball_drive_event_1-hmm_drive_1": drive_normal,
    "gp_pois_regr-gp_regr": process_regression,
    "gp_pois_regr-gp_pois_regr": process_counts,
}


@needs_posteriordb
@pytest.mark.parametrize("name", TWINS)
def test_log_density_is_that_of_scipy(name):
    assert_twin_agrees(name, TWINS[name], tolerance=1e-7 if "pois_regr-gp_pois" in name else 1e-9)


@needs_posteriordb
def test_a_covariance_without_a_cholesky_factor_has_no_density_and_leaves_other_draws_alone():
    posterior = load("gp_pois_regr-gp_pois_regr")
    x = torch.zeros(2, posterior.dim, dtype=torch.float64)
    x[0, :2] = 15.0  # a length scale and an amplitude of three million
    x.requires_grad_()
    value = posterior.log_density(x)
    assert value[0] == -math.inf
    gradient = torch.autograd.grad(value[1], x)[0]
    assert bool(value[1].isfinite())
    assert bool(gradient[1].isfinite().all())


# ---------------------------------------------------------------------- differential equations
def integrated(field, start, times):
    return solve_ivp(field, (0, times[-1]), start, t_eval=times, rtol=1e-10, atol=1e-12, method="LSODA").y


def lynx_and_hare(d, v):
    a, b, c, e = v["theta"]
    z = integrated(lambda t, z: [(a - b * z[1]) * z[0], (e * z[0] - c) * z[1]], v["z_init"], d["ts"])
    log_density = stats.norm.logpdf(v["theta"], [1, 0.05, 1, 0.05], [0.5, 0.05, 0.5, 0.05]).sum()
    log_density += stats.lognorm.logpdf(v["sigma"], 1, scale=np.exp(-1)).sum()
    log_density += stats.lognorm.logpdf(v["z_init"], 1, scale=10).sum()
    for k in (0, 1):
        log_density += stats.lognorm.logpdf(d["y_init"][k], v["sigma"][k], scale=v["z_init"][k])
        log_density += stats.lognorm.logpdf(d["y"][:, k], v["sigma"][k], scale=z[k]).sum()
    return log_density


def absorption(d, v):
    def field(t, C):
        return [np.exp(-v["k_a"] * t) * d["D"] * v["k_a"] / d["V"] - v["V_m"] / d["V"] * C[0] / (v["K_m"] + C[0])]

    (C,) = integrated(field, [0.0], d["times"])
    log_likelihood = stats.lognorm.logpdf(d["C_hat"], v["sigma"], scale=C).sum()
    return log_likelihood + sum(stats.halfcauchy.logpdf(v[key]) for key in ("k_a", "K_m", "V_m", "sigma"))


@needs_posteriordb
def test_predators_and_prey_as_scipy_integrates_them():
    """The tolerance is that of the fixed steps, at points as far apart as the reference draws."""
    center = torch.tensor([0.55, 0.028, 0.8, 0.024, 34, 5.9, 0.25, 0.25], dtype=torch.float64).log()
    assert_twin_agrees("hudson_lynx_hare-lotka_volterra", lynx_and_hare, center, 0.1, tolerance=2e-3)


@needs_posteriordb
def test_absorption_and_elimination_as_scipy_integrates_them():
    center = torch.tensor([0.76, 1.0, 0.9, 0.13], dtype=torch.float64).log()
    assert_twin_agrees("one_comp_mm_elim_abs-one_comp_mm_elim_abs", absorption, center, 0.5, tolerance=1e-3)
