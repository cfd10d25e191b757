"""The steps of layers along their directions, made of the rules in :mod:`.update_rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor, nn

from ...linalg import HALF, align, constant, peaks, power_of_two, rms_of
from .compiled_rules import step_by_rms
from .compiling import can_compile, compiled
from .layers.base import Layer, Move, Part, States, alike, parted
from .strategy import Alone
from .update_rules import (
    accumulate_momentum,
    decay_of,
    decoupled,
    descend,
    gradient_of,
    look_ahead,
    remember,
    tensors_of,
)

FUSED = 16
"""The number of layers that one compiled function moves: calls of it take as long for one layer as for many, its
compilation does not."""
LEAST_WIDTH = 48
"""The width below which steps are not longer: a layer of few inputs, as behind a bottleneck, would leave the region in
which its gradient holds."""
PLAIN = 0.5
"""The length of steps along averages over that of steps along polar factors. At equal root mean squares an average has
a larger first singular value, which bounds the learning rate."""
EMBEDDING = 2.0
"""The length of steps of embeddings over ``step_rms``. Longer steps serve small vocabularies better, and large ones
worse."""


@dataclass
class Peaks:
    """The largest magnitude in the gradient of each parameter."""

    values: Tensor
    place: dict[nn.Parameter, int]

    def of(self, moving: Sequence[Move]) -> Tensor:
        """Return the largest magnitude in the gradients of each layer."""
        places = [[self.place[p] for p in move.groups] for move in moving]
        width = max(map(len, places))
        table = tuple((*row, *row[:1] * (width - len(row))) for row in places)
        return self.values[constant(table, torch.long, self.values.device)].amax(1)


def parts_of(moving: Sequence[Move], directions: Iterable[Tensor]) -> list[Part]:
    """Return the parameters that move, each with its part of its layer's direction."""
    found = []
    for place, (move, matrix) in enumerate(zip(moving, directions, strict=True)):
        layer = move.layer.layer
        for p, part in zip(layer.parameters, layer.tensors(matrix), strict=True):
            if p in move.groups:
                found.append(Part(p, move.groups[p], part, place))
    return found


def by_kind(parts: Iterable[Part]) -> list[list[Part]]:
    """Return lists of parameters that move together: those of one group, type and device."""
    return alike(parts, lambda part: (id(part.group), part.p.dtype, part.p.device))


def for_parts(values: Tensor, parts: list[Part]) -> Tensor:
    """Return a number for each parameter, in its type, from a number for each layer."""
    return values.to(parts[0].p.dtype)[constant(tuple(part.layer for part in parts), torch.long, values.device)]


def with_even_rows(directions: Tensor, layer: Layer) -> Tensor:
    """Return the matrices with rows or columns at one distance in memory, so that the parts of parameters are views."""
    if layer.is_transposed:
        return directions.mT.contiguous().mT
    far, apart, near = directions.stride()
    return directions if near == 1 and far == apart * directions.shape[1] else directions.contiguous()


def rms_of_stacks(stacks: list[list[Move]], found: list[Tensor], device: torch.device) -> Tensor:
    """Return the root mean square of each layer's direction."""
    rows = [ds if ds.stride(-1) == 1 else ds.mT for ds in found]
    counted = zip(rows, stacks, strict=True)
    return rms_of([ds.view(len(stack), -1, ds.shape[-1]) for ds, stack in counted], device)


def whole_stacks(moving: list[Move], parts: list[Part]) -> tuple[list[list[Move]], list[Tensor]]:
    """Return a stack for each layer, and its direction, which is put together from the parts of its parameters."""
    layers = [move.layer.layer for move in moving]
    wholes = [[part.direction for part in same] for same in alike(parts, lambda part: part.layer)]
    matrices = [layer.matrix(*tensors) for layer, tensors in zip(layers, wholes, strict=True)]
    even = [with_even_rows(matrix, layer) for matrix, layer in zip(matrices, layers, strict=True)]
    return [[move] for move in moving], even


Precondition = Callable[[list[Move]], tuple[list[list[Move]], list[Tensor]]]
"""Gives the layers whose directions this rank computes, in stacks, and the directions of each stack."""
Levels = Callable[[list[Move]], Tensor | None]
"""Gives the units of the preconditioner of layers of one kind, where it has units of its own."""


