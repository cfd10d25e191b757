"""What ``gnomon bench`` compares: four models, each with a batch, and the optimizers that train them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from ..optim import INGD, KFAC
from ..optim.structures import NAMES
from .models.convmixer import convmixer
from .models.gpt import GPT
from .models.perceptron import perceptron
from .training.optimizers import muon, soap

LR = 1e-4
"""Small, and the same for all: time does not depend on it, and the models stay near where they began."""

TURN = 10
"""Steps of a turn: each has as many updates of an optimizer as any other."""

Builder = Callable[[nn.Module], Optimizer]


# ---------------------------------------------------------------------- models
@dataclass(frozen=True)
class Model:
    """A network and the shape of its inputs."""

    name: str
    title: str
    network: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int = 10
    sequences: bool = False
    """Whether inputs are classes too, and the next one at each position is the target."""
    convolutional: bool = False

    def build(self) -> nn.Module:
        """The network at its start, the same at each call."""
        torch.manual_seed(0)
        return self.network()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random inputs and targets, the same at each call."""
        generator = torch.Generator().manual_seed(0)
        if self.sequences:
            tokens = torch.randint(self.classes, (self.inputs[0], self.inputs[1] + 1), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]
        targets = torch.randint(self.classes, self.inputs[:1], generator=generator)
        return torch.randn(self.inputs, generator=generator), targets

    def loss(self, network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean cross entropy of a batch."""
        return cross_entropy(network(batch[0]).flatten(0, -2), batch[1].flatten())


def mlp() -> nn.Module:
    return perceptron((784, 512, 512, 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise((3, 64, 128, 256)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def conv_mixer() -> nn.Module:
    return convmixer(width=256, depth=4, kernel=5, patch=4, classes=10, channels=3)


def transformer() -> nn.Module:
    return GPT(width=256, heads=4, layers=2, context=64)


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("mlp", "MLP 784-512-512-10, batch 128", mlp, (128, 784)),
        Model("cnn", "CNN 64-128-256, 32 x 32, batch 32", cnn, (32, 3, 32, 32), convolutional=True),
        Model("convmixer", "ConvMixer-256/4, 32 x 32, batch 32", conv_mixer, (32, 3, 32, 32), convolutional=True),
        Model("transformer", "transformer, 2 layers of 256, 64 tokens, batch 16", transformer, (16, 64), 256, True),
    )
}


# ---------------------------------------------------------------------- optimizers
@dataclass(frozen=True)
class Contestant:
    """A name and how to build the optimizer."""

    name: str
    build: Builder
    package: str = "gnomon"
    """What it comes from."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of INGD and KFAC."""
    steps: int = TURN
    """Of a turn; fewer for what takes seconds a step, if all its steps are alike."""

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def has_limit(self) -> bool:
        """Whether it is INGD with dense factors of layer statistics, whose least work is known."""
        chosen = {"structure": "dense", "curvature": "kfac"} | self.settings
        return self.name.startswith("INGD") and (chosen["structure"], chosen["curvature"]) == ("dense", "kfac")


class GradientOnly(Optimizer):
    """Moves nothing: what remains is the cost of the gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


GRADIENT_ONLY = Contestant("gradient only", GradientOnly, "torch")
UNIT = Contestant("SGD", lambda model: SGD(model.parameters(), lr=LR, momentum=0.9), "torch")
"""What times are multiples of."""


def contestants(model: Model) -> list[Contestant]:
    """All optimizers that are tried on a model, SGD first; the cost of the gradient is not among them."""
    return [
        UNIT,
        Contestant("AdamW", lambda m: AdamW(m.parameters(), lr=LR), "torch"),
        *_dense_ingd(model),
        *(_ingd(name, 10, structure=name) for name in NAMES if name != "dense"),
        _ingd("gradient", 10, curvature="gradient"),
        *(_layerwise(KFAC, "KFAC", interval) for interval in (1, 10)),
        *_singd(model),
        Contestant("SOAP", partial(soap, lr=LR), "pytorch_optimizer"),
        Contestant(
            "Muon", partial(muon, lr=LR), "pytorch_optimizer", steps=1
        ),  # its products are in bfloat16: slow on most CPUs
    ]


def _dense_ingd(model: Model) -> list[Contestant]:
    """On convolutions positions are counted each or reduced; on other models that is one, or a choice of the loss."""
    kinds = _approximations(model)
    defaults = [_ingd(f"dense{label}", interval, **approx) for label, approx in kinds for interval in (1, 10)]
    paper = [_ingd("dense paper", interval, preset="paper") for interval in (1, 10)]
    return [*defaults, _ingd("dense low memory", 10, memory="low"), *paper]


def _approximations(model: Model, keyword: str = "approx") -> list[tuple[str, dict[str, str]]]:
    if not model.convolutional:
        return [("", {})]
    return [(f" {approx}", {keyword: approx}) for approx in ("reduce", "expand")]


def _ingd(label: str, interval: int, **settings: str) -> Contestant:
    return _layerwise(INGD, f"INGD {label}", interval, **settings)


def _layerwise(kind: Callable[..., Optimizer], name: str, interval: int, **settings: str) -> Contestant:
    """INGD or KFAC with updates at even intervals from the start."""
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
