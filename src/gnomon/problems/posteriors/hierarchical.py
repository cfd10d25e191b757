"""Hierarchical models: few global unknowns, and local ones that are independent given those, or in small groups.

The global parameters come first, so that a lower arrow factor has the structure of the posterior.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import binomial_logit, cauchy, gamma, inverse_gamma, normal, poisson_log
from .registry import posterior
from .store import read, reference
from .transforms import POSITIVE, interval


def positive(*names: str) -> list[Parameter]:
    return [Parameter(name, (), POSITIVE) for name in names]


def column(value: Tensor) -> Tensor:
    """Return a scalar of each draw as a column, to be combined with vectors."""
    return value[:, None]


# ---------------------------------------------------------------------- eight schools
def _schools_hyperprior(v: Values) -> Tensor:
    return normal(v["mu"], 0, 5) + cauchy(v["tau"], 5)


@posterior("eight_schools-eight_schools_centered")
def _schools(name: str) -> Posterior:
    data = read("eight_schools")

    def log_joint(v: Values) -> Tensor:
        log_local = normal(data["y"], v["theta"], data["sigma"]) + normal(v["theta"], column(v["mu"]), column(v["tau"]))
        return log_local.sum(-1) + _schools_hyperprior(v)

    parameters = [Parameter("mu"), *positive("tau"), Parameter("theta", (8,))]
    return Posterior(name, parameters, log_joint, reference=reference(name), global_parameters=["mu", "tau"])


@posterior("eight_schools-eight_schools_noncentered")
def _schools_noncentered(name: str) -> Posterior:
    data = read("eight_schools")

    def derived(v: Values) -> Values:
        return {"theta": column(v["mu"]) + column(v["tau"]) * v["theta_trans"]}

    def log_joint(v: Values) -> Tensor:
        log_local = normal(data["y"], derived(v)["theta"], data["sigma"]) + normal(v["theta_trans"], 0, 1)
        return log_local.sum(-1) + _schools_hyperprior(v)

    return Posterior(
        name,
        [Parameter("mu"), *positive("tau"), Parameter("theta_trans", (8,))],
        log_joint,
        derived=derived,
        reference=reference(name),
        global_parameters=["mu", "tau"],
    )


# ---------------------------------------------------------------------- radon
class GroupedSquares:
    """The log likelihood of ``y ~ normal(X b_g, sigma)`` with coefficients ``b_g`` of each group g.

    The sums of products of each group suffice. They are taken of the residuals r of the least squares solution c of all
    groups together, so that no large numbers are subtracted:
    ``sum (y - X b_g)^2 = sum_g (b_g - c)^T X_g^T X_g (b_g - c) - 2 (b_g - c)^T X_g^T r_g + r_g^T r_g``.
    """

    def __init__(self, design: Tensor, response: Tensor, group: Tensor, groups: int) -> None:
        self.center = torch.linalg.lstsq(design, response[:, None]).solution.squeeze(-1)
        left = response - design @ self.center
        zeros = design.new_zeros(groups, design.shape[1])
        self.gram = zeros.new_zeros(*zeros.shape, zeros.shape[1]).index_add(
            0, group, design[:, :, None] * design[:, None]
        )
        self.moment = zeros.index_add(0, group, design * left[:, None])
        self.rest = left.square().sum()
        self.count = len(response)

    def __call__(self, coefficients: Tensor, sigma: Tensor) -> Tensor:
        """Return the log likelihood at coefficients ``(draws, groups, k)``."""
        off = coefficients - self.center
        along = torch.einsum("gij,ngj->ngi", self.gram, off) - 2 * self.moment
        squares = (along * off).sum((1, 2)) + self.rest
        return -0.5 * squares / sigma.square() - self.count * sigma.log()


def _counties(name: str) -> tuple[dict[str, Tensor], Tensor, int]:
    data = read(name.split("-")[0])
    return data, data["county_idx"].long() - 1, int(data["J"])


@posterior(*(f"{data}-radon_hierarchical_intercept_centered" for data in ("radon_mn", "radon_all")))
def _radon_intercept(name: str) -> Posterior:
    """Define the model with an intercept of each county, and the slopes of uranium and of the floor in common."""
    data, county, J = _counties(name)
    X = torch.stack([torch.ones_like(data["log_uppm"]), data["log_uppm"], data["floor_measure"]], 1)
    likelihood = GroupedSquares(X, data["log_radon"], county, J)

    def log_joint(v: Values) -> Tensor:
        slopes = v["beta"][:, None].expand(-1, J, -1)
        log_likelihood = likelihood(torch.cat([v["alpha"][:, :, None], slopes], -1), v["sigma_y"])
        log_local = normal(v["alpha"], column(v["mu_alpha"]), column(v["sigma_alpha"])).sum(-1)
        log_prior = normal(v["sigma_alpha"], 0, 1) + normal(v["sigma_y"], 0, 1) + normal(v["mu_alpha"], 0, 10)
        return log_likelihood + log_local + log_prior + normal(v["beta"], 0, 10).sum(-1)

    common = [Parameter("mu_alpha"), Parameter("beta", (2,)), *positive("sigma_alpha", "sigma_y")]
    names = [parameter.name for parameter in common]
    return Posterior(name, [*common, Parameter("alpha", (J,))], log_joint, global_parameters=names)


@posterior(*(f"{data}-radon_variable_intercept_slope_centered" for data in ("radon_mn", "radon_all")))
def _radon_slope(name: str) -> Posterior:
    """Define the model with an intercept and a slope of each county. With all counties this has 777 unknowns."""
    data, county, J = _counties(name)
    X = torch.stack([torch.ones_like(data["floor_measure"]), data["floor_measure"]], 1)
    likelihood = GroupedSquares(X, data["log_radon"], county, J)

    def log_joint(v: Values) -> Tensor:
        log_likelihood = likelihood(torch.stack([v["alpha"], v["beta"]], -1), v["sigma_y"])
        for key in ("alpha", "beta"):
            center, spread = v[f"mu_{key}"], v[f"sigma_{key}"]
            log_local = normal(v[key], column(center), column(spread)).sum(-1)
            log_likelihood = log_likelihood + log_local + normal(center, 0, 10) + normal(spread, 0, 1)
        return log_likelihood + normal(v["sigma_y"], 0, 1)

    common = [Parameter("mu_alpha"), Parameter("mu_beta"), *positive("sigma_alpha", "sigma_beta", "sigma_y")]
    names = [parameter.name for parameter in common]
    local = [Parameter("alpha", (J,)), Parameter("beta", (J,))]
    return Posterior(name, [*common, *local], log_joint, global_parameters=names)


# ---------------------------------------------------------------------- rats
@posterior("rats_data-rats_model")
def _rats(name: str) -> Posterior:
    """Define the model of the growth of each rat: a line whose intercept and slope are normal in the population."""
    data = read("rats_data")
    N = int(data["N"])
    X = torch.stack([torch.ones_like(data["x"]), data["x"] - data["xbar"]], 1)
    likelihood = GroupedSquares(X, data["y"], data["rat"].long() - 1, N)

    def log_joint(v: Values) -> Tensor:
        log_density = likelihood(torch.stack([v["alpha"], v["beta"]], -1), v["sigma_y"])
        for key in ("alpha", "beta"):
            center, spread = v[f"mu_{key}"], v[f"sigma_{key}"]
            log_density = log_density + normal(v[key], column(center), column(spread)).sum(-1) + normal(center, 0, 100)
        return log_density

    common = [Parameter("mu_alpha"), Parameter("mu_beta"), *positive("sigma_y", "sigma_alpha", "sigma_beta")]
    names = [parameter.name for parameter in common]
    local = [Parameter("alpha", (N,)), Parameter("beta", (N,))]
    return Posterior(name, [*common, *local], log_joint, global_parameters=names)


# ---------------------------------------------------------------------- generalized linear mixed models
@posterior("GLMM_data-GLMM1_model")
def _sites(name: str) -> Posterior:
    """Define the model of counts at 235 sites in several years, whose log rate is normal among sites."""
    data = read("GLMM_data")
    sites = int(data["nsite"])
    site = data["obssite"].long() - 1
    total = torch.zeros(sites, dtype=torch.float64).index_add(0, site, data["obs"])
    visits = torch.zeros(sites, dtype=torch.float64).index_add(0, site, torch.ones_like(data["obs"]))

    def log_joint(v: Values) -> Tensor:
        alpha = v["alpha"]
        log_local = total * alpha - visits * alpha.exp() + normal(alpha, column(v["mu_alpha"]), column(v["sd_alpha"]))
        return log_local.sum(-1) + normal(v["mu_alpha"], 0, 10)

    parameters = [Parameter("mu_alpha"), Parameter("sd_alpha", (), interval(0, 5)), Parameter("alpha", (sites,))]
    return Posterior(name, parameters, log_joint, global_parameters=["mu_alpha", "sd_alpha"])


@posterior("GLMM_Poisson_data-GLMM_Poisson_model")
def _years(name: str) -> Posterior:
    """Define the model of counts in 40 years, with a cubic trend and a normal effect of each year.

    All priors are uniform.
    """
    data = read("GLMM_Poisson_data")
    powers = torch.stack([data["year"] ** power for power in range(4)])
    bounds = {"alpha": (-20, 20), "beta1": (-10, 10), "beta2": (-10, 20), "beta3": (-10, 10), "sigma": (0, 5)}

    def log_joint(v: Values) -> Tensor:
        trend = torch.stack([v["alpha"], v["beta1"], v["beta2"], v["beta3"]], 1) @ powers
        return (poisson_log(data["C"], trend + v["eps"]) + normal(v["eps"], 0, column(v["sigma"]))).sum(-1)

    common = [Parameter(key, (), interval(*ends)) for key, ends in bounds.items()]
    return Posterior(name, [*common, Parameter("eps", (int(data["n"]),))], log_joint, global_parameters=list(bounds))


@posterior("seeds_data-seeds_model")
def _seeds(name: str) -> Posterior:
    """Define the model of seeds that germinate on 21 plates.

    There are two treatments with an interaction, and a normal effect of each plate.
    """
    data = read("seeds_data")
    X = torch.stack([torch.ones_like(data["x1"]), data["x1"], data["x2"], data["x1"] * data["x2"]])

    def log_joint(v: Values) -> Tensor:
        effects = torch.stack([v["alpha0"], v["alpha1"], v["alpha2"], v["alpha12"]], 1)
        log_likelihood = binomial_logit(data["n"], data["N"], effects @ X + v["b"]).sum(-1)
        log_local = normal(v["b"], 0, column(v["tau"].rsqrt())).sum(-1)
        return log_likelihood + log_local + normal(effects, 0, 1e3).sum(-1) + gamma(v["tau"], 1e-3, 1e-3)

    effects = [Parameter(key) for key in ("alpha0", "alpha1", "alpha12", "alpha2")]
    common = [*effects, *positive("tau")]
    names = [parameter.name for parameter in common]
    return Posterior(name, [*common, Parameter("b", (int(data["I"]),))], log_joint, global_parameters=names)


@posterior("surgical_data-surgical_model")
def _surgical(name: str) -> Posterior:
    """Define the model of deaths after operations in twelve hospitals, whose logits are normal."""
    data = read("surgical_data")

    def log_joint(v: Values) -> Tensor:
        log_local = binomial_logit(data["r"], data["n"], v["b"])
        log_local = log_local + normal(v["b"], column(v["mu"]), column(v["sigmasq"].sqrt()))
        return log_local.sum(-1) + normal(v["mu"], 0, 1e3) + inverse_gamma(v["sigmasq"], 1e-3, 1e-3)

    parameters = [Parameter("mu"), *positive("sigmasq"), Parameter("b", (int(data["N"]),))]
    return Posterior(name, parameters, log_joint, global_parameters=["mu", "sigmasq"])
