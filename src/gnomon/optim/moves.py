"""Layers on their way through a step: which are alike, and what each parameter gets of a layer's direction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..groups import Element
from . import forms
from .factors import KroneckerFactors, Statistics
from .layers import Layer, ModuleLayer
from .ranks import Ranks
from .rounding import power_of_two, promoted
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
    cache: dict[str, Element] = field(default_factory=dict)
    """Products of the factors that change only with them."""
    place: tuple[torch.device, torch.dtype] | None = None
    """The device and type of the weight for which its state is as it should be."""
    room: tuple[Tensor, Tensor] | None = None
    """Memory in which its direction is made, twice."""
    gradients: list[Tensor] | None = None
    """Of its parameters, where they are sharded, for the time of a step."""
    expected: int = 0
    """Uses of the layer in forward passes that no backward pass has come back through, since the last step."""

    def __getstate__(self) -> dict[str, object]:
        """Copies make their own room."""
        return {**self.__dict__, "room": None}

    def forget(self) -> None:
        self.statistics, self.rows, self.gradients, self.passes = None, None, None, 0
        self.samples.clear()

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Layers of one kind can be handled as one batch of blocks; a large one is its own kind."""
        layer = self.layer
        alone = self.index if layer.size > forms.SMALL else None
        # Equal factors are one object, which is quicker to tell than whether they are equal.
        return alone, id(self.factors), layer.blocks, layer.bias is None, layer.weight.dtype, layer.weight.device


@dataclass
class Peaks:
    """The largest magnitude in each gradient."""

    values: Tensor
    place: dict[nn.Parameter, int]
    """Of each parameter among the values."""

    def of(self, moving: Sequence[Move]) -> Tensor:
        """The largest magnitude in the gradients of each layer."""
        return by_layer(self.values, [[self.place[p] for p in move.groups] for move in moving]).amax(1)


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
    group: Settings
    direction: Tensor
    layer: int
    """Its place among the layers that move together."""


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Along the first dimension; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def parted(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """The reverse of :func:`cat`, of equal parts."""
    return [tensor] if count == 1 else tensor.chunk(count)


def by_rows(directions: Tensor) -> Tensor:
    """Matrices whose rows lie behind each other at one distance, over all blocks."""
    far, apart, near = directions.stride()
    return directions if near == 1 and far == apart * directions.shape[1] else directions.contiguous()


def alike(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items with equal keys together, in the order of their first."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def portions(items: Iterable[Item], size: Callable[[Item], int], room: int) -> list[list[Item]]:
    """Items in their order, as many together as have room; a larger one alone."""
    found: list[list[Item]] = []
    left = 0
    for item in items:
        if size(item) > left:
            found.append([])
            left = max(room, size(item))
        found[-1].append(item)
        left -= size(item)
    return found


def parts_of(moving: list[Move], directions: Iterable[Tensor]) -> list[Part]:
    """The parameters that move, from the directions of their layers."""
    found = []
    for place, (move, matrix) in enumerate(zip(moving, directions, strict=True)):
        layer = move.tracked.layer
        for p, part in zip(layer.parameters, layer.tensors(matrix), strict=True):
            if p in move.groups:
                found.append(Part(p, move.groups[p], part, place))
    return found


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # kept, and so fit for every later use
def constant(values: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that are the same at many steps, so that they go to the device once; the host does not wait for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def for_parts(values: Tensor, parts: list[Part]) -> Tensor:
    """A number for each layer as one for each of its parameters, in their type."""
    return values.to(parts[0].p.dtype)[constant(tuple(part.layer for part in parts), torch.long, values.device)]


def by_layer(values: Tensor, places: list[list[int]]) -> Tensor:
    """A table of layers with the values at their places; the first again where a layer has fewer than another."""
    width = max(map(len, places))
    table = tuple((*row, *row[:1] * (width - len(row))) for row in places)
    return values[constant(table, torch.long, values.device)]


SAFE_RMS = {torch.float32: (1e-15, 1e15), torch.float64: (1e-140, 1e140)}
"""Between these no square vanishes or overflows, in a sum that counts."""


def rms_of(stacks: Sequence[Tensor], device: torch.device) -> Tensor:
    """The root mean square of each matrix in a list of stacks of them, in float64 and at any scale.

    Not finite where an entry is not.
    """
    if not stacks:
        return torch.zeros(0, dtype=torch.float64, device=device)
    stacks = [stack.view(len(stack), -1) if stack.is_contiguous() else stack for stack in stacks]
    roots = [math.prod(stack.shape[1:]) ** 0.5 for stack in stacks for _ in range(len(stack))]
    norms = [_norms(stack) for stack in stacks]
    lengths, (low, high) = torch.cat(norms).double(), SAFE_RMS[norms[0].dtype]
    rms = lengths / constant(tuple(roots), lengths.dtype, lengths.device)
    # Norms on other devices are in float64, which takes no longer there: the host need not wait for their values.
    if rms.device.type == "cpu" and not ((rms > low) & (rms < high)).all():
        lengths = torch.cat([_norms_in_units(stack) for stack in stacks])
        rms = lengths / constant(tuple(roots), lengths.dtype, lengths.device)
    return rms


def _norms(stack: Tensor) -> Tensor:
    wide = torch.float64 if stack.device.type == "cuda" else torch.float32
    dtype, norm = promoted(stack.dtype, wide), torch.linalg.vector_norm
    if stack.ndim == 3:
        stack = norm(stack, dim=-1, dtype=dtype)  # with gaps between rows six times quicker than all at once
    return norm(stack, dim=1 if len(stack) > 1 else None, dtype=dtype).view(-1)  # all of a single one is quicker


def _norms_in_units(stack: Tensor) -> Tensor:
    """The same of numbers whose squares vanish or overflow."""
    wide = stack.to(promoted(stack.dtype, torch.float32))
    unit = power_of_two(wide.abs().flatten(1).amax(1))
    return _norms(wide / unit.view(-1, *(1,) * (stack.ndim - 1))).double() * unit


def rms_of_shares(parts: list[Part], layers: Sequence[Layer], ranks: Ranks) -> Tensor:
    """The same of each layer's direction, of which every rank has a share."""
    device = parts[0].direction.device
    index = torch.tensor([part.layer for part in parts], device=device)
    norms = torch.stack([torch.linalg.vector_norm(part.direction, dtype=torch.float64) for part in parts])
    sums = torch.zeros(len(layers), dtype=torch.float64, device=device).scatter_add(0, index, norms.square())
    return (ranks.sum_of_shares(sums) / torch.tensor([layer.size for layer in layers], device=device)).sqrt()
