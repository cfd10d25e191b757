"""The confidence interval of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from scipy.stats import t as student


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the 95% interval of the mean, by Student's t. It is nan for a single value."""
    if len(values) < 2:
        return math.nan
    return float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
