"""Statistics of layers, added up over ranks while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..groups import Element, Group, symmetric
from .factors import Covariance, Moment, Seen, Statistics, additive
from .moves import Tracked, alike, portions
from .ranks import Message, Ranks
from .rounding import power_of_two

BUCKET = 2**25
"""Bytes of a message: as many layers as fit into it travel together."""


# ---------------------------------------------------------------------- what a message holds
def moment_size(group: Group, blocks: int) -> int:
    """Numbers of a moment on its way: a symmetric matrix's once, or what a structure sees of it, and its trace."""
    return blocks * (symmetric.packed_size(group.k) if group.keeps_covariance else group.numel + 1)


def statistics_size(tracked: Tracked) -> int:
    """Numbers of a layer's statistics on their way: two moments, and the counts of rows and terms."""
    blocks, factors = tracked.layer.blocks, tracked.factors
    return moment_size(factors.left, blocks) + moment_size(factors.right, blocks) + 2


def encoded(
    tracked: Tracked,
    factors: tuple[Element | None, Element | None],
    statistics: Statistics,
    units: tuple[Tensor, Tensor],
) -> Tensor:
    """Statistics in given units as one vector, in which sums over batches and ranks are sums of statistics."""
    groups, moments = (tracked.factors.left, tracked.factors.right), (statistics.inputs, statistics.outputs)
    sides = zip(groups, factors, moments, units, strict=True)
    parts = [part for group, a, moment, unit in sides for part in _sent(additive(group, a, moment).in_unit(unit))]
    counts = [parts[0].new_full((1,), count) for count in (statistics.rows, statistics.terms)]
    return torch.cat([part.flatten() for part in (*parts, *counts)])


def _sent(moment: Moment) -> Sequence[Tensor]:
    return (symmetric.pack(moment.s),) if isinstance(moment, Covariance) else moment.tensors


def decoded(tracked: Tracked, vector: Tensor, units: tuple[Tensor, Tensor], ranks: int) -> Statistics:
    """Of all ranks together, as means: the loss is the mean of theirs, which divides each output gradient once more."""
    blocks, groups = tracked.layer.blocks, (tracked.factors.left, tracked.factors.right)
    *moments, counts = vector.split([*(moment_size(group, blocks) for group in groups), 2])
    sides = zip(groups, moments, units, strict=True)
    inputs, outputs = (_received(group, blocks, part, unit) for group, part, unit in sides)
    rows, terms = counts.unbind()
    return Statistics(
        inputs.of([t / rows for t in inputs.tensors], inputs.unit),  # not finite where no rank has seen the layer
        outputs.of([t * (terms / ranks**2) for t in outputs.tensors], outputs.unit),
        rows=1,
        terms=1,
    )


def _received(group: Group, blocks: int, part: Tensor, unit: Tensor) -> Moment:
    """A moment in the unit that its own size asks for, whatever that of the message was."""
    moment = _moment_of(group, blocks, part, unit)
    return moment.in_unit(unit * power_of_two(moment.energy.sqrt()))


def _moment_of(group: Group, blocks: int, part: Tensor, unit: Tensor) -> Moment:
    if group.keeps_covariance:
        return Covariance(symmetric.unpack(part.view(blocks, -1), group.k), unit)
    shapes = [(blocks, *shape) for shape in (*group.shapes, ())]
    tensors = part.split([torch.Size(shape).numel() for shape in shapes])
    *element, total = (tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True))
    return Seen(tuple(element), total, unit)


# ---------------------------------------------------------------------- messages
@dataclass
class Bucket:
    """Layers whose statistics travel in one message, to their owner or, without one, to all ranks."""

    owner: int | None
    layers: list[Tracked]
    waiting: dict[int, Tensor] = field(default_factory=dict)
    """By layer, what has come since the last message."""
    messages: list[Message] = field(default_factory=list)

    def is_full(self, due: Collection[Tensor]) -> bool:
        return all(t.index in self.waiting for t in self.layers if t.layer.weight in due)


