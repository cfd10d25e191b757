"""Hierarchical models: few global unknowns, and local ones that are independent given those."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import cauchy, normal
from .registry import posterior
from .store import read, reference
from .transforms import POSITIVE


@posterior("eight_schools-eight_schools_noncentered")
def _schools_noncentered(name: str) -> Posterior:
    data = read("eight_schools")

    def theta(v: Values) -> Tensor:
        return v["mu"][:, None] + v["tau"][:, None] * v["theta_trans"]

    def log_joint(v: Values) -> Tensor:
        log_likelihood = normal(data["y"], theta(v), data["sigma"]).sum(-1)
        return log_likelihood + normal(v["theta_trans"], 0, 1).sum(-1) + normal(v["mu"], 0, 5) + cauchy(v["tau"], 5)

    parameters = [Parameter("mu"), Parameter("tau", (), POSITIVE), Parameter("theta_trans", (8,))]
    return Posterior(
        name,
        parameters,
        log_joint,
        derived=lambda v: {"theta": theta(v)},
        reference=reference(name),
        global_parameters=["mu", "tau"],
    )
