"""The settings of a fit, checked, and their defaults by structure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..groups import Group
from ..manifolds import Gaussian
from .result import Fit

Start = Literal["mode", "zero"] | Tensor | Mapping[str, Any] | Gaussian | Fit

FEWEST_DRAWS, MOST_DRAWS = 24, 64
LARGE_BATCH = 2**19
"""Draws of high dimension are fewer, so that a batch of them has no more numbers than this."""
LARGEST_RATE = 1.0
"""Half a Newton step."""


@dataclass(frozen=True)
class Settings:
    """Settings of :func:`gnomon.vi.fit`; None where the structure or the dimension decides.

    Args:
        form: whether the covariance or the precision of q has the structure.
        start: ``"mode"``: at the mode, by L-BFGS from zero, with the Hessian there, unless the bound at zero is better;
            ``"zero"``: at zero, or a point near it where the density is finite, with unit covariance, the only choice
            with batches of data; a vector of unconstrained unknowns or a dictionary of parameters, with the Hessian
            there; a Gaussian, or another fit, to go on from.
        draws: for a step, in two halves of pairs and so rounded up to a multiple of 4. Default: 24 to 64 by structure,
            fewer where there are more than 2^19 / 64 unknowns.
        rate: the learning rate; 2 is a Newton step. Default: 1, less where the draws are few for the structure. It
            decays by itself.
        momentum: the weight of earlier gradients in a running average; the rate keeps its meaning.
        gradients: ``"path"``: from first derivatives. ``"price"``: from Hessians, averaged over the draws, by as many
            products as the structure needs. ``"auto"``: path, but price where there are more than 1,024 unknowns whose
            Hessian was seen to have the arrow. Few products give all of it then, and few draws would leave noise in
            the coupling of every local that adds up in the globals.
        max_steps: where the fit ends without having converged.
        tolerance: the gap to the best q at which it ends, in nats. Default: 0.005 + 0.0003 dim.
        evaluation_draws: for the final bound and k-hat. Default: 2000, fewer in high dimensions.
        searches: for other modes, from random points and their mirror images, after the fit. The fit begins anew at a
            mode whose bound is better by a nat. Only with ``start="mode"``.
    """

    form: Literal["covariance", "precision"] = "covariance"
    start: Start = "mode"
    draws: int | None = None
    rate: float | None = None
    momentum: float = 0.0
    gradients: Literal["auto", "path", "price"] = "auto"
    max_steps: int = 1000
    tolerance: float | None = None
    evaluation_draws: int | None = None
    searches: int = 4

    def __post_init__(self) -> None:
        _require("form", self.form, self.form in ("covariance", "precision"), "'covariance' or 'precision'")
        known = self.gradients in ("auto", "path", "price")
        _require("gradients", self.gradients, known, "'auto', 'path' or 'price'")
        if isinstance(self.start, str):
            _require("start", self.start, self.start in ("mode", "zero"), "'mode', 'zero', a point or a Gaussian")
        _require("draws", self.draws, self.draws is None or self.draws >= 4, "at least 4")
        _require("rate", self.rate, self.rate is None or 0 < self.rate <= 2, "above 0 and at most 2 (a Newton step)")
        _require("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1")
        _require("max_steps", self.max_steps, self.max_steps >= 1, "at least 1")
        _require("tolerance", self.tolerance, self.tolerance is None or self.tolerance > 0, "positive, in nats")
        _require("searches", self.searches, self.searches >= 0, "at least 0")
        enough = self.evaluation_draws is None or self.evaluation_draws >= 2
        _require("evaluation_draws", self.evaluation_draws, enough, "at least 2")

    def draws_for(self, group: Group) -> int:
        """Return four draws for each number that the factor has in a row, within limits, and a multiple of four."""
        if self.draws is not None:
            return math.ceil(self.draws / 4) * 4
        wanted = min(max(4 * group.dim / group.k, FEWEST_DRAWS), MOST_DRAWS)
        return max(4, 4 * int(min(wanted, LARGE_BATCH / group.k) / 4))

    def rate_for(self, group: Group, draws: int) -> float:
        """Return half a Newton step, or less where the draws are few for what a row of the factor has to learn."""
        if self.rate is not None:
            return self.rate
        return min(LARGEST_RATE, draws * group.k / (2 * max(group.dim, 1)))

    def tolerance_for(self, dim: int) -> float:
        """Return the tolerance in nats: a part of a standard error of every coordinate."""
        return 0.005 + 0.0003 * dim if self.tolerance is None else self.tolerance

    def evaluation_draws_for(self, dim: int) -> int:
        """Return the number of draws for the final bound and k-hat."""
        return max(128, min(2000, 4 * LARGE_BATCH // dim)) if self.evaluation_draws is None else self.evaluation_draws


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
