"""The networks of the paper's runs (its table ``nn_models``) and some smaller networks, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from .convmixer import convmixer
from .gpt import gpt, gpt_1_3b
from .perceptron import mlp
from .pyramidnet import pyramidnet
from .resnet import resnet
from .vgg import vgg
from .vision import regnetx_for_small_images, repvgg, timm_model
from .vit import vit_b


@dataclass(frozen=True)
class ModelSpec:
    """A network with a name."""

    name: str
    title: str
    network: Callable[[int, int], nn.Module]
    """Builds the network from the numbers of classes and channels. Weights come from torch's global generator."""
    size: int | None
    """The side of the images for which the network is meant. None for text, where the classes are the tokens."""
    update_every: int | None = None
    """The paper's interval between updates of the preconditioner, if the paper uses the network."""
    package: str = "gnomon"
    """The package that the network comes from."""

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def build(self, classes: int, channels: int = 3) -> nn.Module:
        """Build the network for images of so many channels."""
        for argument, value in (("classes", classes), ("channels", channels)):
            if value < 1:
                raise ValueError(f"{argument} must be at least 1, got {value}")
        if not self.installed:
            remedy = "install gnomon's extra 'vision' (docs/training.md)"
            raise ModuleNotFoundError(f"model {self.name!r} needs {self.package}; {remedy}", name=self.package)
        return self.network(classes, channels)


VGG_16 = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("vgg16-bn", "VGG-16-BN", partial(vgg, VGG_16), 32, 10),
        ModelSpec("pyramidnet-65", "PyramidNet-65", partial(pyramidnet, 65, 48), 32, 10),
        ModelSpec("convmixer256-12", "ConvMixer256-12", partial(convmixer, 256, 12, 5, 2), 32, 10),
        ModelSpec("regnetx-1.6gf", "RegNetX-1.6GF", regnetx_for_small_images, 32, 10, "timm"),
        ModelSpec("regnetz-500mf", "RegNetZ-500MF", partial(timm_model, "regnetz_005"), 224, 25, "timm"),
        ModelSpec("repvgg-b1g4", "RepVGG-B1G4", repvgg, 224, 60, "timm"),
        ModelSpec("convmixer180-16", "ConvMixer180-16", partial(convmixer, 180, 16, 7, 7), 224, 25),
        ModelSpec("rexnetr-100", "ReXNetr-100", partial(timm_model, "rexnetr_100"), 224, 15, "timm"),
        ModelSpec("mlp", "MLP 64-256-128", mlp, 8),
        ModelSpec("cnn", "CNN 32-64-128", partial(vgg, ((32,), (64,), (128,))), 32),
        ModelSpec("convmixer128-6", "ConvMixer128-6", partial(convmixer, 128, 6, 5, 4), 32),
        ModelSpec("gpt", "GPT, 2 layers of 128", gpt, None),
    )
}

LARGE: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("resnet-50", "ResNet-50", partial(resnet, (3, 4, 6, 3)), 224),
        ModelSpec("vit-b", "ViT-B/16", vit_b, 224),
        ModelSpec("gpt-1.3b", "GPT, 24 layers of 2048", gpt_1_3b, None),
    )
}
"""Large networks for ``gnomon plan``. ``gnomon train`` does not have them."""


def build(name: str, classes: int, channels: int = 3) -> nn.Module:
    """Build the network of a name, for images of so many channels. The classes of ``gpt`` are the tokens."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
    return MODELS[name].build(classes, channels)
