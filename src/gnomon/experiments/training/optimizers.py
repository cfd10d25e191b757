"""The optimizers that a run can use, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...optim import INGD, KFAC
from .config import SETTINGS, Config, TrainingError


def soap(model: nn.Module, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Return SOAP with an update of its preconditioner every 10 steps."""
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr=lr, weight_decay=weight_decay, precondition_frequency=10)


def muon(model: nn.Module, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Return Muon for hidden weights, and AdamW for embeddings, the last linear layer, biases and gains.

    Its authors recommend that. Muon's steps are scaled to the size of AdamW's, so that both have one learning rate.
    """
    from pytorch_optimizer import Muon

    heads = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer = {id(p) for module in (*heads, *embeddings) for p in module.parameters()}
    hidden = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in outer]
    others = [p for p in model.parameters() if p.ndim < 2 or id(p) in outer]
    return Muon(
        [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}],
        lr=lr,
        weight_decay=weight_decay,
        use_adjusted_lr=True,
        adamw_lr=lr,
        adamw_wd=weight_decay,
    )


def lion(model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    from pytorch_optimizer import Lion

    return Lion(model.parameters(), lr=lr, weight_decay=weight_decay)


def _of_torch(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    return lambda model, **settings: kind(model.parameters(), **settings)


BUILDERS: dict[str, Callable[..., Optimizer]] = {
    "ingd": INGD,
    "kfac": KFAC,
    "sgd": _of_torch(torch.optim.SGD),
    "adam": _of_torch(torch.optim.Adam),
    "adamw": _of_torch(torch.optim.AdamW),
    "lion": lion,
    "soap": soap,
    "muon": muon,
}
"""Functions that build an optimizer from a model and the settings that ``SETTINGS`` has for its name."""

TITLES = {"ingd": "INGD", "kfac": "KFAC", "sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lion": "Lion"} | {
    "soap": "SOAP",
    "muon": "Muon",
}


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Build the optimizer of a completed config for a model."""
    name = config.optimizer
    if name in ("lion", "soap", "muon") and importlib.util.find_spec("pytorch_optimizer") is None:
        raise TrainingError(
            f"optimizer {name} needs pytorch-optimizer, which is not installed; pip install pytorch-optimizer"
        )
    settings: dict[str, Any] = {setting: getattr(config, setting) for setting in SETTINGS[name]}
    try:
        return BUILDERS[name](model, **settings)
    except (TypeError, ValueError) as error:  # for example an unknown structure
        raise TrainingError(f"{TITLES[name]} cannot be built: {error}") from None
