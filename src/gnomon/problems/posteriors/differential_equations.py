"""Models with an ordinary differential equation. All draws are integrated together, by a Runge-Kutta method of order 4.

The steps are fixed: the value is then a smooth function of the parameters, with derivatives of any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import cauchy, normal
from .registry import posterior
from .store import read, reference
from .transforms import POSITIVE

Field = Callable[[float, Tensor], Tensor]


def runge_kutta(field: Field, state: Tensor, times: Iterable[float]) -> list[Tensor]:
    """Return the states at the times after the first, with one step from each time to the next."""
    states = []
    start, *rest = times
    for end in rest:
        h, middle = end - start, 0.5 * (start + end)
        k1 = field(start, state)
        k2 = field(middle, torch.add(state, k1, alpha=0.5 * h))
        k3 = field(middle, torch.add(state, k2, alpha=0.5 * h))
        k4 = field(end, torch.add(state, k3, alpha=h))
        state = torch.add(state, torch.add(k1 + k4, k2 + k3, alpha=2), alpha=h / 6)
        states.append(state)
        start = end
    return states


PREDATOR_STEPS = 5
"""Steps in a year. The error of a log population is below 1e-3, a hundredth of the measurements' standard deviation."""


def populations(theta: Tensor, z_init: Tensor, years: int) -> Tensor:
    """Return the logs of prey and predators ``(draws, years, 2)`` after each year.

    ``d log u = alpha - beta v``, ``d log v = delta u - gamma``: the equations of Lotka and Volterra for logarithms:
    populations stay positive whatever the parameters are.
    """
    growth = torch.stack([theta[:, 0], -theta[:, 2]], 1)
    effect = torch.stack([-theta[:, 1], theta[:, 3]], 1)
    grid = [step / PREDATOR_STEPS for step in range(years * PREDATOR_STEPS + 1)]
    states = runge_kutta(lambda _, logs: torch.addcmul(growth, effect, logs.exp().flip(1)), z_init.log(), grid)
    return torch.stack(states[PREDATOR_STEPS - 1 :: PREDATOR_STEPS], 1)


@posterior("hudson_lynx_hare-lotka_volterra")
def _lynx_and_hare(name: str) -> Posterior:
    data = read("hudson_lynx_hare")
    log_y = torch.cat([data["y_init"][None], data["y"]]).log()
    rates = torch.tensor([1, 0.05, 1, 0.05], dtype=torch.float64)
    widths = torch.tensor([0.5, 0.05, 0.5, 0.05], dtype=torch.float64)
    start = torch.tensor(10.0, dtype=torch.float64).log()

    def log_joint(v: Values) -> Tensor:
        log_init, log_sigma = v["z_init"].log(), v["sigma"].log()
        logs = torch.cat([log_init[:, None], populations(v["theta"], v["z_init"], len(data["ts"]))], 1)
        log_likelihood = normal(log_y, logs, v["sigma"][:, None]).sum((1, 2))
        log_prior = normal(v["theta"], rates, widths).sum(-1) + (normal(log_sigma, -1, 1) - log_sigma).sum(-1)
        return log_likelihood + log_prior + (normal(log_init, start, 1.0) - log_init).sum(-1)

    parameters = [Parameter(key, (size,), POSITIVE) for key, size in (("theta", 4), ("z_init", 2), ("sigma", 2))]
    return Posterior(name, parameters, log_joint, reference=reference(name))


FIRST_STEPS, LATER_STEPS = 8, 2
"""Steps to the first measurement and from one to the next. The concentration changes fast at first."""


def concentrations(k_a: Tensor, K_m: Tensor, V_m: Tensor, dose: float, volume: float, times: list[float]) -> Tensor:
    """Return the concentrations ``(draws, times)`` of a drug that is absorbed and eliminated, from 0 at time 0.

    ``dC = dose k_a exp(-k_a t) / V - V_m / V C / (K_m + C)`` (Michaelis and Menten). The first steps grow with time.
    """
    absorbed, removed = k_a * (dose / volume), V_m / volume

    def field(t: float, C: Tensor) -> Tensor:
        # A step that is too long for the parameters may end below 0, where the rate of elimination has a pole.
        C = C.clamp(min=0)
        return absorbed * torch.exp(-t * k_a) - removed * C / (K_m + C)

    grid = [times[0] * (step / FIRST_STEPS) ** 2 for step in range(FIRST_STEPS + 1)]
    for before, after in itertools.pairwise(times):
        grid += [before + (after - before) * step / LATER_STEPS for step in range(1, LATER_STEPS + 1)]
    return torch.stack(runge_kutta(field, torch.zeros_like(k_a), grid)[FIRST_STEPS - 1 :: LATER_STEPS], 1)


@posterior("one_comp_mm_elim_abs-one_comp_mm_elim_abs")
def _absorption(name: str) -> Posterior:
    data = read("one_comp_mm_elim_abs")
    log_measured, times = data["C_hat"].log(), data["times"].tolist()

    def log_joint(v: Values) -> Tensor:
        C = concentrations(v["k_a"], v["K_m"], v["V_m"], data["D"], data["V"], times)
        log_likelihood = normal(log_measured, C.clamp(min=1e-6).log(), v["sigma"][:, None]).sum(-1)
        return log_likelihood + sum(cauchy(value, 1) for value in v.values())

    parameters = [Parameter(key, (), POSITIVE) for key in ("k_a", "K_m", "V_m", "sigma")]
    return Posterior(name, parameters, log_joint, reference=reference(name))
