"""The networks that ``gnomon plan`` knows: all networks of ``gnomon train``, and larger ones that have no data here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...optim import INGD
from ...optim.kronecker.config import preset_arguments
from ..common.layer_sizes import RowMeter
from ..models import LARGE, MODELS, ModelSpec
from ..models.gpt import GPT

CLASSES = {8: 10, 32: 100, 224: 1000, None: 256}
"""The number of classes by the size of images. Text has no size, and its classes are bytes."""
VOCABULARIES = {"gpt-1.3b": 50257}
"""The number of tokens of the models that do not read bytes."""


@dataclass(frozen=True)
class PlannedModel:
    """A network with as many classes as its usual data has."""

    spec: ModelSpec
    classes: int
    batch: int
    """The default number of samples in a rank's batch."""

    def build(self) -> nn.Module:
        """Build the network on the meta device. It has shapes but uses no memory."""
        with torch.device("meta"):
            return self.spec.build(self.classes)

    def samples(self, network: nn.Module, batch: int) -> Tensor:
        """Return a batch of images, or of texts of the greatest length."""
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
    """The work of a forward and a backward pass through a network."""

    multiplications: int
    rows: dict[nn.Parameter, int]
    """The number of rows of INGD's statistics, by weight."""


def passes(model: PlannedModel, network: nn.Module, batch: int, ranks: int) -> Passes:
    """Count the passes of a rank's batch.

    A backward pass counts as two forward passes, because torch counts too many operations for grouped convolutions.
    """
    preset = preset_arguments(INGD)
    meter = RowMeter(network, preset["approx"], preset["subsample"], ranks)
    with FlopCounterMode(display=False) as counter:  # on the meta device, where nothing is computed
        output = network(model.samples(network, batch))
    output.sum().backward()
    network.zero_grad()
    return Passes(3 * counter.get_total_flops() // 2, dict(meter.rows))
