"""A fit in words and numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .result import Fit

GOOD, USABLE = 0.5, 0.7
"""Below the first the importance weights have a variance; above the second they are of no use."""
LEVELS = (0.05, 0.5, 0.95)


def table(names: list[str], columns: Tensor, most: int) -> str:
    """Write the mean, standard deviation and quantiles of each column."""
    shown = columns[:, :most].double()
    quantiles = shown.quantile(torch.tensor(LEVELS, dtype=shown.dtype, device=shown.device), dim=0)
    rows = torch.stack([shown.mean(0), shown.std(0), *quantiles], -1).tolist()
    width = max([9, *map(len, names[:most])])
    header = f"{'':{width}}" + "".join(f"{title:>12}" for title in ("mean", "sd", "5%", "50%", "95%"))
    lines = [f"{name:{width}}" + "".join(f"{x:12.4g}" for x in row) for name, row in zip(names, rows, strict=False)]
    if len(names) > most:
        lines.append(f"... and {len(names) - most} more")
    return "\n".join([header, *lines])


def verdict(fit: Fit) -> str:
    """Describe whether the steps came to an end, how good the approximation is, and what was left out."""
    return "\n".join([_about_steps(fit), _about_tail(fit.khat), *_about_skips(fit)])


def _about_steps(fit: Fit) -> str:
    cost = f"{len(fit.history)} steps and {fit.counts.gradient_evaluations} gradient evaluations"
    bound = f"The ELBO is {fit.elbo:.3f} +- {fit.elbo_error:.1g}."
    gap = f"{max(fit.gap, 0):.2g} +- {fit.gap_error:.1g} nats"
    family = f"the best Gaussian with the structure {fit.posterior.structure}"
    if fit.converged:
        return f"Converged after {cost}. {bound} It is about {gap} below {family}."
    return f"NOT converged after {cost}. {bound} It is about {gap} below {family}; {fit._target.remedy}."


def _about_tail(khat: float) -> str:
    if khat < GOOD:
        return f"k-hat is {khat:.2f}: good. The posterior is near this Gaussian; its draws can be used as they are."
    if khat < USABLE:
        return f"k-hat is {khat:.2f}: usable. The posterior differs in shape; draws(n, resample=True) corrects for it."
    if math.isinf(khat):
        return "k-hat could not be estimated: too few draws have a finite density."
    return (
        f"k-hat is {khat:.2f}: poor. The posterior has parts that this Gaussian misses; do not rely on its standard "
        "deviations. Try another parametrization (non-centered), a fuller structure, or MCMC."
    )


def _about_skips(fit: Fit) -> list[str]:
    counts = fit.counts
    lines = [
        (counts.violating_draws, "draws left their constraints by rounding, and were left out"),
        (counts.nonfinite_draws, "draws had a density or gradient that is not finite, and were left out"),
        (counts.skipped_steps, "steps had no usable draw, and were skipped"),
        (counts.other_modes, "better mode was found after the first; the posterior has several modes"),
        (counts.overflows, "steps would have overflowed, and were not taken"),
    ]
    return [f"Warning: {count} {what}." for count, what in lines if count]
