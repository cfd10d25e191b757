"""The methods of variational inference that benchmarks/vi.py compares, each run on one posterior with one seed.

A run returns a record: gradient evaluations and CPU seconds until draws are within 0.2 of the reference (two checks in
a row; None if never), and error, bound and k-hat at its end. The seconds are process CPU time without the checks.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, constraints

from gnomon.baselines import BatchAndMatch
from gnomon.problems.posteriors import Posterior

Record = dict[str, Any]

WITHIN = 0.2
CHECK_DRAWS, FINAL_DRAWS = 4000, 10000
BUDGET = 20000
"""Gradient evaluations of a baseline."""
CPU_LIMIT, LARGE_LIMIT, LARGE = 5.0, 30.0, 500
"""Seconds after which a baseline's run ends, where a density is slow, and where there are many unknowns."""
RATES = (0.01, 0.03, 0.1, 0.3)
GUIDES = ("AutoDiagonalNormal", "AutoMultivariateNormal", "AutoLowRankMultivariateNormal")
PARTICLES = 10
BATCH = 32


class Approximation(NamedTuple):
    """Draws of an approximation, in unconstrained coordinates, and the log of its density there."""

    draws: Tensor
    log_q: Tensor


def sampled(q: Distribution, count: int) -> Approximation:
    draws = q.sample((count,))
    return Approximation(draws, q.log_prob(draws))


def error_of(posterior: Posterior, draws: Tensor) -> float | None:
    return None if posterior.reference is None else finite(posterior.error(draws))


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


@torch.no_grad()
def quality(posterior: Posterior, approximation: Approximation) -> Record:
    """Error, bound and k-hat. A bound whose error is not finite is none: the approximation has run away."""
    log_weights = posterior.log_density(approximation.draws) - approximation.log_q
    log_weights = torch.where(log_weights.isnan(), -math.inf, log_weights)
    elbo_error = finite(float(log_weights.std()) / math.sqrt(len(log_weights)))
    return {
        "error": error_of(posterior, approximation.draws),
        "elbo": None if elbo_error is None else finite(float(log_weights.mean())),
        "elbo_error": elbo_error,
        "khat": finite(khat(log_weights)),
    }


def khat(log_weights: Tensor) -> float:
    """The shape of the tail of importance weights (Vehtari and others, 2024), as ArviZ computes it."""
    import arviz

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(arviz.psislw(log_weights.numpy())[1])


