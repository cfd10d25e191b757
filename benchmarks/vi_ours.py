"""Runs of gnomon.vi.fit, and the best full Gaussian of a posterior, for benchmarks/vi.py."""

from __future__ import annotations

import contextlib
import time
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from vi_methods import FINAL_DRAWS, Approximation, Hits, Record, error_of, finite, laplace, quality, sampled

from gnomon import groups, vi
from gnomon.problems.posteriors import Posterior

STEPS = tuple(2**power for power in range(10))
"""Lengths of fits that are tried for the first one within 0.2 of the reference."""
ERROR_DRAWS = 2**18
"""For the errors at the end. The standard deviation of 10,000 draws of a lognormal variable can be wrong by a tenth."""
SAA_DRAWS = 2048
VERY_LARGE = 10000
"""With more unknowns the bound is that of the fit itself, which has taken fewer draws than others get here."""
TIMINGS = 5


def timed_fit(posterior: Posterior, seed: int, **settings: Any) -> tuple[vi.Fit, float]:
    """A fit and its process CPU time."""
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that max_steps is reached
        fit = vi.fit(posterior.log_density, dim=posterior.dim, seed=seed, **settings)
    return fit, time.process_time() - began


def approximation(fit: vi.Fit, count: int) -> Approximation:
    """Draws in the order of the parameters."""
    draws = fit.posterior.sample((count,))
    log_q = fit.posterior.log_prob(draws)
    return Approximation(draws if fit.order is None else draws[:, torch.argsort(fit.order)], log_q)


def gnomon_fit(posterior: Posterior, seed: int, **settings: Any) -> Record:
    """A fit with the defaults, and the shortest one, of those with fewer steps, that is within 0.2 of the reference.

    A shorter fit is what ``max_steps`` gives. Its gradient evaluations contain those of the start.
    """
    torch.manual_seed(seed)
    try:
        fit, seconds = timed_fit(posterior, seed, **settings)
    except RuntimeError as error:
        empty = dict.fromkeys(("error", "elbo", "elbo_error", "khat", "evaluations", "seconds"))
        return {**Hits().record(), **empty, "failure": f"{type(error).__name__}: {error}"[:200]}
    record = {
        "evaluations": fit.counts.gradient_evaluations,
        "seconds": seconds,
        "steps": len(fit.history),
        "structure": type(fit.posterior.structure).__name__,
        "converged": fit.converged,
        "other_modes": fit.counts.other_modes,
        "failure": None,
    }
    if posterior.dim > VERY_LARGE:
        final = {"error": None, "elbo": fit.elbo, "elbo_error": fit.elbo_error, "khat": finite(fit.khat)}
        return {**Hits().record(), **record, **final}
    final = quality(posterior, approximation(fit, FINAL_DRAWS))
    if posterior.reference is None:
        return {**Hits().record(), **record, **final}
    final["error"] = error_of(posterior, fit.unconstrained_draws(ERROR_DRAWS))
    return {**_shortest(posterior, {**record, **final}, seed, settings).record(), **record, **final}


def _shortest(posterior: Posterior, whole: Record, seed: int, settings: dict[str, Any]) -> Hits:
    """Fits of 1, 2, 4, ... steps without the searches for other modes, which come after the steps.

    Where these searches have found a better mode, its steps come after them, and the whole fit counts.
    """
    hits = Hits()
    lengths = () if whole["other_modes"] else (*(steps for steps in STEPS if steps < whole["steps"]), whole["steps"])
    for steps in lengths:
        options = {**settings, "max_steps": steps, "evaluation_draws": 2, "searches": 0}
        short, spent = timed_fit(posterior, seed, **options)
        error = error_of(posterior, short.unconstrained_draws(FINAL_DRAWS))
        for _ in range(2 if steps == whole["steps"] else 1):  # the end of the steps needs no second check
            hits.add(error, short.counts.gradient_evaluations, spent)
        if hits.found:
            return hits
    for _ in range(2):
        hits.add(whole["error"], whole["evaluations"], whole["seconds"])
    return hits


def step_time(posterior: Posterior, structure: str, gradients: str) -> Record:
    """CPU milliseconds of a step, from the difference of a long and a short fit that start at zero.

    The least of several: whatever else runs on the machine takes its share of the memory's bandwidth.
    """
    group = partial(groups.Arrow, rank=posterior.globals) if structure == "arrow" else structure
    options = {"structure": group, "start": "zero", "evaluation_draws": 2, "gradients": gradients}
    milliseconds = []
    for _ in range(TIMINGS):
        short, long = (timed_fit(posterior, 0, max_steps=steps, **options) for steps in (5, 25))
        milliseconds.append(1000 * (long[1] - short[1]) / 20)
    counts = long[0].history.gradient_evaluations
    what = {"structure": structure, "gradients": gradients, "evaluations_a_step": counts[-1] - counts[-2]}
    return {"error": None, "milliseconds": min(milliseconds), **what}


# ---------------------------------------------------------------------- the best Gaussian
def best_gaussian(posterior: Posterior) -> Record:
    """The full Gaussian with the largest bound, from two starts: our fit, and the mode near the reference's means."""
    torch.manual_seed(0)
    draws = timed_fit(posterior, 0)[0].unconstrained_draws(FINAL_DRAWS)
    starts = [(draws.mean(0), draws.mT.cov())]
    with contextlib.suppress(RuntimeError):  # where there is no mode
        starts.append(laplace(posterior, near_reference(posterior))[:2])
    results = []
    for loc, covariance in starts:
        if bool(torch.linalg.cholesky_ex(covariance).info == 0):
            q = ascend(posterior, loc, torch.linalg.cholesky(covariance))
            precise = {"error": error_of(posterior, q.sample((ERROR_DRAWS,)))}
            results.append({**quality(posterior, sampled(q, FINAL_DRAWS)), **precise})
    return max(results, key=lambda record: -1e300 if record["elbo"] is None else record["elbo"])


def near_reference(posterior: Posterior) -> Tensor:
    """Coordinates whose values are nearest to the reference's means, in standard deviations."""
    reference = posterior.reference
    assert reference is not None
    x = torch.zeros(1, posterior.dim, requires_grad=True)
    search = torch.optim.LBFGS([x], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        entries = reference.entries(posterior.to_constrained(x))
        loss = ((entries - reference.means) / reference.sds).square().sum() + 1e-6 * x.square().sum()
        loss.backward()
        return loss

    search.step(closure)
    return x.detach()


def ascend(posterior: Posterior, loc: Tensor, factor: Tensor) -> MultivariateNormal:
    """The largest bound with fixed draws, by L-BFGS over mean and Cholesky factor in the frame of the start."""
    half = torch.randn(SAA_DRAWS // 2, posterior.dim)
    z = torch.cat([half, -half])
    shift = torch.zeros(posterior.dim, requires_grad=True)
    turn = torch.zeros(posterior.dim, posterior.dim, requires_grad=True)
    search = torch.optim.LBFGS([shift, turn], max_iter=150, history_size=20, line_search_fn="strong_wolfe")

    def triangle() -> Tensor:
        return factor @ (turn.tril(-1) + turn.diagonal().exp().diag())

    def closure() -> Tensor:
        search.zero_grad()
        draws = loc + factor @ shift + z @ triangle().mT
        loss = -posterior.log_density(draws).mean() - turn.diagonal().sum()
        loss.backward()
        return loss

    search.step(closure)
    with torch.no_grad():
        return MultivariateNormal(loc + factor @ shift, scale_tril=triangle())
