"""The optimizers that the suite compares, and their learning rates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from ...optim import INGD, KFAC
from ...optim.kronecker.config import preset_arguments
from ...optim.kronecker.factor_update import early_average
from ..training.optimizers import soap
from .muon import Muon


def every_twenty(step: int) -> int:
    """Return the interval between updates of version 0.1: 1 for twenty steps, then 2 for twenty, and so on up to 10."""
    return min(10, 1 + step // 20)


INTERVALS: dict[str, Any] = {"update_every": every_twenty, "growing_intervals": False}
BEFORE: dict[str, Any] = {
    "momentum": 0.8,
    "weight_decay": 0.2,
    "damping": 0.2,
    "precond_lr": early_average,
    "precond_momentum": 0.0,
    **INTERVALS,
    "structure": "dense",
    "curvature": "kfac",
    "fisher": "empirical",
    "approx": "auto",
    "grouped": "each",
    "step_rms": 0.5,
    "base_width": None,
    "scheduled_decay": False,
    "polar": False,
    "kl_clip": None,
    "max_factor_step": 0.5,
    "order": 2,
    "relative": True,
    "subsample": True,
    "max_dim": 8192,
    "fallback": "adamw",
}
"""INGD's defaults in version 0.1. They stay what they are when the defaults change."""
BEFORE_RATE = 1e-2


@dataclass(frozen=True)
class Contestant:
    """An optimizer with the learning rates that are tried, which are even powers of two times its usual one."""

    name: str
    title: str
    usual: float
    """The rate that is used if nothing is tuned."""
    factors: tuple[float, ...]
    build: Callable[[nn.Module, float], Optimizer]
    package: str = "gnomon"
    settings: dict[str, str] = field(default_factory=dict)
    """What else determines its runs. A result with other settings is not taken."""

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(factor * self.usual for factor in self.factors)

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _layerwise(
    name: str, title: str, kind: Any, preset: str = "robust", rules: str | None = None, **settings: Any
) -> Contestant:
    """Return an optimizer of this library. What is not among the settings is the default of its preset.

    ``rules`` names the rules that no argument shows. Another name asks for new runs.
    """
    chosen = preset_arguments(kind, preset) | settings
    described = {key: getattr(value, "__name__", str(value)) for key, value in chosen.items() if key != "lr"}
    described |= {} if rules is None else {"rules": rules}
    return Contestant(
        name,
        title,
        chosen["lr"],
        (0.25, 0.5, 1.0, 2.0),
        partial(kind, preset=preset, **{key: value for key, value in settings.items() if key != "lr"}),
        settings=described,
    )


ADAMW, MUON = "adamw", "muon"

CONTESTANTS: dict[str, Contestant] = {
    one.name: one
    for one in (
        Contestant(ADAMW, "AdamW", 1e-3, (1, 2, 4, 8), lambda model, lr: AdamW(model.parameters(), lr=lr), "torch"),
        Contestant("soap", "SOAP", 3e-3, (1, 2, 4, 8), partial(soap, weight_decay=0.01), "pytorch_optimizer"),
        Contestant(MUON, "Muon", 2e-3, (1, 2, 4, 8), Muon),
        _layerwise("kfac", "KFAC", KFAC, **INTERVALS),
        _layerwise("ingd-paper", "INGD, paper", INGD, "paper"),
        _layerwise("ingd-before", "INGD before", INGD, lr=BEFORE_RATE, **BEFORE),
        _layerwise(
            "ingd",
            "INGD",
            INGD,
            rules="intervals 5, rows 1, halves 16, inner 256, width 48, plain 0.5, embedding 2, polar 3",
        ),
    )
}