class LayerSteps:
    """The steps of layers from their directions, by a given root mean square or as long as they are."""

    def __init__(
        self,
        states: States,
        strategy: Alone,
        precondition: Precondition,
        replaces_gradients: bool,
        compile: bool,
    ) -> None:
        self._states, self._strategy, self._precondition = states, strategy, precondition
        self._replaces_gradients, self._compile = replaces_gradients, compile

    def move(self, moving: list[Move], largest: Peaks, levels: Levels, ok: Tensor) -> Tensor:
        """Move all layers, or replace their gradients, and return whether that could be done."""
        strategy = self._strategy

        def kind(move: Move) -> tuple[Hashable, ...]:
            weight = move.layer.weight
            return move.layer.turn is None, id(move.group), weight.dtype, weight.device

        for same in alike((move for move in moving if move.group["step_rms"] is not None), kind):
            for few in strategy.portions(same):
                strategy.gather_gradients([move.layer for move in few])
                self.by_rms(few, largest, ok)
                strategy.drop_gradients([move.layer for move in few])
        natural = [move for move in moving if move.group["step_rms"] is None]
        if natural:
            strategy.gather_gradients([move.layer for move in natural])
            strategy.gather_weights([move.layer for move in natural])
            ok = self.naturally(natural, levels, ok)
            strategy.drop_gradients([move.layer for move in natural])
        return ok

    # ------------------------------------------------------------------ what both have in common
    def _params(self, parts: list[Part]) -> list[Tensor]:
        return self._strategy.local([part.p for part in parts])

    def _averages(self, parts: list[Part]) -> list[Tensor]:
        """Return the momenta of parameters, which are zeros at first."""
        states = [self._states[part.p] for part in parts]
        for part, state in zip(parts, states, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = self._strategy.zeros_as(part.p)
        return self._strategy.local(tensors_of(states, "momentum_buffer"))

    def _replace_gradients(self, parts: list[Part], directions: Iterable[Tensor], gates: Tensor) -> None:
        gradients = self._strategy.local([gradient_of(part.p) for part in parts])
        for gradient, direction, gate in zip(gradients, directions, gates.unbind(), strict=True):
            gradient.copy_(torch.where(gate > 0, direction, gradient))

    # ------------------------------------------------------------------ by a given root mean square
    def by_rms(self, moving: list[Move], largest: Peaks, ok: Tensor) -> None:
        """Do ``W <- (1 - lr weight_decay) W - lr D``, where D has a given root mean square.

        D goes along the average of directions, or along its polar factor.
        """
        stacks, found = self._precondition(moving)
        mine = [move for stack in stacks for move in stack]
        found = [with_even_rows(ds, stack[0].layer.layer) for ds, stack in zip(found, stacks, strict=True)]
        parts = self._parts(stacks, found)
        if self._may_fuse(moving):
            self._by_rms_fused(mine, parts, largest, ok)
            return
        strategy = self._strategy
        if strategy.moves_shares:
            parts = strategy.share(parts)
            found = [part.direction for part in parts]
        kinds = by_kind(parts)
        self._look_ahead(kinds, moving[0].group["momentum"])
        if strategy.moves_shares:
            rms = strategy.rms_of_shares(parts, [move.layer for move in mine])
        else:
            rms = rms_of_stacks(stacks, found, ok.device)
        gates = self._gates(mine, rms, largest, ok)
        for directions in found:
            directions.nan_to_num_(0.0, 0.0, 0.0)
        self._remember(kinds, moving[0].group["momentum"], gates)
        if moving[0].layer.turn is not None:
            if strategy.moves_shares:
                stacks, found = whole_stacks(mine, strategy.gather_shares(parts))
            rms = self._turn(stacks, found, rms)
            parts = strategy.share(self._parts(stacks, found))
        wanted = constant(step_lengths(mine), rms.dtype, rms.device)
        lengths = gates * (wanted / rms.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(0.0)
        self._move_by_lengths(moving, mine, parts, lengths, gates)

    def _parts(self, stacks: list[list[Move]], found: list[Tensor]) -> list[Part]:
        """Return the parts of the directions of all stacks."""
        matrices = (matrix for ds, stack in zip(found, stacks, strict=True) for matrix in parted(ds, len(stack)))
        return parts_of([move for stack in stacks for move in stack], matrices)

    def _turn(self, stacks: list[list[Move]], found: list[Tensor], rms: Tensor) -> Tensor:
        """Replace averages by the directions that come from them; return the root mean square of each."""
        for stack, averages in zip(stacks, found, strict=True):
            turn = stack[0].layer.turn
            assert turn is not None
            turn(averages, stack[0].group["step"])
        return rms_of_stacks(stacks, found, rms.device)

    def _move_by_lengths(
        self, moving: list[Move], mine: list[Move], parts: list[Part], lengths: Tensor, gates: Tensor
    ) -> None:
        if moving[0].layer.weight.dtype in HALF:  # whose range is too small for directions as they are
            for part in parts:
                part.direction = part.direction.float().mul_(lengths[part.layer])
            lengths = gates
        if self._strategy.moves_apart:
            parts, table = self._strategy.gather_directions(moving, mine, parts, lengths, gates)
            lengths, gates = table[:, 0], table[:, 1]
        for same in by_kind(parts):
            moves, own = [part.direction.to(part.p.dtype) for part in same], for_parts(gates, same)
            far = for_parts(lengths, same)
            if self._replaces_gradients:
                self._replace_gradients(same, torch._foreach_mul(moves, [*far.unbind()]), own)
            else:
                decoupled(self._params(same), moves, far, same[0].group, own)

    def _look_ahead(self, kinds: list[list[Part]], momentum: float) -> None:
        """Replace directions by what Nesterov's average of them will be a step later."""
        if self._replaces_gradients:
            return
        for same in kinds:
            new = [part.direction.to(part.p.dtype) for part in same]
            look_ahead(new, self._averages(same), momentum)
            for part, ahead in zip(same, new, strict=True):
                if ahead is not part.direction:
                    part.direction.copy_(ahead)

    def _remember(self, kinds: list[list[Part]], momentum: float, gates: Tensor) -> None:
        """Add the directions that :meth:`_look_ahead` was given to their averages, if they are finite."""
        if self._replaces_gradients:
            return
        for same in kinds:
            ahead = [part.direction.to(part.p.dtype) for part in same]
            remember(self._averages(same), ahead, momentum, for_parts(gates, same))

    def _gates(self, moving: list[Move], rms: Tensor, largest: Peaks, ok: Tensor) -> Tensor:
        """Return 1 for layers that move, and 0 for the others."""
        if not moving:
            return rms
        may = may_move(moving, largest, ok).to(rms.device)
        return (may & (rms > 0) & (rms < math.inf)).to(rms.dtype)

    def _may_fuse(self, moving: list[Move]) -> bool:
        """Return whether steps are compiled: those of whole layers at this rank, in full precision."""
        strategy = self._strategy
        apart = self._replaces_gradients or strategy.is_sharded or strategy.moves_apart
        if (
            not (self._compile and can_compile())
            or apart
            or moving[0].layer.turn is not None
            or moving[0].layer.weight.dtype in HALF
        ):
            return False
        return all(len(move.groups) == len(move.layer.layer.parameters) for move in moving)

    def _by_rms_fused(self, moving: list[Move], parts: list[Part], largest: Peaks, ok: Tensor) -> None:
        """Do the same step from the directions on, with one compiled function for many layers."""
        may, units = may_move(moving, largest, ok), power_of_two(largest.of(moving))
        group, by_layer, far = moving[0].group, alike(parts, lambda part: part.layer), step_lengths(moving)
        for layers in (by_layer[start : start + FUSED] for start in range(0, len(by_layer), FUSED)):
            few = [part for layer in layers for part in layer]
            params: list[Tensor] = [part.p for part in few]
            directions = (part.direction.to(part.p.dtype) for part in few)
            places = zip(params, directions, self._averages(few), strict=True)
            own = ((far[part.layer] * part.group["lr"], decay_of(part.group)) for part in few)
            numbers = tuple(float(n) for n in (group["momentum"], *chain.from_iterable(own)))
            like, kind = params[0], tuple((len(layer), *(part.p.shape for part in layer)) for layer in layers)
            first, last = few[0].layer, few[-1].layer
            compiled(step_by_rms, (kind, like.dtype, like.device))(
                [[*islice(places, len(layer))] for layer in layers],
                may[first : last + 1].to(like.device),
                units[first : last + 1].to(like.device, like.dtype),
                constant(numbers, like.dtype, like.device),
            )

    # ------------------------------------------------------------------ as long as directions are
    def naturally(self, moving: list[Move], levels: Levels, ok: Tensor) -> Tensor:
        """Do ``M <- momentum M + D + weight_decay W`` and ``W <- W - lr M`` for all layers or for none.

        Return whether the layers have moved.
        """
        strategy = self._strategy
        stacks, found = self._precondition(moving)
        mine = [move for stack in stacks for move in stack]
        if found:
            ok = ok & peaks(found).isfinite().all().to(ok.device)
        ok = strategy.agrees(ok)
        parts: list[Part] = []
        for stack, natural in zip(stacks, found, strict=True):
            here, units = ok.to(natural.device), levels(stack)
            natural = natural if units is None else natural / align(units, natural).to(natural.dtype)
            parts += parts_of(stack, parted(torch.where(here, natural, 0), len(stack)))
        if strategy.moves_shares:
            parts = strategy.share(parts)
        self._clip(parts, self._clipping(parts, moving))
        ok = self._round(parts, moving, ok)
        self._take_momentum(parts, ok)
        if strategy.moves_apart:
            parts, _ = strategy.gather_directions(moving, mine, parts, ok.expand(len(mine)))
        for same in by_kind(parts):
            moves = [part.direction for part in same]
            gates = ok.to(moves[0]).expand(len(same))
            if self._replaces_gradients:
                self._replace_gradients(same, moves, gates)
            else:
                descend(self._params(same), moves, same[0].group, gates)
        return ok

    def _clip(self, parts: list[Part], scale: Tensor | None) -> None:
        """Multiply the directions of groups with ``kl_clip``, in the type in which they were computed."""
        if scale is None:
            return
        for same in by_kind(parts):
            if same[0].group["kl_clip"] is not None:
                directions = [part.direction for part in same]
                for part, direction in zip(same, torch._foreach_mul(directions, scale.to(directions[0])), strict=True):
                    part.direction = direction

    def _round(self, parts: list[Part], moving: list[Move], ok: Tensor) -> Tensor:
        """Convert directions to the types of their parameters.

        Return whether half precision can hold them and the momenta that they add up to.
        """
        half = [part for part in parts if part.p.dtype in HALF]
        if any(move.layer.weight.dtype in HALF for move in moving):  # at all ranks or at none
            ok = self._strategy.agrees(ok & self._are_in_range(half).to(ok.device))
        for part in half:
            part.direction = torch.where(ok.to(part.p.device), part.direction, 0)
        for part in parts:
            part.direction = part.direction.to(part.p.dtype)
        return ok

    def _are_in_range(self, half: list[Part]) -> Tensor:
        fits = torch.ones((), dtype=torch.bool)
        if half:
            room = [(1 - part.group["momentum"]) / 2 * torch.finfo(part.p.dtype).max for part in half]
            largest = peaks([part.direction for part in half])
            fits = (largest <= constant(tuple(room), largest.dtype, largest.device)).all()
        return self._strategy.maximum((~fits).float().view(1))[0] == 0

    def _take_momentum(self, parts: list[Part], ok: Tensor) -> None:
        """Add directions to their momenta, which take their place."""
        if self._replaces_gradients:
            return
        for same in by_kind(parts):
            directions = [part.direction for part in same]
            momenta, gates = self._averages(same), ok.to(directions[0]).expand(len(same))
            weights = self._strategy.weights([part.p for part in same])
            accumulate_momentum(weights, momenta, directions, same[0].group, gates)
            for part, momentum in zip(same, momenta, strict=True):
                part.direction = momentum

    def _clipping(self, parts: list[Part], moving: list[Move]) -> Tensor | None:
        """Return ``min(1, sqrt(kl_clip / (lr^2 sum <G, D>)))``, so that the loss changes by at most ``kl_clip``."""
        if all(move.group["kl_clip"] is None for move in moving):
            return None
        change = torch.zeros((), device=moving[0].layer.weight.device)
        clipped = [part for part in parts if part.group["kl_clip"] is not None]
        gradients = self._strategy.gradients_at_hand([part.p for part in clipped])
        for part, gradient in zip(clipped, gradients, strict=True):
            unit = part.group["lr"] ** 2 / part.group["kl_clip"]
            change = change + unit * (gradient * part.direction).sum().to(change.device)
        # It is not finite where nothing is to move, and there it multiplies zeros.
        return self._strategy.sum_of_shares(change).nan_to_num().clamp(min=1).rsqrt()


def step_lengths(moving: Sequence[Move]) -> tuple[float, ...]:
    """Return the root mean square of each layer's step at a learning rate of 1.

    It is ``step_rms sqrt(base_width / width)``, with the layer's number of inputs as its width, so that a step changes
    the outputs of wide and narrow layers by about as much. Widths below :data:`LEAST_WIDTH` count as that. A step along
    an average itself is :data:`PLAIN` times as long as one along its polar factor. An embedding, where one input is 1
    and all others are 0, has :data:`EMBEDDING` times ``step_rms``. Without ``base_width`` all have ``step_rms``.
    """

    def length(move: Move) -> float:
        layer, step_rms, base = move.layer.layer, move.group["step_rms"], move.group.get("base_width")
        if base is None:
            return step_rms
        if layer.takes_indices:
            return EMBEDDING * step_rms
        return step_rms * math.sqrt(base / max(layer.width, LEAST_WIDTH)) * (PLAIN if move.layer.turn is None else 1)

    return tuple(length(move) for move in moving)


def may_move(moving: list[Move], largest: Peaks, ok: Tensor) -> Tensor:
    """Return which layers may move.

    A layer without any gradient stays: its average would shrink, its step would not.
    """
    return ok & (largest.of(moving) > 0)
