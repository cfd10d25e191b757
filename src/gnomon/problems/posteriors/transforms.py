"""Maps from unconstrained coordinates to the constrained values of a model, with their log-determinants."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Mapped = tuple[Tensor, Tensor]
"""A value of shape ``(draws, n)`` and the log of the Jacobian's determinant, of shape ``(draws,)``."""


class Transform(NamedTuple):
    """A map from coordinates ``(draws, m)`` to a value ``(draws, n)``."""

    apply: Callable[[Tensor], Mapped]
    lost: int = 0
    """``n - m``: a simplex has one coordinate less than it has entries."""


def _free(x: Tensor) -> Mapped:
    return x, x.new_zeros(x.shape[:-1])


def _positive(x: Tensor) -> Mapped:
    return x.exp(), x.sum(-1)


def _simplex(x: Tensor) -> Mapped:
    """Break a stick: each coordinate is the logit of a share of what is left. Zero maps to equal shares."""
    pieces = x.shape[-1] - torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    z = x - pieces.log()
    taken, left = logsigmoid(z), logsigmoid(-z)
    before = left.cumsum(-1) - left
    log_entries = torch.cat([before + taken, left.sum(-1, keepdim=True)], -1)
    return log_entries.exp(), (before + taken + left).sum(-1)


def _ordered(x: Tensor) -> Mapped:
    steps = torch.cat([x[..., :1], x[..., 1:].exp()], -1)
    return steps.cumsum(-1), x[..., 1:].sum(-1)


def _positive_ordered(x: Tensor) -> Mapped:
    return x.exp().cumsum(-1), x.sum(-1)


FREE = Transform(_free)
POSITIVE = Transform(_positive)
SIMPLEX = Transform(_simplex, lost=1)
ORDERED = Transform(_ordered)
POSITIVE_ORDERED = Transform(_positive_ordered)


def interval(low: float, high: float) -> Transform:
    """Return the logistic map to the open interval between two numbers."""

    def apply(x: Tensor) -> Mapped:
        log_density = logsigmoid(x) + logsigmoid(-x)
        width = torch.as_tensor(high - low, dtype=x.dtype)
        return low + width * torch.sigmoid(x), (width.log() + log_density).sum(-1)

    return Transform(apply)
