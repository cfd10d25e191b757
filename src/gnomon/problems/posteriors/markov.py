"""Hidden Markov models with two states: the states are summed out."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import normal
from .registry import posterior
from .store import read, reference
from .transforms import ORDERED, POSITIVE_ORDERED, SIMPLEX, Transform


def log_evidence(log_transition: Tensor, log_emission: Tensor) -> Tensor:
    """Return the log of the sum over all paths of states, without a distribution of the first state.

    ``log_transition`` has the shape ``(draws, K, K)``, from rows to columns, ``log_emission`` the shape
    ``(draws, times, K)``. The product of the matrices of all times is taken in pairs: the number of operations is
    logarithmic in the number of times.
    """
    matrices = log_transition[:, None] + log_emission[:, 1:, None, :]
    while (count := matrices.shape[1]) > 1:
        product = torch.logsumexp(matrices[:, : count - 1 : 2, :, :, None] + matrices[:, 1::2, None, :, :], 3)
        matrices = torch.cat([product, matrices[:, -1:]], 1) if count % 2 else product
    paths = log_emission[:, 0, :, None] + matrices[:, 0]
    return torch.logsumexp(paths.flatten(1), 1)


def _log_transition(v: Values) -> Tensor:
    return torch.stack([v["theta1"], v["theta2"]], 1).log()


def _transitions() -> list[Parameter]:
    return [Parameter("theta1", (2,), SIMPLEX), Parameter("theta2", (2,), SIMPLEX)]


@posterior("hmm_example-hmm_example")
def _example(name: str) -> Posterior:
    y = read("hmm_example")["y"]
    centre = torch.tensor([3.0, 10.0], dtype=torch.float64)

    def log_joint(v: Values) -> Tensor:
        mu = v["mu"]
        return log_evidence(_log_transition(v), normal(y[:, None], mu[:, None], 1.0)) + normal(mu, centre, 1.0).sum(-1)

    parameters = [*_transitions(), Parameter("mu", (2,), POSITIVE_ORDERED)]
    return Posterior(name, parameters, log_joint, reference=reference(name))


def exponential(x: Tensor, rate: Tensor) -> Tensor:
    """Return ``log rate - rate x``."""
    return rate.log() - rate * x


def _drive(name: str, kind: str, order: Transform) -> Posterior:
    """Define the model of a basketball player's speed and distance from the hoop, with and without a drive."""
    data = read(name.split("-")[0])
    u, v = data["u"][:, None], data["v"][:, None]
    centre = torch.tensor([0.0, 3.0], dtype=torch.float64)

    def log_joint(values: Values) -> Tensor:
        phi, rate = values["phi"], values["lambda"]
        if kind == "exponential":
            emission = exponential(u, phi[:, None]) + exponential(v, rate[:, None])
        else:
            emission = normal(u, phi[:, None], data["tau"]) + normal(v, rate[:, None], data["rho"])
        log_transition = _log_transition(values)
        log_prior = ((data["alpha"] - 1) * log_transition).sum((1, 2))
        log_prior = log_prior + normal(phi, centre, 1.0).sum(-1) + normal(rate, centre, 1.0).sum(-1)
        return log_evidence(log_transition, emission) + log_prior

    parameters = [*_transitions(), Parameter("phi", (2,), order), Parameter("lambda", (2,), order)]
    return Posterior(name, parameters, log_joint, reference=reference(name))


@posterior("bball_drive_event_0-hmm_drive_0")
def _drive_exponential(name: str) -> Posterior:
    return _drive(name, "exponential", POSITIVE_ORDERED)


@posterior("bball_drive_event_1-hmm_drive_1")
def _drive_normal(name: str) -> Posterior:
    return _drive(name, "normal", ORDERED)
