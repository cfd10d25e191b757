"""Which layers are preconditioned through the rows of their batch, and whether their gradients are products of rows.

``C C^T G K K^T = (g C C^T)^T (x K K^T)`` where ``G = g^T x``, and rows x and g are cheaper to multiply where they are
few. That holds as long as the gradient of a weight is what its layer's batch gave and nothing else. It does not hold
where the loss has a penalty on weights, or where somebody changed the gradient, so each step verifies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...linalg import HALF, probe
from ..torch_internals import version
from .layers.base import FactoredLayer, Layer, Settings
from .record import Record

THROUGH_ROWS = "through_rows"
"""The setting that says whether gradients were found to be products of rows; absent before the first step."""


class Shortcut:
    """Which layers are preconditioned through their rows, and whether the gradient is their product."""

    def __init__(self) -> None:
        self._is_right = True
        self._found_wrong: Tensor | None = None
        """The host's copy of what the device found at the last step."""

    def may_serve(self, layer: FactoredLayer, view: Layer, x: Tensor) -> bool:
        """Return whether a batch has so few rows that to precondition them is cheaper, in the gradient's own type.

        From n rows it takes ``n (cost_K + cost_C + p d)`` multiplications instead of ``d cost_K + p cost_C``. A
        gradient in half precision has too few digits to show whether it is the product of its rows.
        """
        dtype = view.weight.dtype
        if not (view.rows_give_gradient and self._is_right and x.dtype == dtype) or dtype in HALF:
            return False
        n, cost_k, cost_c = x.numel() // max(x.shape[-1], 1), layer.pair.left.row_cost, layer.pair.right.row_cost
        return n * (cost_k + cost_c + view.p * view.d) < view.d * cost_k + view.p * cost_c

    def read_verdict(self, settings: Settings) -> None:
        """Take notice of what the device has told the host until now, and of a state that was loaded."""
        if self._found_wrong is not None and self._found_wrong.item():
            settings[THROUGH_ROWS] = False
        self._is_right = settings.get(THROUGH_ROWS, True)

    def verified(self, candidates: list[tuple[FactoredLayer, Record]], settings: Settings) -> Tensor | None:
        """Drop rows that cannot be used; return whether the others are right, as a tensor.

        The version of a gradient shows that it was clipped. Other changes show along a fixed vector: at the first step
        the host waits for that. Later it reads what a step before has found, without waiting; the step itself is not
        taken where the result is False. After that all gradients are preconditioned as they are.
        """
        self.read_verdict(settings)
        found = []
        for layer, record in candidates:
            if record.rows is None:
                continue
            if self._is_right and _is_untouched(layer):
                found.append(_is_product(layer, record.rows))
            else:
                record.rows = None
        if not found:
            return None
        right = torch.stack(found).all()
        if THROUGH_ROWS not in settings:
            settings[THROUGH_ROWS] = self._is_right = bool(right)
            if not self._is_right:
                for _, record in candidates:
                    record.rows = None
                return None
        self._tell(~right)
        return right

    def _tell(self, wrong: Tensor) -> None:
        if self._found_wrong is None:
            self._found_wrong = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=wrong.device.type == "cuda")
        self._found_wrong.copy_(wrong, non_blocking=True)


def _is_untouched(layer: FactoredLayer) -> bool:
    """Return whether the gradients are as the backward pass made them, as far as torch knows."""
    return all(p.grad is not None and version(p.grad) == 0 for p in layer.layer.parameters)


def _is_product(layer: FactoredLayer, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return whether ``G u = g^T (x u)`` for a fixed u, up to rounding."""
    x, g = rows
    u = probe(x.shape[-1], x.dtype, x.device)
    gradients = [p.grad for p in layer.layer.parameters if p.grad is not None]
    weight, bias = gradients[0], gradients[1:]
    actual = weight @ u[: weight.shape[-1]] + sum(b * u[-1] for b in bias)
    expected = ((x @ u).unsqueeze(-2) @ g).flatten()
    tolerance = 64 * torch.finfo(x.dtype).eps * x.shape[-2] ** 0.5
    # The product of norms bounds what cancels in the sums.
    scale = torch.linalg.vector_norm(expected) + torch.linalg.vector_norm(weight) * x.shape[-1] ** 0.5
    # A gradient that is not finite differs from nothing: the step is skipped because of it, and rows stay in use.
    return ~(torch.linalg.vector_norm(actual - expected) > tolerance * scale)
