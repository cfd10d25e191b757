"""The optimizers that ``gnomon bench`` compares."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ...optim import INGD, KFAC
from ...optim.kronecker.structures import NAMES
from ..training.optimizers import muon, soap
from .models import Model

LR = 1e-4
"""The learning rate of all optimizers. Time does not depend on it. It is small, so that no loss becomes infinite."""

TURN = 10
"""The steps of a turn. An optimizer makes equally many updates in each turn."""

Builder = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Contestant:
    """An optimizer that takes part: its name and how it is built."""

    name: str
    build: Builder
    package: str = "gnomon"
    """The package that the optimizer comes from."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of INGD and KFAC."""
    steps: int = TURN
    """The steps of a turn. An optimizer that takes seconds for a step has fewer, if all its steps are alike."""

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def has_limit(self) -> bool:
        """Whether this is INGD with dense factors of layer statistics. Its least possible work is known."""
        chosen = {"structure": "auto", "curvature": "kfac"} | self.settings
        return self.name.startswith("INGD") and (chosen["structure"], chosen["curvature"]) == ("dense", "kfac")


class GradientOnly(Optimizer):
    """An optimizer that does nothing. Its steps cost as much as the gradient alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


GRADIENT_ONLY = Contestant("gradient only", GradientOnly, "torch")
UNIT = Contestant("SGD", lambda model: SGD(model.parameters(), lr=LR, momentum=0.9), "torch")
"""The optimizer whose time is the unit of all times."""


def contestants(model: Model) -> list[Contestant]:
    """Return all optimizers that are timed on a model, SGD first. The gradient alone is not among them."""
    return [
        UNIT,
        Contestant("AdamW", lambda m: AdamW(m.parameters(), lr=LR), "torch"),
        _layerwise(INGD, "INGD", 10),
        _ingd("low memory", 10, memory="low"),
        *_dense_ingd(model),
        *(_ingd(name, 10, structure=name) for name in NAMES if name != "dense"),
        _ingd("gradient", 10, curvature="gradient"),
        *(_layerwise(KFAC, "KFAC", interval) for interval in (1, 10)),
        *_singd(model),
        Contestant("SOAP", partial(soap, lr=LR), "pytorch_optimizer"),
        # Muon multiplies in bfloat16, which is slow on most CPUs.
        Contestant("Muon", partial(muon, lr=LR), "pytorch_optimizer", steps=1),
    ]


def _dense_ingd(model: Model) -> list[Contestant]:
    """Return INGD with dense factors, with each approximation that makes a difference on the model."""
    kinds, dense = _approximations(model), {"structure": "dense"}
    defaults = [_ingd(f"dense{label}", interval, **dense, **approx) for label, approx in kinds for interval in (1, 10)]
    paper = [_ingd("dense paper", interval, preset="paper", **dense) for interval in (1, 10)]
    return [*defaults, _ingd("dense low memory", 10, memory="low", **dense), *paper]


def _approximations(model: Model, keyword: str = "approx") -> list[tuple[str, dict[str, str]]]:
    """Return labels and settings. They differ on convolutions, whose positions can be reduced or expanded."""
    if not model.convolutional:
        return [("", {})]
    return [(f" {approx}", {keyword: approx}) for approx in ("reduce", "expand")]


def _ingd(label: str, interval: int, **settings: str) -> Contestant:
    return _layerwise(INGD, f"INGD {label}", interval, **settings)


def _layerwise(kind: Callable[..., Optimizer], name: str, interval: int, **settings: str) -> Contestant:
    """Return INGD or KFAC with updates at even intervals from the start."""
    chosen = {**settings, "update_every": interval}
    build = partial(kind, lr=LR, growing_intervals=False, **chosen)
    return Contestant(f"{name} T={interval}", build, settings=chosen)


def _singd(model: Model) -> list[Contestant]:
    def build(network: nn.Module, **settings: Any) -> Optimizer:
        from singd.optim.optimizer import SINGD

        return SINGD(network, lr=LR, warn_unsupported=False, **settings)

    chosen: dict[str, dict[str, Any]] = {
        f"dense{label} T={interval}": {"T": interval, **approx}
        for label, approx in _approximations(model, "kfac_approx")
        for interval in (1, 10)
    }
    if model.name == "mlp":
        sparse = {"diagonal": ("diagonal", "diagonal"), "toeplitz": ("triltoeplitz", "triltoeplitz")}
        chosen |= {f"{name} T=10": {"T": 10, "structures": pair} for name, pair in sparse.items()}
    return [Contestant(f"singd {name}", partial(build, **settings), "singd") for name, settings in chosen.items()]
