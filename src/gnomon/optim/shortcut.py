"""Few rows instead of a large gradient: ``C C^T G K K^T = (g C C^T)^T (x K K^T)`` where ``G = g^T x``.

That holds as long as the gradient of a weight is what its layer's batch gave, and nothing else. It is not where the
loss has a penalty on weights, or where somebody changed the gradient: each step makes sure.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..groups.base import probe
from . import forms
from .factors import KroneckerFactors
from .layers import ModuleLayer
from .moves import Tracked
from .rounding import HALF
from .settings import Settings

VERDICT = "through_rows"
"""Whether gradients were found to be products of rows, in the settings that torch saves; absent before the first."""


class Shortcut:
    """Which layers go through their rows in a step, and whether that is right."""

    def __init__(self) -> None:
        self._word: Tensor | None = None  # the host's copy of what the device found

    def may_serve(self, factors: KroneckerFactors, view: ModuleLayer, x: Tensor, settings: Settings) -> bool:
        """Whether a batch has so few rows that to precondition them is cheaper, in the gradient's own type.

        A gradient in half precision has too few digits to show whether it is the product of its rows.
        """
        dtype = view.weight.dtype
        if not (view.rows_are_exact and settings.get(VERDICT, True) and x.dtype == dtype) or dtype in HALF:
            return False
        rows = x.numel() // max(x.shape[-1], 1)
        return forms.through_rows(rows, view.p, view.d, factors.left.row_cost, factors.right.row_cost)

    def heed(self, settings: Settings) -> None:
        """Take notice of what the device has told the host until now."""
        # A look into the host's memory: to ask torch for the value would be an operation.
        if self._word is not None and ctypes.c_bool.from_address(self._word.data_ptr()).value:
            settings[VERDICT] = False

    def verified(self, candidates: list[Tracked], settings: Settings) -> Tensor | None:
        """Drop rows that cannot be used; gives whether the others are right, as a tensor, or None if there are none.

        A gradient that was clipped shows that by its version. Other changes show along a probe: at the first step the
        host waits for that. Later it reads what a step before has found, without waiting; the step itself is not taken
        where ``verified`` is False. After that all gradients are preconditioned as they are.
        """
        self.heed(settings)
        found = []
        for tracked in candidates:
            if not (settings.get(VERDICT, True) and _is_untouched(tracked)):
                tracked.rows = None
            elif tracked.rows is not None:
                found.append(_is_product(tracked))
        if not found:
            return None
        right = torch.stack(found).all()
        if VERDICT not in settings:
            settings[VERDICT] = bool(right)
            if not settings[VERDICT]:
                for tracked in candidates:
                    tracked.rows = None
                return None
        self._tell(~right)
        return right

    def _tell(self, wrong: Tensor) -> None:
        if self._word is None:
            self._word = torch.zeros((), dtype=torch.bool, pin_memory=wrong.device.type == "cuda")
        self._word.copy_(wrong, non_blocking=True)


def _is_untouched(tracked: Tracked) -> bool:
    """Whether the gradients are as the backward pass made them, as far as torch knows."""
    return all(p.grad is not None and p.grad._version == 0 for p in tracked.layer.parameters)


def _is_product(tracked: Tracked) -> Tensor:
    """Whether ``G u = g^T (x u)`` for a fixed u, up to rounding."""
    assert tracked.rows is not None
    x, g = tracked.rows
    u = probe(x.shape[-1], x.dtype, x.device)
    gradients = [p.grad for p in tracked.layer.parameters if p.grad is not None]
    weight, bias = gradients[0], gradients[1:]
    actual = weight @ u[: weight.shape[-1]] + sum(b * u[-1] for b in bias)
    expected = ((x @ u).unsqueeze(-2) @ g).flatten()
    tolerance = 64 * torch.finfo(x.dtype).eps * x.shape[-2] ** 0.5
    # The product of norms bounds what cancels in the sums.
    scale = torch.linalg.vector_norm(expected) + torch.linalg.vector_norm(weight) * x.shape[-1] ** 0.5
    # A gradient that is not finite differs from nothing: the step is skipped for it, and rows stay in use.
    return ~(torch.linalg.vector_norm(actual - expected) > tolerance * scale)
