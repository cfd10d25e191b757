"""One run of the fit: start, steps, decisions, and the evaluation at the end."""

from __future__ import annotations

import time
import warnings

import torch
from torch import Tensor

from ..manifolds import Gaussian
from .density import DensityError
from .estimate import Estimate, Estimator
from .gradients import log_prob_of_noise, mean_of, push
from .progress import Report
from .psis import pareto_smooth
from .result import Counts, Evaluation, Fit
from .sampling import standard_draws
from .schedule import WINDOW, History, Schedule, mean_and_error
from .settings import Settings
from .start import Beginning
from .steps import NaturalSteps
from .structure import Structure
from .target import Target

FARTHEST = 1e12
"""A draw with a larger coordinate than this: the approximation runs away."""
HOPELESS = 16
"""Steps in succession without a draw of finite density, after which the fit gives up."""


class RunawayError(RuntimeError):
    """The approximation grows without bound: the density is not that of a proper posterior."""


class Run:
    """A fit from its start to its result."""

    def __init__(self, target: Target, structure: Structure, settings: Settings, like: Tensor, seed: int) -> None:
        self._clock = time.perf_counter()
        self.target, self.settings = target, settings
        self.generator = torch.Generator(like.device).manual_seed(seed)
        self._beginning = Beginning(target, settings, like, self.generator)
        self.skipped = self.returns = self.overflows = 0
        self._begin(self._beginning.gaussian(structure))

    def _begin(self, q: Gaussian) -> None:
        group = q.structure
        draws = self.settings.draws_for(group)
        self.q = q
        self.estimator = Estimator(self.target, draws, self.generator, self._beginning.price)
        self.schedule = Schedule(self.settings.rate_for(group, draws), self.settings.tolerance_for(q.d))
        self.steps = NaturalSteps(q, self.settings.momentum)
        self._kept = q.frame.clone()

    def fit(self, report: Report) -> Fit:
        """Take all steps and return what they led to; do so once more from another mode, if that is better."""
        history, other_modes = History(), 0
        with report:
            converged = self._iterate(report)
            evaluation = self._evaluate()
            other = None if self.settings.start != "mode" else self._beginning.other_mode(self.q, evaluation.elbo)
            if other is not None:
                history, other_modes = self.schedule.history, 1
                self._begin(other)
                converged = self._iterate(report)
                evaluation = self._evaluate()
        if not converged:
            self._warn()
        self.q.requires_grad_(False)
        history = history + self.schedule.history
        gap, gradients = self.schedule.gap(), "price" if self._beginning.price else "path"
        return Fit(self.q, self.target, history, gap, converged, evaluation, self._counts(other_modes), gradients)

    def _warn(self) -> None:
        gap, error = self.schedule.gap()
        warnings.warn(
            f"the fit ended at max_steps={self.settings.max_steps} with an estimated gap of {max(gap, 0):.3g} +- "
            f"{error:.1g} nats to the best Gaussian of its structure (tolerance {self.schedule.tolerance:.3g}); "
            f"{self.target.remedy}, and look at summary()",
            UserWarning,
            stacklevel=5,
        )

    def _counts(self, other_modes: int) -> Counts:
        return Counts(
            gradient_evaluations=self.target.gradient_evaluations,
            density_evaluations=self.target.density_evaluations,
            nonfinite_draws=self.target.nonfinite_draws,
            violating_draws=self.target.violating_draws,
            skipped_steps=self.skipped,
            overflows=self.overflows,
            returns=self.returns,
            other_modes=other_modes,
        )

    # ------------------------------------------------------------------ steps
    def _iterate(self, report: Report) -> bool:
        recent: list[Tensor] = []
        missing = 0
        while len(self.schedule.history) < self.settings.max_steps:
            estimate = self.estimator.estimate(self.q)
            if estimate is None:
                missing += 1
                self._skip(missing)
                continue
            missing = 0
            self._refuse_runaway(estimate)
            self._record(estimate)
            self.overflows += not self.steps.take(estimate.gradient, self.schedule.rate)
            recent = [*recent[1 - 2 * WINDOW :], estimate.log_ratios]
            report.step(self.schedule.history, recent)
            decision = self.schedule.decide()
            if decision == "stop":
                return True
            if decision == "keep":
                self._kept.copy_(self.q.frame)
            elif decision == "back":
                self.returns += 1
                self._go_back()
        return False

    def _record(self, estimate: Estimate) -> None:
        history = self.schedule.history
        history.rate.append(self.schedule.rate)
        history.elbo.append(float(estimate.log_ratios.mean()))
        history.gap.append(estimate.gap)
        history.noise.append(estimate.noise)
        history.gradient_evaluations.append(self.target.gradient_evaluations)
        history.seconds.append(time.perf_counter() - self._clock)

    def _go_back(self) -> None:
        self.q.frame.copy_(self._kept)
        self.steps.forget()

    def _skip(self, missing: int) -> None:
        """Go back to the last good point after a step without a usable draw, and try other draws."""
        self.skipped += 1
        if missing >= HOPELESS:
            raise DensityError(
                f"log_density or its gradient was not finite at any draw in {missing} steps in succession; look at the "
                "density for logarithms of negative numbers and overflows, or pass start= and a smaller rate="
            )
        self._go_back()

    def _refuse_runaway(self, estimate: Estimate) -> None:
        if estimate.largest < FARTHEST:
            return
        where = self.target.in_parameter_order(self.q.sample((8,))).abs().amax(0).argmax()
        raise RunawayError(
            f"the approximation runs away: draws are beyond {FARTHEST:g}, the farthest in unconstrained coordinate "
            f"{int(where)}. The density does not fall off in that direction: give it a prior that does"
        )

    # ------------------------------------------------------------------ evaluation
    @torch.no_grad()
    def _evaluate(self) -> Evaluation:
        """Return the bound, its error and k-hat from draws of the final q, which are kept for resampling."""
        q = self.q
        n = max(1, self.settings.evaluation_draws_for(q.d) // 2)
        z = standard_draws(n, q.d, generator=self.generator, dtype=q.dtype, device=q.device)
        z = torch.cat([z, -z])
        x = mean_of(q) + push(q, z)
        ratios = self.target.log_density(x) - log_prob_of_noise(q, z)
        finite = ratios.isfinite()
        self.target.nonfinite_draws += int((~finite).sum())
        # A draw and its mirror image are not independent: the pairs are.
        pairs = ratios.view(2, -1).mean(0)
        elbo, error = mean_and_error(pairs[pairs.isfinite()])
        smoothed = pareto_smooth(ratios)
        return Evaluation(elbo, error, smoothed.khat, x, smoothed.log_weights)
