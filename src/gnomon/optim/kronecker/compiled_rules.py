"""The step by a given root mean square as one function of tensors, for ``torch.compile``.

It computes what :meth:`~.layer_steps.LayerSteps.by_rms` computes, with two passes over memory instead of eight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...linalg import SAFE_RMS

Place = tuple[Tensor, Tensor, Tensor]
"""A parameter W, its part of the layer's direction D, and its average B."""


def step_by_rms(layers: list[list[Place]], may: Tensor, units: Tensor, rates: Tensor) -> None:
    """Set ``B <- momentum B + (1 - momentum) D`` and ``W <- (1 - decay) W - far A / rms(A)``, in place.

    A is Nesterov's ``momentum B + (1 - momentum) D`` with the new B. Nothing changes in a layer where ``may`` is False,
    or where A is zero or not finite. ``units`` are powers of two near the largest entry of each layer's gradient,
    ``rates`` are momentum, and for each parameter the root mean square ``far`` of its step, and decay.
    """
    momentum, *own = rates.unbind()
    of_parts = zip(own[::2], own[1::2], strict=True)
    for places, allowed, unit in zip(layers, may.unbind(), units.unbind(), strict=True):
        ahead = [d + momentum**2 * (b - d) for _, d, b in places]
        rms = _rms(ahead, unit)
        moves = allowed & (rms > 0) & (rms < math.inf)
        length = 1 / rms.clamp(min=torch.finfo(torch.float32).tiny)  # finite for the smallest numbers
        # The rates go on over all layers, so zip must stop at the places of this one.
        for (w, _, b), a, (far, decay) in zip(places, ahead, of_parts, strict=False):
            b.copy_(torch.where(moves, b + (a - b) * (1 / (1 + momentum)), b))
            w.copy_(torch.where(moves, w - decay * w - far * length * a, w))


def _rms(tensors: list[Tensor], unit: Tensor) -> Tensor:
    """Return the root mean square of all numbers together.

    It is computed in a unit where squares would vanish or overflow.
    """
    size, (low, high) = sum(t.numel() for t in tensors), SAFE_RMS[tensors[0].dtype]
    usual = (_total([t.square() for t in tensors]) / size).sqrt()
    scaled = (_total([(t / unit).square() for t in tensors]) / size).sqrt() * unit
    return torch.where((usual > low) & (usual < high), usual, scaled)


def _total(tensors: list[Tensor]) -> Tensor:
    """Return the sum of all numbers, by rows first: a single sum in float32 would lose digits."""
    return torch.stack([t.reshape(len(t), -1).sum(1).sum() for t in tensors]).sum()