class Hits:
    """The first of two checks in a row that are within 0.2 of the reference."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.found = False

    def add(self, error: float | None, evaluations: int, seconds: float) -> None:
        if self.found:
            return
        if error is None or error > WITHIN:
            self.first = None
        elif self.first is None:
            self.first = (evaluations, seconds)
        else:
            self.found = True

    def record(self) -> Record:
        evaluations, seconds = self.first if self.found and self.first else (None, None)
        return {"evaluations_to_target": evaluations, "seconds_to_target": seconds}


# ---------------------------------------------------------------------- baselines
class Baseline(Protocol):
    """A method that goes on step by step."""

    @property
    def evaluations(self) -> int:
        """Gradients so far, one for each draw."""

    def advance(self) -> None:
        """Take some steps."""

    def distribution(self) -> Distribution:
        """The approximation so far."""


def watched(posterior: Posterior, make: Callable[[], Baseline]) -> Record:
    """Run a baseline until its budget is spent, and check it at times."""
    hits, failure, baseline = Hits(), None, None
    limit = LARGE_LIMIT if posterior.dim > LARGE else CPU_LIMIT
    began, seconds = time.process_time(), 0.0
    try:
        baseline = make()
        seconds = time.process_time() - began
        while baseline.evaluations < BUDGET and seconds < limit:
            began = time.process_time()
            baseline.advance()
            seconds += time.process_time() - began
            if posterior.reference is not None:
                error = error_of(posterior, baseline.distribution().sample((CHECK_DRAWS,)))
                hits.add(error, baseline.evaluations, seconds)
        final = quality(posterior, sampled(baseline.distribution(), FINAL_DRAWS))
    except (RuntimeError, ValueError) as error_:  # a covariance that is not positive definite, parameters that are NaN
        failure = f"{type(error_).__name__}: {str(error_).splitlines()[0]}"[:200]
        final = {"error": None, "elbo": None, "elbo_error": None, "khat": None}
    totals = {"evaluations": baseline.evaluations if baseline else 0, "seconds": seconds, "failure": failure}
    return {**hits.record(), **totals, **final}


class PyroGuide:
    """A guide of Pyro with Adam, from its defaults: mean 0, standard deviations 0.1."""

    def __init__(self, posterior: Posterior, guide: str, rate: float, steps: int = 50) -> None:
        import pyro
        from pyro.distributions import ImproperUniform
        from pyro.infer import SVI, Trace_ELBO, autoguide
        from pyro.optim import Adam  # type: ignore[attr-defined]

        def model() -> None:
            flat = ImproperUniform(constraints.real_vector, (), (posterior.dim,))
            x = pyro.sample("x", flat)
            pyro.factor("density", posterior.log_density(x.reshape(-1, posterior.dim)).reshape(x.shape[:-1]))

        pyro.clear_param_store()
        start = autoguide.init_to_value(values={"x": torch.zeros(posterior.dim)})
        self.guide = getattr(autoguide, guide)(model, init_loc_fn=start)
        elbo = Trace_ELBO(num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=0)
        self.svi = SVI(model, self.guide, Adam({"lr": rate}), elbo)
        self.steps, self.evaluations = steps, 0

    def advance(self) -> None:
        for _ in range(self.steps):
            self.svi.step()
        self.evaluations += self.steps * PARTICLES

    def distribution(self) -> Distribution:
        with torch.no_grad():
            q: Distribution = self.guide.get_posterior()
        return q


class Matched:
    """Batch and match, from mean 0 and covariance I, or from a mode and the inverse of the Hessian there."""

    def __init__(self, posterior: Posterior, seed: int, from_mode: bool) -> None:
        loc, covariance, self.before = laplace(posterior) if from_mode else (None, None, 0)
        self.fit = BatchAndMatch(
            posterior.log_density,
            posterior.dim,
            batch=BATCH,
            loc=loc,
            covariance=covariance,
            generator=torch.Generator().manual_seed(seed),
        )

    @property
    def evaluations(self) -> int:
        return self.before + self.fit.evaluations

    def advance(self) -> None:
        for _ in range(4):
            self.fit.step()

    def distribution(self) -> Distribution:
        return MultivariateNormal(self.fit.loc, self.fit.covariance)


def laplace(posterior: Posterior, start: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
    """Return the mode that L-BFGS finds from zero or a start, the inverse of the Hessian there, and a number.

    The number is that of the gradients. A column of the Hessian counts as two gradients.
    """
    mode = (torch.zeros(1, posterior.dim) if start is None else start.clone()).requires_grad_()
    search = torch.optim.LBFGS([mode], max_iter=200, history_size=20, line_search_fn="strong_wolfe")
    count = 0

    def closure() -> Tensor:
        nonlocal count
        count += 1
        search.zero_grad()
        loss = -posterior.log_density(mode).sum()
        loss.backward()
        return loss

    search.step(closure)
    row = mode.detach()[0]
    hessian = torch.autograd.functional.hessian(lambda x: -posterior.log_density(x[None]).sum(), row)
    return row, torch.linalg.inv(hessian), count + 2 * posterior.dim


def pyro_guide(posterior: Posterior, guide: str, rate: float, seed: int) -> Record:
    torch.manual_seed(seed)
    return watched(posterior, lambda: PyroGuide(posterior, guide, rate))


def batch_and_match(posterior: Posterior, seed: int, from_mode: bool) -> Record:
    torch.manual_seed(seed)
    return watched(posterior, lambda: Matched(posterior, seed, from_mode))