class Exchange:
    """Messages in an order that is the same at all ranks, whatever layers their batches reach.

    A backward pass fills the buckets, from the model's end to its beginning, and each leaves when it is full and all
    before it have left. Those that are left at the end of the pass leave then, with zeros for layers that it did not
    reach. Sums of several passes add up until they are collected.
    """

    def __init__(
        self, ranks: Ranks, layers: Sequence[Tracked], owners: Sequence[int | None], dtype: Callable[..., torch.dtype]
    ) -> None:
        self._ranks, self._dtype = ranks, dtype
        self._pass: int | None = None
        self._next = 0  # the first bucket that has not left in this pass
        self._unsent = True  # whether there is something that no message has taken
        self._buckets = self._filled(list(zip(layers, owners, strict=True)))
        self._bucket_of = {tracked.index: bucket for bucket in self._buckets for tracked in bucket.layers}
        self.units: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer, the units in which all ranks send moments of inputs and of output gradients."""

    def _filled(self, owned: list[tuple[Tracked, int | None]]) -> list[Bucket]:
        """In the order in which a backward pass completes them."""
        place = {tracked.index: -number for number, (tracked, _) in enumerate(owned)}
        kinds = alike(reversed(owned), lambda item: (item[1], self._dtype(item[0]), item[0].layer.weight.device))
        buckets = [
            Bucket(same[0][1], some)
            for same in kinds
            for some in portions([tracked for tracked, _ in same], self._bytes, BUCKET)
        ]
        return sorted(buckets, key=lambda bucket: place[bucket.layers[-1].index])

    def _bytes(self, tracked: Tracked) -> int:
        return statistics_size(tracked) * self._dtype(tracked).itemsize

    def is_new(self, number: int) -> bool:
        """Whether a backward pass of this number has brought nothing yet."""
        return number != self._pass

    def begin(self, number: int) -> None:
        """A backward pass of this number brings statistics, which are added to those that are there."""
        self._pass, self._next = number, 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come since the last step."""
        return not any(bucket.waiting or bucket.messages for bucket in self._buckets)

    def has_units(self, due: Collection[Tensor]) -> bool:
        """Whether the ranks know the units of all layers that are due."""
        layers = (tracked for bucket in self._buckets for tracked in bucket.layers if tracked.layer.weight in due)
        return all(tracked.index in self.units for tracked in layers)

    def agree_on_units(self, due: Collection[Tensor]) -> None:
        """The largest unit of any rank becomes that of all, for layers that have none yet; all ranks take part."""
        layers = [tracked for bucket in self._buckets for tracked in bucket.layers if tracked.layer.weight in due]
        for same in alike(layers, lambda t: (self._dtype(t), t.layer.weight.device)):
            new = [tracked for tracked in same if tracked.index not in self.units]
            if not new:
                continue
            known = [u for t in new for u in self._own_units(t)]
            largest = self._ranks.maximum(torch.cat(known))
            agreed = torch.where((largest > 0) & largest.isfinite(), largest, 1).split([len(u) for u in known])
            self.units |= {t.index: (agreed[2 * i], agreed[2 * i + 1]) for i, t in enumerate(new)}

    def _own_units(self, tracked: Tracked) -> tuple[Tensor, Tensor]:
        """Of what this rank's batch gave; zeros where it gave nothing."""
        if tracked.statistics is not None:
            return tracked.statistics.inputs.unit, tracked.statistics.outputs.unit
        none = torch.zeros(tracked.layer.blocks, dtype=self._dtype(tracked), device=tracked.layer.weight.device)
        return none, none

    def put(self, tracked: Tracked, vector: Tensor) -> None:
        """Statistics of a layer, for the next message."""
        waiting = self._bucket_of[tracked.index].waiting
        known = waiting.get(tracked.index)
        waiting[tracked.index] = vector if known is None else known + vector
        self._unsent = True

    def send_full(self, due: Collection[Tensor]) -> None:
        """What can leave now."""
        while self._next < len(self._buckets) and self._buckets[self._next].is_full(due):
            self._send(self._buckets[self._next], due)
            self._next += 1

    def send_rest(self, due: Collection[Tensor]) -> None:
        """The pass has ended."""
        for bucket in self._buckets[self._next :]:
            self._send(bucket, due)
        self._next, self._unsent = len(self._buckets), False

    def _send(self, bucket: Bucket, due: Collection[Tensor]) -> None:
        layers = [tracked for tracked in bucket.layers if tracked.layer.weight in due]
        if not layers:
            return
        vectors = [bucket.waiting.pop(t.index) if t.index in bucket.waiting else self._nothing(t) for t in layers]
        bucket.messages.append(self._ranks.add_up(torch.cat(vectors), bucket.owner, "statistics"))

    def _nothing(self, tracked: Tracked) -> Tensor:
        device = tracked.layer.weight.device
        return torch.zeros(statistics_size(tracked), dtype=self._dtype(tracked), device=device)

    def collect(self, due: Collection[Tensor]) -> dict[int, Tensor]:
        """By layer, the sums since the last time, where this rank is to know them."""
        if self._unsent:
            self._next = 0
            self.send_rest(due)
        found: dict[int, Tensor] = {}
        for bucket in self._buckets:
            received = [message.received() for message in bucket.messages]
            layers = [tracked for tracked in bucket.layers if tracked.layer.weight in due]
            if received and bucket.owner in (None, self._ranks.rank):
                total = torch.stack(received).sum(0) if len(received) > 1 else received[0]
                parts = total.split([statistics_size(tracked) for tracked in layers])
                found |= {tracked.index: part for tracked, part in zip(layers, parts, strict=True)}
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
