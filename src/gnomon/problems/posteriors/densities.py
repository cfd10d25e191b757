"""Log densities of scalars, elementwise. Constants that no unknown enters are dropped, as Stan's ``~`` does it.

A scale that is a plain number is a constant too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

Number = Tensor | float


def _log(x: Number) -> Number:
    return x.log() if isinstance(x, Tensor) else 0.0


def normal(x: Tensor, loc: Number, scale: Number) -> Tensor:
    """Return ``-((x - loc) / scale)^2 / 2 - log scale``."""
    return -0.5 * ((x - loc) / scale).square() - _log(scale)


def log_normal(x: Tensor, log_loc: Number, scale: Number) -> Tensor:
    """Return the log-density of x whose logarithm is normal: ``normal(log x, log_loc, scale) - log x``."""
    log_x = x.log()
    return normal(log_x, log_loc, scale) - log_x


def cauchy(x: Tensor, scale: float) -> Tensor:
    """Return ``-log(1 + (x / scale)^2)``, with centre 0."""
    return -torch.log1p((x / scale).square())


def student_t(x: Tensor, freedom: float, loc: float, scale: float) -> Tensor:
    """Return ``-(freedom + 1) / 2 log(1 + ((x - loc) / scale)^2 / freedom)``."""
    return -0.5 * (freedom + 1) * torch.log1p(((x - loc) / scale).square() / freedom)


def gamma(x: Tensor, shape: float, rate: float) -> Tensor:
    """Return ``(shape - 1) log x - rate x``."""
    return (shape - 1) * x.log() - rate * x


def inverse_gamma(x: Tensor, shape: float, scale: float) -> Tensor:
    """Return ``-(shape + 1) log x - scale / x``."""
    return -(shape + 1) * x.log() - scale / x


def poisson_log(counts: Tensor, log_rate: Tensor) -> Tensor:
    """Return the log-density of counts with the rate ``exp(log_rate)``."""
    return counts * log_rate - log_rate.exp()


def binomial_logit(successes: Tensor, trials: Number, logit: Tensor) -> Tensor:
    """Return the log-density of successes among trials whose probability has the given logit.

    With one trial it is that of the Bernoulli distribution.
    """
    return successes * logit - trials * softplus(logit)
