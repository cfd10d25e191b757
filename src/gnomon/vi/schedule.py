"""How long the steps are, when they go back, and when they stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

WINDOW = 8
"""Steps between two decisions."""
GLANCE = 4
"""Steps between two looks at whether all is done already."""
MEMORY = 3.0
"""In the decaying phase the estimate forgets all but the last ``1 / MEMORY`` of the draws, on a logarithmic scale."""
RETREAT = 0.3
"""The rate is multiplied by this where the bound has fallen."""
RESUME = 1.5
"""The rate is multiplied by this, and decays no more, where the gap is again beyond what the noise leaves."""
CERTAIN = 3.0
"""How many standard errors a fall of the bound must have."""

Decision = Literal["go", "back", "keep", "stop"]


@dataclass
class History:
    """One entry for each step.

    ``elbo`` is the estimate from the step's draws; ``gap`` estimates what is missing to the optimum of the family, in
    nats; ``noise`` is the variance of the step's gradient; ``rate`` is the learning rate;
    ``gradient_evaluations`` and ``seconds`` are totals.
    """

    elbo: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    gradient_evaluations: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.elbo)

    def __add__(self, later: History) -> History:
        return History(*(mine + its for mine, its in zip(vars(self).values(), vars(later).values(), strict=True)))


class Schedule:
    """Learning rates by what the steps bring.

    At the optimum of the family the squared length of the mean gradient, in orthonormal coordinates, is the gap to the
    optimum: a rate of 2 is a Newton step for mean and factor. Two independent halves of the draws give an estimate of
    it without bias, and the difference of the halves gives the noise. Where the gap is no more than what the noise at
    this rate leaves, ``rate / 2 * noise``, the rate decays as ``1 / t``: the iterate is then a running average. A gap
    that is larger again, as in a direction in which the bound is flat, ends the decay. Where the bound has fallen
    beyond doubt, the steps go back to the best window and go on with a smaller rate.
    """

    def __init__(self, rate: float, tolerance: float) -> None:
        self.tolerance = tolerance
        self.history = History()
        self._rate = self._largest = rate
        self._decay_from: int | None = None
        self._best, self._best_error = -math.inf, 0.0

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        if self._decay_from is None:
            return self._rate
        return self._rate / (1 + self._rate / 2 * (len(self.history) - self._decay_from) / MEMORY)

    def decide(self) -> Decision:
        """Decide after each step: go on, remember this point ("keep"), go back to the point remembered, or stop."""
        steps = len(self.history)
        if steps % GLANCE:
            return "go"
        elbo, error = mean_and_error(self.history.elbo[-WINDOW:])
        fallen = not elbo >= self._best - CERTAIN * math.hypot(error, self._best_error) - self.tolerance
        if not fallen and self._is_converged_at_a_glance():
            return "stop"
        if steps % WINDOW:
            return "go"
        if fallen:
            self._rate = self._largest = RETREAT * self.rate
            self._decay_from = None
            return "back"
        if self._is_converged():
            return "stop"
        self._adapt(steps)
        if elbo > self._best:
            self._best, self._best_error = elbo, error
            return "keep"
        return "go"

    def gap(self) -> tuple[float, float]:
        """Return the gap over the last steps, and its standard error; over the last half where the rate decays."""
        return mean_and_error(self.history.gap[-self._recent() :])

    def _recent(self) -> int:
        return WINDOW if self._decay_from is None else max(WINDOW, (len(self.history) - self._decay_from) // 2)

    def _is_converged_at_a_glance(self) -> bool:
        """Return whether the last few steps are enough to see convergence, as where the target is nearly Gaussian.

        The error of so few numbers is itself uncertain, so that it counts three times, not twice, and what the noise
        leaves must be small as well.
        """
        if self._decay_from is not None:
            return False
        gap, error = mean_and_error(self.history.gap[-GLANCE:])
        noise = torch.tensor(self.history.noise[-GLANCE:]).mean()
        return max(gap, 0.0) + 3 * error < self.tolerance and self.rate / 2 * float(noise) < self.tolerance

    def _is_converged(self) -> bool:
        """Return whether the gap is surely below the tolerance.

        In the decaying phase it is enough that no gap can be told from zero and that the noise leaves little of one:
        rare draws of large weight can make the error of the estimate much larger than the gap.
        """
        gap, error = self.gap()
        if max(gap, 0.0) + 2 * error < self.tolerance:
            return True
        if self._decay_from is None or gap > error:
            return False
        noise = torch.tensor(self.history.noise[-self._recent() :]).mean()
        return self.rate / 2 * float(noise) < self.tolerance / 4

    def _adapt(self, steps: int) -> None:
        """Begin to decay where the gap is within the noise, and end it where it is not."""
        gap, error = mean_and_error(self.history.gap[-WINDOW:])
        floor = self.rate / 2 * float(torch.tensor(self.history.noise[-WINDOW:]).median())
        if self._decay_from is None and gap - error <= floor:
            self._decay_from = steps
        elif self._decay_from is not None and gap - 2 * error > 2 * floor:
            self._rate, self._decay_from = min(self._largest, RESUME * self.rate), None


def mean_and_error(values: list[float] | Tensor) -> tuple[float, float]:
    """Return the mean and its standard error."""
    values = torch.as_tensor(values, dtype=torch.float64)
    if len(values) < 2:
        return float(values.mean()), math.inf
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))
