"""Layers on their way through a step: which are alike, and what each parameter gets of a layer's direction."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from . import forms
from .factors import KroneckerFactors, Statistics
from .layers import Layer, ModuleLayer
from .settings import Settings

Item = TypeVar("Item")


@dataclass
class Tracked:
    """A matrix of the model with its factors, and what the hooks have gathered for the next step."""

    index: int
    name: str
    layer: Layer
    views: list[ModuleLayer]
    factors: KroneckerFactors
    statistics: Statistics | None = None
    samples: dict[int, int] = field(default_factory=dict)
    """By forward pass: a layer that is used twice in one of them counts its samples once."""
    backward: int | None = None
    """The backward pass that came last through a module of the layer; None where there was none yet."""
    passes: int = 0
    """Backward passes of the loss through a module of the layer since its gradient was zero."""
    rows: tuple[Tensor, Tensor] | None = None
    """x and g with ``G = g^T x``, where they are few and the only ones."""
    cache: dict[str, Tensor] = field(default_factory=dict)
    """Products of the factors that change only with them."""

    def forget(self) -> None:
        self.statistics, self.rows, self.passes = None, None, 0
        self.samples.clear()

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Layers of one kind can be handled as one batch of blocks; a large one is its own kind."""
        layer = self.layer
        alone = self.index if layer.blocks * layer.d * layer.p > forms.SMALL else None
        # Equal factors are one object, which is quicker to tell than whether they are equal.
        return alone, id(self.factors), layer.blocks, layer.bias is None, layer.weight.dtype, layer.weight.device


@dataclass
class Move:
    """A layer that has a gradient: what is needed to move it."""

    tracked: Tracked
    group: Settings
    """Of the weight."""
    groups: dict[nn.Parameter, Settings]
    """Of each parameter with a gradient."""


@dataclass
class Part:
    """A parameter of a layer with its share of the layer's direction."""

    p: nn.Parameter
    weight: nn.Parameter
    """Of its layer."""
    group: Settings
    direction: Tensor
    gate: Tensor
    """1, or 0 where the parameter must stay."""


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Along the first dimension; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def alike(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items with equal keys together, in the order of their first."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def parts_of(stack: list[Move], directions: Tensor, gates: Tensor) -> list[Part]:
    """The parameters that move, from a batch of their layers' blocks; there is a gate for each layer."""
    found = []
    for move, matrix, gate in zip(stack, directions.chunk(len(stack)), gates.unbind(), strict=True):
        layer = move.tracked.layer
        for p, part in zip(layer.parameters, layer.tensors(matrix), strict=True):
            if p in move.groups:
                found.append(Part(p, layer.weight, move.groups[p], part, gate.to(p.dtype)))
    return found


def by_layer(values: Sequence[Tensor], counts: list[int]) -> Tensor:
    """A number for each parameter as a table of layers, with so many each; zeros where one has fewer than another."""
    width, ends, nothing = max(counts), iter(values), torch.zeros_like(values[0])
    rows = [[*itertools.islice(ends, count), *[nothing] * (width - count)] for count in counts]
    return torch.stack([value for row in rows for value in row]).view(-1, width)


def scaled_to(rms: float, directions: Tensor, layers: int) -> Tensor:
    """Bring directions to magnitudes about 1, in place; gives what makes each layer's root mean square ``rms``."""
    flat = directions.view(layers, -1)
    low, high = torch.aminmax(flat) if layers == 1 else torch.aminmax(flat, dim=1)  # the first is quicker
    peaks = torch.maximum(-low, high).view(-1)
    flat.div_(torch.where(peaks > 0, peaks, 1).unsqueeze(-1))  # so that no square vanishes or overflows
    return rms * flat.shape[1] ** 0.5 / torch.linalg.vector_norm(flat, dim=1).clamp(min=1e-30)
