"""Pareto-smoothed importance sampling (Vehtari, Simpson, Gelman, Yao and Gabry): weights and their diagnostic."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_TAIL = 5
EQUAL = 1e-8
"""Ratios whose logarithms differ by less are equal, and have no tail: q is p but for rounding."""


class Smoothed(NamedTuple):
    """Normalized log weights, and the shape k-hat of their tail."""

    log_weights: Tensor
    khat: float


def pareto_smooth(log_ratios: Tensor) -> Smoothed:
    """Smooth the largest of the ratios ``log p - log q``: they become quantiles of a fitted Pareto distribution.

    k-hat says how many moments the weights have: below 0.5 they have a variance, above 0.7 they are of little use.
    Ratios that are not finite have weight zero. k-hat is infinite where too few weights are left to fit a tail.
    """
    usable = log_ratios.double().where(log_ratios.isfinite(), -math.inf)
    if not bool(usable.isfinite().any()):
        return Smoothed(torch.full_like(usable, -math.log(len(usable))), math.inf)
    log_weights = usable - usable.max()
    size = math.ceil(min(0.2 * len(usable), 3 * math.sqrt(len(usable))))
    tail = log_weights.argsort()[-size - 1 :]
    cutoff, tail = float(log_weights[tail[0]]), tail[1:]
    if size < SMALLEST_TAIL or not math.isfinite(cutoff):
        khat = math.inf
    elif -cutoff < EQUAL:
        khat = 0.0
    else:
        khat, sigma = fit_pareto(log_weights[tail].exp() - math.exp(cutoff))
        if not math.isfinite(khat):  # the weights of most of the tail are zero beside the largest
            return Smoothed(log_weights - log_weights.logsumexp(0), math.inf)
        levels = (torch.arange(size, dtype=torch.float64, device=tail.device) + 0.5) / size
        smooth = (_pareto_quantile(levels, khat, sigma) + math.exp(cutoff)).log()
        log_weights = log_weights.index_copy(0, tail, smooth.clamp(max=0.0))
    return Smoothed(log_weights - log_weights.logsumexp(0), khat)


def fit_pareto(exceedances: Tensor) -> tuple[float, float]:
    """Return shape k and scale sigma of a generalized Pareto distribution, fitted to sorted positive numbers.

    By the profile of Zhang and Stephens (2009), with a weak prior of k towards 0.5, as the authors of PSIS do it.
    """
    n = len(exceedances)
    grid = 30 + int(math.sqrt(n))
    steps = torch.arange(1, grid + 1, dtype=exceedances.dtype, device=exceedances.device) - 0.5
    quartile = exceedances[int(n / 4 + 0.5) - 1]
    b = (1 - (grid / steps).sqrt()) / 3 / quartile + 1 / exceedances[-1]
    k = torch.log1p(-b.unsqueeze(-1) * exceedances).mean(-1)
    profile = n * ((-b / k).log() - k - 1)
    weights = 1 / (profile - profile.unsqueeze(-1)).exp().sum(-1)
    b_mean = float((b * weights).sum() / weights.sum())
    shape = float(torch.log1p(-b_mean * exceedances).mean())
    sigma = -shape / b_mean
    return (n * shape + 5) / (n + 10), sigma


def _pareto_quantile(levels: Tensor, k: float, sigma: float) -> Tensor:
    if abs(k) < 1e-12:
        return -sigma * torch.log1p(-levels)
    return sigma * torch.expm1(-k * torch.log1p(-levels)) / k
