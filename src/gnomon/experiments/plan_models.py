"""The networks that ``gnomon plan`` knows: all that can be trained here, and larger ones, without data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..optim import INGD
from .bench_limit import RowMeter
from .models import LARGE, MODELS, ModelSpec
from .models.gpt import GPT

CLASSES = {8: 10, 32: 100, 224: 1000, None: 256}
"""By the size of images; for text, bytes."""
VOCABULARIES = {"gpt-1.3b": 50257}
"""Where it is not bytes."""


@dataclass(frozen=True)
class PlannedModel:
    """A network with as many classes as its usual data has."""

    spec: ModelSpec
    classes: int
    batch: int
    """Samples of a rank's batch where nothing else is said."""

    def build(self) -> nn.Module:
        """On the meta device: all shapes, and no memory."""
        with torch.device("meta"):
            return self.spec.build(self.classes)

    def samples(self, network: nn.Module, batch: int) -> Tensor:
        """Images, or as many tokens as a text may have."""
        if isinstance(network, GPT):
            return torch.zeros(batch, network.positions.num_embeddings, dtype=torch.long, device="meta")
        assert self.spec.size is not None
        return torch.empty(batch, 3, self.spec.size, self.spec.size, device="meta")


PLANNED: dict[str, PlannedModel] = {
    spec.name: PlannedModel(spec, VOCABULARIES.get(spec.name, CLASSES[spec.size]), 8 if spec.size is None else 32)
    for spec in (*LARGE.values(), *MODELS.values())
}


@dataclass(frozen=True)
class Passes:
    """A forward and a backward pass through a network."""

    multiplications: int
    rows: dict[nn.Parameter, int]
    """By weight, of which INGD's statistics are made."""


def passes(model: PlannedModel, network: nn.Module, batch: int, ranks: int) -> Passes:
    """Of a rank's batch. A backward pass counts as two forward ones: torch counts too many for grouped convolutions."""
    preset = INGD.presets["robust"]
    meter = RowMeter(network, preset["approx"], preset["subsample"], ranks)
    with FlopCounterMode(display=False) as counter:  # on the meta device, where nothing is computed
        output = network(model.samples(network, batch))
    output.sum().backward()
    network.zero_grad()
    return Passes(3 * counter.get_total_flops() // 2, dict(meter.rows))
