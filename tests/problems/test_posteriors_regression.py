"""Normal regressions: log densities against SciPy's, and moments under importance weights against reference draws."""

import numpy as np
import pytest
import torch
from scipy import stats

from gnomon.problems.posteriors import load
from support.posteriors import assert_twin_agrees, needs_posteriordb

pytestmark = needs_posteriordb


def half_cauchy(sigma):
    return stats.halfcauchy.logpdf(sigma, scale=2.5)


def line(y, means, sigma):
    return stats.norm.logpdf(y, means, sigma).sum()


def earn(data, v):
    b = v["beta"]
    return line(data["earn"], b[0] + b[1] * data["height"], v["sigma"])


def log_earn(data, v, means):
    return line(np.log(data["earn"]), means, v["sigma"])


def log_earn_height(data, v):
    b = v["beta"]
    return log_earn(data, v, b[0] + b[1] * data["height"])


def log_earn_height_male(data, v):
    b = v["beta"]
    return log_earn(data, v, b[0] + b[1] * data["height"] + b[2] * data["male"])


def log_earn_log_height(data, v):
    b = v["beta"]
    return log_earn(data, v, b[0] + b[1] * np.log(data["height"]) + b[2] * data["male"])


def log_earn_interaction(data, v):
    b, h = v["beta"], data["height"]
    z = (h - np.mean(h)) / np.std(h, ddof=1)
    return log_earn(data, v, b[0] + b[1] * z + b[2] * data["male"] + b[3] * z * data["male"])


def kids_school(data, v):
    b, s = v["beta"], v["sigma"]
    return line(data["kid_score"], b[0] + b[1] * data["mom_hs"], s) + half_cauchy(s)


def kids_iq(data, v):
    b, s = v["beta"], v["sigma"]
    return line(data["kid_score"], b[0] + b[1] * data["mom_iq"], s) + half_cauchy(s)


def kids_both(data, v):
    b, s = v["beta"], v["sigma"]
    return line(data["kid_score"], b[0] + b[1] * data["mom_hs"] + b[2] * data["mom_iq"], s) + half_cauchy(s)


def kids_interaction(data, v):
    b, s, hs, iq = v["beta"], v["sigma"], data["mom_hs"], data["mom_iq"]
    return line(data["kid_score"], b[0] + b[1] * hs + b[2] * iq + b[3] * hs * iq, s) + half_cauchy(s)


def kids_centered(data, v):
    b, hs, iq = v["beta"], data["mom_hs"] - 0.5, data["mom_iq"] - 100
    return line(data["kid_score"], b[0] + b[1] * hs + b[2] * iq + b[3] * hs * iq, v["sigma"])


def kids_standardized(data, v):
    b, hs, iq = v["beta"], *((data[k] - data[k].mean()) / (2 * data[k].std(ddof=1)) for k in ("mom_hs", "mom_iq"))
    return line(data["kid_score"], b[0] + b[1] * hs + b[2] * iq + b[3] * hs * iq, v["sigma"])


def kids_work(data, v):
    level = np.array([0.0, *v["beta"][1:]])[data["mom_work"].astype(int) - 1]
    return line(data["kid_score"], v["beta"][0] + level, v["sigma"])


def bushes(data, v, *columns):
    means = v["beta"][0] + sum(b * column for b, column in zip(v["beta"][1:], columns, strict=True))
    return line(np.log(data["weight"]), means, v["sigma"])


def bush(data, v):
    keys = ("diam1", "diam2", "canopy_height", "total_height", "density")
    return bushes(data, v, *(np.log(data[key]) for key in keys), data["group"])


def bush_shape(d):
    """Logs of volume, area and shape of the canopy."""
    one, two, three = (np.log(d[key]) for key in ("diam1", "diam2", "canopy_height"))
    return one + two + three, one + two, one - two


def bush_volume(d, v):
    return bushes(d, v, bush_shape(d)[0])


def bush_volume_area(d, v):
    return bushes(d, v, *bush_shape(d)[:2], d["group"])


def bush_volume_area_shape(d, v):
    return bushes(d, v, *bush_shape(d), np.log(d["total_height"]), d["group"])


