"""Sums of statistics over ranks, sent while the backward pass is still running."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ...linalg import pack_symmetric, packed_size, power_of_two, unpack_symmetric
from ..kronecker.factor_forms import FactorForm
from ..kronecker.layers.base import FactoredLayer, alike
from ..kronecker.statistics import Factors, MatrixMoment, Moment, ProjectedMoment, Statistics, summable
from .process_group import Message, Ranks

BUCKET = 2**25
"""The bytes of a message: as many layers as fit into it travel together."""
Item = TypeVar("Item")
Units = tuple[Tensor, Tensor]
"""The units of the moments of inputs and of output gradients."""


def portions(items: Iterable[Item], size: Callable[[Item], int], capacity: int) -> list[list[Item]]:
    """Group items in their order, as many together as the capacity allows; a larger item is alone."""
    found: list[list[Item]] = []
    left = 0
    for item in items:
        if size(item) > left:
            found.append([])
            left = max(capacity, size(item))
        found[-1].append(item)
        left -= size(item)
    return found


# ---------------------------------------------------------------------- the content of a message
def moment_size(form: FactorForm, blocks: int) -> int:
    """Return how many numbers of a message a moment takes.

    A symmetric matrix has each number once; otherwise there are a projection and a trace.
    """
    if form.keeps_matrix:
        return blocks * packed_size(form.size)
    return blocks * (sum(torch.Size(shape).numel() for shape in form.covector_shapes) + 1)


def statistics_size(layer: FactoredLayer) -> int:
    """Return how many numbers of a message a layer's statistics take: two moments, and the counts of rows and terms."""
    return sum(moment_size(form, layer.layer.blocks) for form in layer.pair) + 2


def encoded(layer: FactoredLayer, factors: Factors, statistics: Statistics, units: Units) -> Tensor:
    """Return statistics in given units as one vector, so that a sum of vectors is a sum of statistics."""
    sides = zip(layer.pair, factors, (statistics.inputs, statistics.outputs), units, strict=True)
    parts = [part for form, a, moment, unit in sides for part in _sent(summable(form, a, moment).in_unit(unit))]
    counts = [parts[0].new_full((1,), count) for count in (statistics.rows, statistics.terms)]
    return torch.cat([part.flatten() for part in (*parts, *counts)])


def _sent(moment: Moment) -> Sequence[Tensor]:
    return (pack_symmetric(moment.matrix),) if isinstance(moment, MatrixMoment) else moment.tensors


def decoded(layer: FactoredLayer, vector: Tensor, units: Units, ranks: int) -> Statistics:
    """Return the statistics of all ranks together, as means.

    The loss is the mean of the ranks' losses, which divides each output gradient once more.
    """
    blocks, forms = layer.layer.blocks, layer.pair
    *moments, counts = vector.split([*(moment_size(form, blocks) for form in forms), 2])
    sides = zip(forms, moments, units, strict=True)
    inputs, outputs = (_received(form, blocks, part, unit) for form, part, unit in sides)
    rows, terms = counts.unbind()
    return Statistics(
        inputs.of([t / rows for t in inputs.tensors], inputs.unit),  # not finite where no rank has reached the layer
        outputs.of([t * (terms / ranks**2) for t in outputs.tensors], outputs.unit),
        rows=1,
        terms=1,
    )


def _received(form: FactorForm, blocks: int, part: Tensor, unit: Tensor) -> Moment:
    """Return the received moment, in a unit near its own size."""
    moment = _moment_of(form, blocks, part, unit)
    return moment.in_unit(unit * power_of_two(moment.energy.sqrt()))


def _moment_of(form: FactorForm, blocks: int, part: Tensor, unit: Tensor) -> Moment:
    if form.keeps_matrix:
        return MatrixMoment(unpack_symmetric(part.view(blocks, -1), form.size), unit)
    shapes = [(blocks, *shape) for shape in (*form.covector_shapes, ())]
    tensors = part.split([torch.Size(shape).numel() for shape in shapes])
    *covector, total = (tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True))
    return ProjectedMoment(tuple(covector), total, unit)


# ---------------------------------------------------------------------- messages
@dataclass
class Bucket:
    """Layers whose statistics travel in one message, to their owner or, without one, to all ranks."""

    owner: int | None
    layers: list[FactoredLayer]
    waiting: dict[int, Tensor] = field(default_factory=dict)
    """By layer, what has come since the last message."""
    messages: list[Message] = field(default_factory=list)

    def is_full(self, due: Collection[Tensor]) -> bool:
        return all(layer.index in self.waiting for layer in self.layers if layer.weight in due)


