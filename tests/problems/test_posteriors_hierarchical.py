"""Hierarchical models and item response: log densities against SciPy's, and the independence of local unknowns."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit

from gnomon.problems.posteriors import load, names
from support.posteriors import assert_twin_agrees, needs_posteriordb

normal = stats.norm.logpdf


def schools(d, v):
    log_density = normal(d["y"], v["theta"], d["sigma"]).sum() + normal(v["theta"], v["mu"], v["tau"]).sum()
    return log_density + normal(v["mu"], 0, 5) + stats.halfcauchy.logpdf(v["tau"], scale=5)


def schools_noncentered(d, v):
    """The density of the effects on their scale, and the determinant of the map from their standardized form."""
    return schools(d, {**v, "theta": v["mu"] + v["tau"] * v["theta_trans"]}) + 8 * np.log(v["tau"])


def radon_intercept(d, v):
    county = d["county_idx"].astype(int) - 1
    means = v["alpha"][county] + d["log_uppm"] * v["beta"][0] + d["floor_measure"] * v["beta"][1]
    log_density = normal(d["log_radon"], means, v["sigma_y"]).sum()
    log_density += normal(v["alpha"], v["mu_alpha"], v["sigma_alpha"]).sum()
    log_density += stats.halfnorm.logpdf([v["sigma_alpha"], v["sigma_y"]]).sum()
    return log_density + normal(v["mu_alpha"], 0, 10) + normal(v["beta"], 0, 10).sum()


def radon_slope(d, v):
    county = d["county_idx"].astype(int) - 1
    means = v["alpha"][county] + d["floor_measure"] * v["beta"][county]
    log_density = normal(d["log_radon"], means, v["sigma_y"]).sum()
    log_density += normal(v["alpha"], v["mu_alpha"], v["sigma_alpha"]).sum()
    log_density += normal(v["beta"], v["mu_beta"], v["sigma_beta"]).sum()
    log_density += stats.halfnorm.logpdf([v["sigma_alpha"], v["sigma_beta"], v["sigma_y"]]).sum()
    return log_density + normal([v["mu_alpha"], v["mu_beta"]], 0, 10).sum()


def rats(d, v):
    rat = d["rat"].astype(int) - 1
    means = v["alpha"][rat] + v["beta"][rat] * (d["x"] - d["xbar"])
    log_density = normal(d["y"], means, v["sigma_y"]).sum() + normal([v["mu_alpha"], v["mu_beta"]], 0, 100).sum()
    log_density += normal(v["alpha"], v["mu_alpha"], v["sigma_alpha"]).sum()
    return log_density + normal(v["beta"], v["mu_beta"], v["sigma_beta"]).sum()


def sites(d, v):
    rates = np.exp(v["alpha"][d["obssite"].astype(int) - 1])
    log_density = stats.poisson.logpmf(d["obs"], rates).sum() + normal(v["mu_alpha"], 0, 10)
    return log_density + normal(v["alpha"], v["mu_alpha"], v["sd_alpha"]).sum()


def years(d, v):
    t = d["year"]
    log_rates = v["alpha"] + v["beta1"] * t + v["beta2"] * t**2 + v["beta3"] * t**3 + v["eps"]
    return stats.poisson.logpmf(d["C"], np.exp(log_rates)).sum() + normal(v["eps"], 0, v["sigma"]).sum()


def seeds(d, v):
    a, b = d["x1"], d["x2"]
    logits = v["alpha0"] + v["alpha1"] * a + v["alpha2"] * b + v["alpha12"] * a * b + v["b"]
    log_density = stats.binom.logpmf(d["n"], d["N"], expit(logits)).sum()
    log_density += normal([v[key] for key in ("alpha0", "alpha1", "alpha2", "alpha12")], 0, 1e3).sum()
    log_density += normal(v["b"], 0, 1 / np.sqrt(v["tau"])).sum()
    return log_density + stats.gamma.logpdf(v["tau"], 1e-3, scale=1e3)


def surgical(d, v):
    log_density = stats.binom.logpmf(d["r"], d["n"], expit(v["b"])).sum() + normal(v["mu"], 0, 1e3)
    log_density += normal(v["b"], v["mu"], np.sqrt(v["sigmasq"])).sum()
    return log_density + stats.invgamma.logpdf(v["sigmasq"], 1e-3, scale=1e-3)


def two_parameters(d, v):
    log_density = stats.halfcauchy.logpdf([v[f"sigma_{key}"] for key in ("theta", "a", "b")], scale=2).sum()
    log_density += normal(v["theta"], 0, v["sigma_theta"]).sum() + normal(v["mu_b"], 0, 5)
    log_density += stats.lognorm.logpdf(v["a"], v["sigma_a"]).sum() + normal(v["b"], v["mu_b"], v["sigma_b"]).sum()
    for i in range(d["I"]):
        log_density += stats.bernoulli.logpmf(d["y"][i], expit(v["a"][i] * (v["theta"] - v["b"][i]))).sum()
    return log_density


def law_school(d, v):
    log_density = normal(v["alpha"], 0, 100).sum() + normal(v["theta"]).sum() + normal(v["beta"], 0, 100)
    start = 0
    for pattern, end in zip(d["response"], d["culm"].astype(int), strict=True):
        p = expit(v["beta"] * v["theta"][start:end, None] - v["alpha"])
        log_density += stats.bernoulli.logpmf(pattern, p).sum()
        start = end
    return log_density


TWINS = {
    "eight_schools-eight_schools_centered": schools,
    "eight_schools-eight_schools_noncentered": schools_noncentered,
    "radon_mn-radon_hierarchical_intercept_centered": radon_intercept,
    "radon_all-radon_hierarchical_intercept_centered": radon_intercept,
    "radon_mn-radon_variable_intercept_slope_centered": radon_slope,
    "radon_all-radon_variable_intercept_slope_centered": radon_slope,
    "rats_data-rats_model": rats,
    "GLMM_data-GLMM1_model": sites,
    "GLMM_Poisson_data-GLMM_Poisson_model": years,
    "seeds_data-seeds_model": seeds,
    "surgical_data-surgical_model": surgical,
    "irt_2pl-irt_2pl": two_parameters,
    "lsat_data-lsat_model": law_school,
}


@needs_posteriordb
@pytest.mark.parametrize("name", TWINS)
def test_log_density_is_that_of_scipy(name):
    assert_twin_agrees(name, TWINS[name])


PAIRS = ("radon_mn-radon_variable", "rats")
"""Models in which a group has two local unknowns, which depend on each other."""


@needs_posteriordb
@pytest.mark.parametrize("name", [name for name in TWINS if "all" not in name])
def test_local_unknowns_are_independent_given_the_global_ones(name):
    """The Hessian couples a local unknown with the global ones, with itself, and with no other but its pair."""
    posterior = load(name)
    x = 0.1 * torch.randn(posterior.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hessian = torch.autograd.functional.hessian(lambda row: posterior.log_density(row[None]).sum(), x)
    local = hessian[posterior.globals :, posterior.globals :]
    if name.startswith(PAIRS):
        groups = len(local) // 2
        local = local.unflatten(1, (2, groups)).unflatten(0, (2, groups)).permute(1, 3, 0, 2)
        local = local.abs().amax((2, 3))
    assert bool((local - local.diagonal().diag()).abs().max() <= 1e-9 * local.abs().max())


def test_every_posterior_is_tested_or_generated():
    from test_posteriors_regression import TWINS as REGRESSIONS
    from test_posteriors_series import TWINS as SERIES

    equations = {"hudson_lynx_hare-lotka_volterra", "one_comp_mm_elim_abs-one_comp_mm_elim_abs"}
    generated = {name for name in names() if name.startswith("generated-")}
    assert set(names()) == {*TWINS, *REGRESSIONS, *SERIES} | equations | generated
