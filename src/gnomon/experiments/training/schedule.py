"""The learning rate in the course of a run."""

from __future__ import annotations

import math

from .config import Config

EPOCHS_OF_A_STAGE = 40
"""In the paper the rate is divided by 10 every 40 of 120 epochs."""


def rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """What the learning rate is multiplied by at a step of a completed config's run.

    ``step`` divides by 10 every 40 epochs, ``thirds`` after each third of the run, which is the same in 120 epochs.
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
    """Whether the rate depends on how many epochs there are."""
    return config.schedule in ("thirds", "cosine") or bool(config.warmup)