class StatisticsExchange:
    """Messages in an order that is the same at all ranks, whatever layers their batches reach.

    A backward pass fills the buckets, from the model's end to its beginning, and each leaves when it is full and all
    before it have left. Those that are left at the end of the pass leave then, with zeros for layers that it did not
    reach. Sums of several passes add up until they are collected.
    """

    def __init__(self, ranks: Ranks, layers: Sequence[FactoredLayer], owners: Sequence[int | None]) -> None:
        self._ranks = ranks
        self._pass: int | None = None
        self._next = 0  # the first bucket that has not left in this pass
        self._unsent = True  # whether there is something that no message has taken
        self._buckets = self._filled(list(zip(layers, owners, strict=True)))
        self._bucket_of = {layer.index: bucket for bucket in self._buckets for layer in bucket.layers}
        self.units: dict[int, Units] = {}
        """By layer, the units in which all ranks send its moments."""

    def _filled(self, owned: list[tuple[FactoredLayer, int | None]]) -> list[Bucket]:
        """Return the buckets in the order in which a backward pass completes them."""
        place = {layer.index: -number for number, (layer, _) in enumerate(owned)}
        kinds = alike(reversed(owned), lambda item: (item[1], item[0].computing_dtype, item[0].weight.device))
        buckets = [
            Bucket(same[0][1], some)
            for same in kinds
            for some in portions([layer for layer, _ in same], _message_bytes, BUCKET)
        ]
        return sorted(buckets, key=lambda bucket: place[bucket.layers[-1].index])

    # ------------------------------------------------------------------ units
    def _due_layers(self, due: Collection[Tensor]) -> list[FactoredLayer]:
        return [layer for bucket in self._buckets for layer in bucket.layers if layer.weight in due]

    def has_units(self, due: Collection[Tensor]) -> bool:
        """Return whether the ranks know the units of all layers that are due."""
        return all(layer.index in self.units for layer in self._due_layers(due))

    def agree_on_units(self, due: Collection[Tensor], known: Callable[[FactoredLayer], Statistics | None]) -> None:
        """Make the largest unit of any rank that of all, for layers that have none yet; all ranks take part."""
        new = [layer for layer in self._due_layers(due) if layer.index not in self.units]
        for same in alike(new, lambda layer: (layer.computing_dtype, layer.weight.device)):
            own = [unit for layer in same for unit in _own_units(layer, known(layer))]
            largest = self._ranks.maximum(torch.cat(own))
            agreed = torch.where((largest > 0) & largest.isfinite(), largest, 1).split([len(unit) for unit in own])
            self.units |= {layer.index: (agreed[2 * i], agreed[2 * i + 1]) for i, layer in enumerate(same)}

    # ------------------------------------------------------------------ sending
    def is_new(self, number: int) -> bool:
        """Return whether a backward pass of this number has brought nothing yet."""
        return number != self._pass

    def begin(self, number: int) -> None:
        """Begin a backward pass, whose statistics are added to those that are there."""
        self._pass, self._next = number, 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come since the last step."""
        return not any(bucket.waiting or bucket.messages for bucket in self._buckets)

    def put(self, layer: FactoredLayer, factors: Factors, statistics: Statistics) -> None:
        """Take the statistics of a layer for the next message."""
        vector = encoded(layer, factors, statistics, self.units[layer.index])
        waiting = self._bucket_of[layer.index].waiting
        known = waiting.get(layer.index)
        waiting[layer.index] = vector if known is None else known + vector
        self._unsent = True

    def send_full(self, due: Collection[Tensor]) -> None:
        """Send the buckets that are full, in their order."""
        while self._next < len(self._buckets) and self._buckets[self._next].is_full(due):
            self._send(self._buckets[self._next], due)
            self._next += 1

    def send_rest(self, due: Collection[Tensor]) -> None:
        """Send all buckets that have not left, at the end of a pass."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket, due)
        self._next, self._unsent = len(self._buckets), False

    def _send(self, bucket: Bucket, due: Collection[Tensor]) -> None:
        layers = [layer for layer in bucket.layers if layer.weight in due]
        if not layers:
            return
        vectors = [bucket.waiting.pop(t.index) if t.index in bucket.waiting else _nothing(t) for t in layers]
        bucket.messages.append(self._ranks.add_up(torch.cat(vectors), bucket.owner, "statistics"))

    # ------------------------------------------------------------------ receiving
    def collect(self, due: Collection[Tensor]) -> dict[int, Tensor]:
        """Return the sums since the last time by layer, where this rank is to know them."""
        if self._unsent:
            self._next = 0
            self.send_rest(due)
        found: dict[int, Tensor] = {}
        for bucket in self._buckets:
            received = [message.received() for message in bucket.messages]
            layers = [layer for layer in bucket.layers if layer.weight in due]
            if received and bucket.owner in (None, self._ranks.rank):
                total = torch.stack(received).sum(0) if len(received) > 1 else received[0]
                parts = total.split([statistics_size(layer) for layer in layers])
                found |= {layer.index: part for layer, part in zip(layers, parts, strict=True)}
        self.forget()
        return found

    def forget(self) -> None:
        """Wait for what is on its way, and drop it."""
        for bucket in self._buckets:
            for message in bucket.messages:
                message.received()
            bucket.messages.clear()
            bucket.waiting.clear()
        self._pass, self._next, self._unsent = None, 0, True


def _message_bytes(layer: FactoredLayer) -> int:
    return statistics_size(layer) * layer.computing_dtype.itemsize


def _own_units(layer: FactoredLayer, statistics: Statistics | None) -> Units:
    """Return the units of what this rank's batch gave, or zeros where it gave nothing."""
    if statistics is not None:
        return statistics.inputs.unit, statistics.outputs.unit
    none = torch.zeros(layer.layer.blocks, dtype=layer.computing_dtype, device=layer.weight.device)
    return none, none


def _nothing(layer: FactoredLayer) -> Tensor:
    return torch.zeros(statistics_size(layer), dtype=layer.computing_dtype, device=layer.weight.device)
