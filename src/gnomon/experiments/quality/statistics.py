"""Statistics over tasks: ratios to a reference, ranks, intervals, and the steps to a level."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from ..common.confidence import half_interval
from .runs import Outcome

Array = NDArray[np.float64]

DRAWS = 10_000
"""The number of samples of a bootstrap."""


@dataclass(frozen=True)
class Score:
    """The test measures of the seeds."""

    mean: float
    half: float
    """Half the width of the 95% interval of the mean. It is nan for a single seed."""

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> Score:
        """Return the score of some runs. It is infinite if one of them failed."""
        values = [one.test for one in outcomes]
        finite = all(map(math.isfinite, values))
        return cls(mean(values), half_interval(values) if finite else math.nan)

    @property
    def upper(self) -> float:
        return self.mean if math.isnan(self.half) else self.mean + self.half


def are_best(scores: Sequence[Score | None]) -> list[bool]:
    """Say which scores are the lowest, or within the interval of the lowest. Infinite and missing ones are not."""
    known = [score for score in scores if score is not None and math.isfinite(score.mean)]
    if not known:
        return [False] * len(scores)
    bound = min(known, key=lambda score: score.mean).upper
    return [score is not None and score.mean <= bound for score in scores]


@dataclass(frozen=True)
class Estimate:
    """A statistic of several tasks, and its 95% interval by a bootstrap over the tasks."""

    value: float
    low: float
    high: float


def geometric_means(ratios: Array) -> Array:
    """Return the geometric mean of each column."""
    return np.exp(np.log(ratios).mean(axis=-2))


def mean_ranks(values: Array) -> Array:
    """Return the mean over rows of each column's rank in its row. The lowest value has rank 1, ties share a rank."""
    return rankdata(values, axis=-1).mean(axis=-2)


def bootstrap(statistic: Callable[[Array], Array], rows: Array, seed: int = 0) -> list[Estimate]:
    """Return a statistic of each column, with the interval of its values for rows that are drawn with replacement."""
    drawn = np.random.default_rng(seed).integers(len(rows), size=(DRAWS, len(rows)))
    # Not by interpolation: between two infinite values that would be nan.
    ends: Any = np.quantile(statistic(rows[drawn]), (0.025, 0.975), axis=0, method="nearest")
    return [Estimate(*map(float, column)) for column in zip(statistic(rows), *ends, strict=True)]


def steps_to(level: float, runs: list[Outcome]) -> float:
    """Return the steps at which the mean curve of some runs first is at a level or below it.

    They are infinite if it never is, or if a run failed.
    """
    if any(one.failure for one in runs):
        return math.inf
    for points in zip(*(one.curve for one in runs), strict=True):
        steps, _, values = zip(*points, strict=True)
        if mean(values) <= level:
            return mean(steps)
    return math.inf


def time_to(level: float, by_time: Mapping[float, list[Outcome]]) -> float:
    """Return the time for which a run must be planned so that it ends at a level.

    Between two times for which runs were planned, the logarithm of their mean measure is taken as linear in the
    logarithm of the time. The least time is returned if its runs already end at the level, and infinity if none do.
    """
    before: tuple[float, float] | None = None
    for time, runs in sorted(by_time.items()):
        value = Score.of(runs).mean
        if value <= level:
            if before is None or not math.isfinite(before[1]):
                return time
            part = math.log(before[1] / level) / math.log(before[1] / value)
            return before[0] * (time / before[0]) ** part
        before = time, value
    return math.inf