def party(d, v):
    b = v["beta"]
    age = np.array([0.0, b[3], b[4], b[5]])[d["age_discrete"].astype(int) - 1]
    means = b[0] + b[1] * d["real_ideo"] + b[2] * d["race_adj"] + age
    return line(d["partyid7"], means + b[6] * d["educ1"] + b[7] * d["gender"] + b[8] * d["income"], v["sigma"])


def bayesian_line(d, v):
    log_prior = stats.norm.logpdf(v["beta"], 0, 10).sum() + stats.halfnorm.logpdf(v["sigma"], scale=10)
    return line(d["y"], d["X"] @ v["beta"], v["sigma"]) + log_prior


def diamonds(d, v):
    X = d["X"][:, 1:] - d["X"][:, 1:].mean(0)
    log_prior = (
        stats.norm.logpdf(v["b"]).sum()
        + stats.t.logpdf(v["Intercept"], 3, 8, 10)
        + stats.t.logpdf(v["sigma"], 3, 0, 10)
    )
    return line(d["Y"], v["Intercept"] + X @ v["b"], v["sigma"]) + log_prior


def autoregression(d, v):
    y, log_density = d["y"], half_cauchy(v["sigma"])
    log_density += stats.norm.logpdf(v["alpha"], 0, 10) + stats.norm.logpdf(v["beta"], 0, 10).sum()
    for t in range(d["K"], d["T"]):
        mean = v["alpha"] + sum(v["beta"][k] * y[t - 1 - k] for k in range(d["K"]))
        log_density += stats.norm.logpdf(y[t], mean, v["sigma"])
    return log_density


TWINS = {
    "earnings-earn_height": earn,
    "earnings-logearn_height": log_earn_height,
    "earnings-logearn_height_male": log_earn_height_male,
    "earnings-logearn_interaction_z": log_earn_interaction,
    "earnings-logearn_logheight_male": log_earn_log_height,
    "kidiq-kidscore_momhs": kids_school,
    "kidiq-kidscore_momiq": kids_iq,
    "kidiq-kidscore_momhsiq": kids_both,
    "kidiq-kidscore_interaction": kids_interaction,
    "kidiq_with_mom_work-kidscore_interaction_c2": kids_centered,
    "kidiq_with_mom_work-kidscore_interaction_z": kids_standardized,
    "kidiq_with_mom_work-kidscore_mom_work": kids_work,
    "mesquite-logmesquite": bush,
    "mesquite-logmesquite_logva": bush_volume_area,
    "mesquite-logmesquite_logvash": bush_volume_area_shape,
    "mesquite-logmesquite_logvolume": bush_volume,
    **{f"nes{year}-nes": party for year in range(1972, 1996, 4)},
    "sblrc-blr": bayesian_line,
    "diamonds-diamonds": diamonds,
    "arK-arK": autoregression,
}


@pytest.mark.parametrize("name", TWINS)
def test_log_density_is_that_of_scipy(name):
    assert_twin_agrees(name, TWINS[name])


@pytest.mark.parametrize("name", [*TWINS, "gp_pois_regr-gp_regr", "hmm_example-hmm_example"])
def test_importance_weights_give_the_moments_of_the_reference_draws(name):
    """Draws from a Student distribution at the mode, resampled by their weights: independent of any fit of ours."""
    posterior = load(name)
    generator = torch.Generator().manual_seed(0)
    mode = torch.zeros(1, posterior.dim, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [mode], max_iter=1000, history_size=20, line_search_fn="strong_wolfe", tolerance_change=0
    )

    def closure():
        search.zero_grad()
        loss = -posterior.log_density(mode).sum()
        loss.backward()
        return loss

    search.step(closure)
    hessian = torch.autograd.functional.hessian(lambda row: -posterior.log_density(row[None]).sum(), mode.detach()[0])
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian))
    z = torch.randn(20000, posterior.dim, dtype=torch.float64, generator=generator)
    chi = torch.randn(20000, 8, dtype=torch.float64, generator=generator).square().mean(1, keepdim=True)
    z = z / chi.sqrt()
    log_proposal = -0.5 * (8 + posterior.dim) * torch.log1p(z.square().sum(1) / 8)
    draws = mode.detach() + z @ factor.mT
    weights = torch.softmax(posterior.log_density(draws) - log_proposal, 0)
    chosen = torch.multinomial(weights, 20000, replacement=True, generator=generator)
    assert posterior.error(draws[chosen]) < 0.06
