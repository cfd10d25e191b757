"""What an optimizer notices of the program around it, and says once."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...manifolds import point_of
from .curvature import Collector

MANY = 100
"""The number of steps in a row that may be skipped before a second warning."""


def warn_of_points(model: nn.Module) -> None:
    """Warn where a model holds points on manifolds, which need steps of their own."""
    found = {name: point for name, p in model.named_parameters() if (point := point_of(p)) and p.requires_grad}
    if found:
        kinds = ", ".join(f"{name} (of {type(point).__name__})" for name, point in found.items())
        warnings.warn(
            f"the model has coordinates of points on manifolds: {kinds}; this optimizer moves them as any other "
            "parameter, in a frame that stays. For Riemannian steps give it the part of the model without the points, "
            "and them to gnomon.optim.moving_frame(torch.optim.SGD(point.parameters(), lr=...))",
            stacklevel=4,
        )


class Notices:
    """Warnings that come once, of ranks and modules that the optimizer does not see."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look(self, collector: Collector) -> None:
        """Look at what the hooks have seen before a step."""
        if not collector.is_watching:
            return
        strategy = collector.strategy
        if strategy.count == 1 and not strategy.is_sharded and (ranks := _ranks()) > 1:
            self._say(
                f"this process is one of {ranks} ranks, but the model is neither in DistributedDataParallel nor in "
                "fully_shard(), so that the statistics of layers are those of this rank's batches. Where ranks average "
                "gradients by themselves their weights drift apart: wrap the model, or give curvature='gradient', "
                "whose factors follow the averaged gradients"
            )
        if not collector.was_called and any(layer.weight.grad is not None for layer in collector.watched()):
            self._say(
                "the model's layers have gradients, but no module of them was called since this optimizer was built: "
                "gradients stand in for the statistics of layers. A compiled model sees hooks only if its first call "
                "comes after the optimizer is built (torch.compiler.reset() lets it begin anew). Where gradients come "
                "from elsewhere, give curvature='gradient'"
            )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=7)  # where step() is called


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class SkippedSteps:
    """Counts the steps in a row that were skipped; warns of the first, and once of very many.

    The count stays on the device. The host reads what has come of it until now, so that it does not wait.
    """

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self._read: Tensor | None = None
        self._warned_at = 0

    def count(self, skipped: Tensor) -> None:
        """Add one if a step was skipped; otherwise begin again at zero."""
        known = 0 if self._count is None else self._count.to(skipped.device)
        self._count = (known + 1) * skipped
        if self._read is None:
            self._read = torch.zeros(1, dtype=torch.long, device="cpu", pin_memory=skipped.device.type == "cuda")
        self._read.copy_(self._count, non_blocking=True)
        self._warn(*self._read.tolist())

    def _warn(self, missed: int) -> None:
        if missed >= MANY > self._warned_at:
            self._warned_at = MANY
            warnings.warn(
                f"the last {missed} steps were all skipped, because gradients or their natural directions were not "
                "finite: the model is not trained any more. Go back to a checkpoint, with a smaller learning rate or "
                "without the data that gives such gradients",
                stacklevel=6,
            )
        elif missed > 0 == self._warned_at:
            self._warned_at = 1
            warnings.warn(
                "a gradient, or its natural direction, is not finite: the step was skipped, and nothing changed; look "
                "at the loss, the data or the learning rate (further ones are only counted, in "
                "optimizer.skipped_steps)",
                stacklevel=6,
            )
