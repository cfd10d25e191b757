"""The schedule of the learning rate."""

from __future__ import annotations

import math

from .config import Config

EPOCHS_OF_A_STAGE = 40
"""The paper divides the rate by 10 every 40 of 120 epochs."""


def rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """Return the factor of the learning rate at a step of a completed config's run.

    ``step`` divides by 10 every 40 epochs. ``thirds`` divides by 10 after each third of the run. Both are the same in a
    run of 120 epochs.
    """
    total = config.epochs * steps_per_epoch
    warm = round((config.warmup or 0.0) * total)
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "step":
        return 10.0 ** -(step // (EPOCHS_OF_A_STAGE * steps_per_epoch))
    if config.schedule == "thirds":
        return 10.0 ** -(3 * step // total)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(total - warm, 1)))
    return 1.0


def needs_the_end(config: Config) -> bool:
    """Return whether the rate depends on the number of epochs."""
    return config.schedule in ("thirds", "cosine") or bool(config.warmup)
