"""Normal linear regressions. Their likelihood is computed from a QR decomposition of the design, once for all draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import cauchy, normal, student_t
from .registry import posterior
from .store import read, reference
from .transforms import POSITIVE

Data = dict[str, Any]


class LeastSquares:
    """The log likelihood of ``y ~ normal(X b, sigma)`` at any b and sigma, for the cost of the square factor of X.

    With ``X = Q R`` the sum of squares is ``|R b - Q^T y|^2`` and what the best b leaves. Nothing is subtracted, so the
    value is as accurate as the one from the data.
    """

    def __init__(self, design: Tensor, response: Tensor) -> None:
        Q, self.R = torch.linalg.qr(design)
        self.target = response @ Q
        self.left = (response - Q @ self.target).square().sum()
        self.count = len(response)

    def __call__(self, coefficients: Tensor, sigma: Tensor) -> Tensor:
        squares = (coefficients @ self.R.mT - self.target).square().sum(-1) + self.left
        return -0.5 * squares / sigma.square() - self.count * sigma.log()


def design(*columns: Tensor) -> Tensor:
    """Return the matrix of a constant and the columns."""
    return torch.stack([torch.ones_like(columns[0]), *columns], 1)


def standardized(x: Tensor, width: float = 1.0) -> Tensor:
    """Return ``(x - mean) / (width sd)``."""
    return (x - x.mean()) / (width * x.std())


def _flat(values: Values) -> Tensor:
    return torch.zeros_like(values["sigma"])


def _cauchy_sigma(values: Values) -> Tensor:
    return cauchy(values["sigma"], 2.5)


def _regression(name: str, X: Tensor, y: Tensor, log_prior: Callable[[Values], Tensor]) -> Posterior:
    likelihood = LeastSquares(X, y)
    return Posterior(
        name,
        [Parameter("beta", (X.shape[1],)), Parameter("sigma", (), POSITIVE)],
        lambda v: likelihood(v["beta"], v["sigma"]) + log_prior(v),
        reference=reference(name),
    )


# ---------------------------------------------------------------------- designs
EARNINGS: dict[str, Callable[[Data], Sequence[Tensor]]] = {
    "logearn_height": lambda d: [d["height"]],
    "logearn_height_male": lambda d: [d["height"], d["male"]],
    "logearn_interaction_z": lambda d: [
        standardized(d["height"]),
        d["male"],
        standardized(d["height"]) * d["male"],
    ],
    "logearn_logheight_male": lambda d: [d["height"].log(), d["male"]],
}
KIDS: dict[str, Callable[[Data], Sequence[Tensor]]] = {
    "kidscore_momhs": lambda d: [d["mom_hs"]],
    "kidscore_momiq": lambda d: [d["mom_iq"]],
    "kidscore_momhsiq": lambda d: [d["mom_hs"], d["mom_iq"]],
    "kidscore_interaction": lambda d: [d["mom_hs"], d["mom_iq"], d["mom_hs"] * d["mom_iq"]],
}
KIDS_WITH_WORK: dict[str, Callable[[Data], Sequence[Tensor]]] = {
    "kidscore_interaction_c2": lambda d: _with_product(d["mom_hs"] - 0.5, d["mom_iq"] - 100),
    "kidscore_interaction_z": lambda d: _with_product(standardized(d["mom_hs"], 2), standardized(d["mom_iq"], 2)),
    "kidscore_mom_work": lambda d: [(d["mom_work"] == level).double() for level in (2, 3, 4)],
}
MESQUITE: dict[str, Callable[[Data], Sequence[Tensor]]] = {
    "logmesquite": lambda d: [
        *(d[key].log() for key in ("diam1", "diam2", "canopy_height", "total_height", "density")),
        d["group"],
    ],
    "logmesquite_logva": lambda d: [_log_volume(d), _log_area(d), d["group"]],
    "logmesquite_logvash": lambda d: [
        _log_volume(d),
        _log_area(d),
        (d["diam1"] / d["diam2"]).log(),
        d["total_height"].log(),
        d["group"],
    ],
    "logmesquite_logvolume": lambda d: [_log_volume(d)],
}


def _with_product(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a, b, a * b]


def _log_area(d: Data) -> Tensor:
    return (d["diam1"] * d["diam2"]).log()


def _log_volume(d: Data) -> Tensor:
    return (d["diam1"] * d["diam2"] * d["canopy_height"]).log()


def _party(d: Data) -> list[Tensor]:
    ages = [(d["age_discrete"] == group).double() for group in (2, 3, 4)]
    return [d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"]]


# ---------------------------------------------------------------------- posteriors
@posterior("earnings-earn_height")
def _earnings(name: str) -> Posterior:
    data = read("earnings")
    return _regression(name, design(data["height"]), data["earn"], _flat)


@posterior(*(f"earnings-{model}" for model in EARNINGS))
def _log_earnings(name: str) -> Posterior:
    data = read("earnings")
    return _regression(name, design(*EARNINGS[name.split("-")[1]](data)), data["earn"].log(), _flat)


@posterior(*(f"kidiq-{model}" for model in KIDS))
def _kids(name: str) -> Posterior:
    data = read("kidiq")
    return _regression(name, design(*KIDS[name.split("-")[1]](data)), data["kid_score"], _cauchy_sigma)


@posterior(*(f"kidiq_with_mom_work-{model}" for model in KIDS_WITH_WORK))
def _kids_with_work(name: str) -> Posterior:
    data = read("kidiq_with_mom_work")
    return _regression(name, design(*KIDS_WITH_WORK[name.split("-")[1]](data)), data["kid_score"], _flat)


@posterior(*(f"mesquite-{model}" for model in MESQUITE))
def _mesquite(name: str) -> Posterior:
    data = read("mesquite")
    return _regression(name, design(*MESQUITE[name.split("-")[1]](data)), data["weight"].log(), _flat)


@posterior(*(f"nes{year}-nes" for year in range(1972, 1996, 4)))
def _election_study(name: str) -> Posterior:
    data = read(name.split("-")[0])
    return _regression(name, design(*_party(data)), data["partyid7"], _flat)


@posterior("sblrc-blr")
def _bayesian_linear(name: str) -> Posterior:
    data = read("sblrc")
    return _regression(
        name, data["X"], data["y"], lambda v: normal(v["beta"], 0, 10).sum(-1) + normal(v["sigma"], 0, 10)
    )


@posterior("diamonds-diamonds")
def _diamonds(name: str) -> Posterior:
    """Define the regression with centred predictors, so that the intercept is the mean of the response."""
    data = read("diamonds")
    X = data["X"][:, 1:]
    likelihood = LeastSquares(design(*(X - X.mean(0)).unbind(1)), data["Y"])

    def log_joint(v: Values) -> Tensor:
        coefficients = torch.cat([v["Intercept"][:, None], v["b"]], 1)
        log_prior = normal(v["b"], 0, 1).sum(-1) + student_t(v["Intercept"], 3, 8, 10) + student_t(v["sigma"], 3, 0, 10)
        return likelihood(coefficients, v["sigma"]) + log_prior

    parameters = [Parameter("b", (X.shape[1],)), Parameter("Intercept"), Parameter("sigma", (), POSITIVE)]
    return Posterior(name, parameters, log_joint, reference=reference(name))


@posterior("arK-arK")
def _autoregression(name: str) -> Posterior:
    """Define the autoregression of a series on its last K values, the latest first."""
    data = read("arK")
    K, y = int(data["K"]), data["y"]
    likelihood = LeastSquares(design(*(y[K - lag : -lag] for lag in range(1, K + 1))), y[K:])

    def log_joint(v: Values) -> Tensor:
        coefficients = torch.cat([v["alpha"][:, None], v["beta"]], 1)
        return likelihood(coefficients, v["sigma"]) + normal(coefficients, 0, 10).sum(-1) + cauchy(v["sigma"], 2.5)

    parameters = [Parameter("alpha"), Parameter("beta", (K,)), Parameter("sigma", (), POSITIVE)]
    return Posterior(name, parameters, log_joint, reference=reference(name))
