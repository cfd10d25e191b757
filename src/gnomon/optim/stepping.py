"""How layers move: their directions, how long they are, and what each parameter gets of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..groups import Dense
from ..groups.base import align
from ..groups.products import empty
from . import fused, rules
from .compiling import can_compile, compiled
from .moves import (
    Move,
    Part,
    Peaks,
    Tracked,
    alike,
    by_rows,
    cat,
    constant,
    for_parts,
    parted,
    parts_of,
    portions,
    rms_of,
    rms_of_shares,
)
from .ranks import local, share, whole
from .rounding import HALF, power_of_two
from .settings import Settings
from .sharing import Sharing

PORTION = 2**26
"""Numbers of gradients that are whole at a time, where parameters are sharded."""
FUSED = 16
"""Layers that one compiled function moves: its calls take as long for one as for many, its compilation does not."""


class Stepping(Optimizer):
    """Steps along preconditioned gradients, of layers that are whole, at other ranks, or sharded over them."""

    _sharing: Sharing
    _precondition_only: bool
    _compile = False
    """Whether moves are compiled where they can be."""
    _is_frugal = False
    """Whether memory is given back after each step."""

    @abstractmethod
    def _times(
        self,
        stack: list[Tracked],
        side: Literal["K", "C"],
        rows: Tensor,
        uses: int,
        overwrite: bool = False,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """A side of the preconditioner times each row, which will be asked for ``uses`` times; K is the inputs'.

        With ``overwrite`` the result may be in the rows' memory, with ``scratch``, laid out as they are, in that.
        """

    @abstractmethod
    def _levels(self, stack: list[Tracked]) -> Tensor | None:
        """The units of the preconditioner where it has its own, for each block."""

    # ------------------------------------------------------------------ directions
    def _rooms(self, stack: list[Move]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Memory for a direction, and for one on its way to it.

        A processor takes long to get new memory; other devices keep what they had.
        """
        tracked = stack[0].tracked
        layer, weight = tracked.layer, tracked.layer.weight
        if weight.device.type != "cpu" or self._is_frugal or len(stack) > 1:
            return None, None
        if tracked.room is None or tracked.room[0].dtype != weight.dtype:
            shape, like = (layer.blocks, layer.d, layer.p), torch.empty(0, dtype=weight.dtype)
            make = partial(empty, like) if isinstance(tracked.factors.left, Dense) else like.new_empty
            tracked.room = make(shape), make(shape)
        return tracked.room

    def _make_whole(self, moving: list[Move]) -> None:
        """Get what the other ranks have of layers' gradients, where they are sharded; all ranks take part."""
        if self._sharing.ranks.is_sharded:
            for tracked in (move.tracked for move in moving):
                gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in tracked.layer.parameters)
                tracked.gradients = [whole(gradient) for gradient in gradients]

    def _gradient(self, tracked: Tracked, room: Tensor | None = None) -> Tensor:
        """The gradient of a matrix, in that memory if it is no view; a bias that is frozen has none."""
        layer = tracked.layer
        if tracked.gradients is not None:
            weight, *bias = tracked.gradients
        else:
            weight, *bias = (torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters)
        return layer.matrix(weight, bias[0] if bias else None, room)

    def _preconditioned(self, stack: list[Move]) -> Tensor:
        """``C C^T G K K^T`` for the gradients of a stack, block after block; it holds until the next step."""
        tracked, uses = [move.tracked for move in stack], stack[0].group["interval"]
        room, other = self._rooms(stack)
        if tracked[0].rows is not None:
            x, g = (cat(rows) for rows in zip(*(t.rows for t in tracked if t.rows is not None), strict=True))
            g, x = self._times(tracked, "C", g, uses), self._times(tracked, "K", x, uses)
            return torch.matmul(g.mT, x, out=room if room is not None and room.dtype == x.dtype else None)
        gradients = cat([self._gradient(t, room) for t in tracked])
        fresh = len(stack) > 1 or tracked[0].layer.bias is not None  # no view of a gradient
        # The inputs' side comes last, so that the rows of the result lie in memory as the weight's do.
        scratch = None if other is None else other.mT
        columns = self._times(tracked, "C", gradients.mT, uses, overwrite=fresh, scratch=scratch)
        free = room if scratch is not None and columns.data_ptr() == scratch.data_ptr() else other
        return self._times(tracked, "K", columns.mT, uses, overwrite=True, scratch=free)

    # ------------------------------------------------------------------ moves
    def _move(self, moving: list[Move], largest: Peaks, ok: Tensor) -> Tensor:
        """Move all layers, or replace their gradients; gives whether that could be done."""
        scaled = [move for move in moving if move.group["step_rms"] is not None]
        for same in alike(scaled, lambda m: (id(m.group), m.tracked.layer.weight.dtype, m.tracked.layer.weight.device)):
            for few in self._portions(same):
                self._make_whole(few)
                self._move_by_rms(few, largest, ok)
                for move in few:
                    move.tracked.gradients = None
        natural = [move for move in moving if move.group["step_rms"] is None]
        self._make_whole(natural)
        return self._move_naturally(natural, ok) if natural else ok

    def _portions(self, moving: list[Move]) -> list[list[Move]]:
        """All at once; of parameters that are sharded, no more than may be whole at a time."""
        is_sharded = self._sharing.ranks.is_sharded
        return portions(moving, lambda move: move.tracked.layer.size, PORTION) if is_sharded else [moving]

    def _stacks(self, moving: list[Move]) -> list[list[Move]]:
        """Layers that are preconditioned together."""

        def kind(move: Move) -> tuple[Any, ...]:
            rows = move.tracked.rows
            return (*move.tracked.kind, id(move.group), None if rows is None else rows[0].shape)

        return alike(moving, kind)

    def _computed_here(self, moving: list[Move]) -> list[list[Move]]:
        """Stacks of the layers whose directions this rank computes: all, unless others have their factors alone."""
        sharing = self._sharing
        return self._stacks([m for m in moving if not sharing.stores_apart or sharing.is_mine(m.tracked)])

    def _move_by_rms(self, moving: list[Move], largest: Peaks, ok: Tensor) -> None:
        """``W <- (1 - lr weight_decay) W - lr D``, D along the average of directions, its root mean square given."""
        group, stacks, sharing = moving[0].group, self._computed_here(moving), self._sharing
        mine = [move for stack in stacks for move in stack]
        found = [by_rows(self._preconditioned(stack)) for stack in stacks]
        of_layers = (matrix for ds, stack in zip(found, stacks, strict=True) for matrix in parted(ds, len(stack)))
        parts = parts_of(mine, of_layers)
        if self._may_fuse(moving):
            self._move_fused(parts, group, self._may(mine, largest, ok), self._units(mine, largest))
            return
        if sharing.ranks.is_sharded:
            if sharing.stores_apart:
                parts, _ = sharing.exchanged(moving, mine, parts, ok.expand(len(mine)))
                mine = moving
            parts = [replace(part, direction=share(part.direction, part.p).contiguous()) for part in parts]
            found = [part.direction for part in parts]
        kinds = _kinds(parts)
        if not self._precondition_only:
            for same in kinds:
                self._look_ahead(same, group["momentum"])
        if sharing.ranks.is_sharded:
            rms = rms_of_shares(parts, [move.tracked.layer for move in mine], sharing.ranks)
        else:
            shapes = ((len(stack), -1, ds.shape[-1]) for ds, stack in zip(found, stacks, strict=True))
            rms = rms_of([ds.view(shape) for ds, shape in zip(found, shapes, strict=True)], ok.device)
        gates = self._gates(mine, rms, largest, ok)
        for directions in found:
            directions.nan_to_num_(0.0, 0.0, 0.0)
        if not self._precondition_only:
            for same in kinds:
                self._remember(same, group["momentum"], for_parts(gates, same))
        lengths = gates * (group["step_rms"] / rms.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(0.0)
        if moving[0].tracked.layer.weight.dtype in HALF:  # whose range is too small for directions as they are
            for part in parts:
                part.direction = part.direction.float().mul_(lengths[part.layer])
            lengths = gates
        if sharing.moves_apart:
            parts, table = sharing.exchanged(moving, mine, parts, lengths, gates)
            lengths, gates, kinds = table[:, 0], table[:, 1], _kinds(parts)
        for same in kinds:
            moves, own = [part.direction.to(part.p.dtype) for part in same], for_parts(gates, same)
            far = for_parts(lengths, same)
            if self._precondition_only:
                _replace_gradients(same, torch._foreach_mul(moves, [*far.unbind()]), own)
            else:
                rules.decoupled([part.p for part in same], moves, far, same[0].group, own)

    def _may_fuse(self, moving: list[Move]) -> bool:
        """Whether moves are functions of what is here, of whole layers in full precision."""
        apart = self._precondition_only or self._sharing.ranks.is_sharded or self._sharing.moves_apart
        if not (self._compile and can_compile()) or apart or moving[0].tracked.layer.weight.dtype in HALF:
            return False
        return all(len(move.groups) == len(move.tracked.layer.parameters) for move in moving)

    def _move_fused(self, parts: list[Part], group: Settings, may: Tensor, units: Tensor) -> None:
        """As :meth:`_move_by_rms` from the directions on, many layers by one function."""
        for layers in portions(alike(parts, lambda part: part.layer), lambda _: 1, FUSED):
            few = [part for layer in layers for part in layer]
            params: list[Tensor] = [part.p for part in few]
            directions = (part.direction.to(part.p.dtype) for part in few)
            places = zip(params, directions, rules.buffers(params, [self.state[p] for p in params]), strict=True)
            own = ((part.group["lr"], part.group["lr"] * part.group["weight_decay"]) for part in few)
            numbers = (group["step_rms"], group["momentum"], *chain.from_iterable(own))
            like, kind = params[0], tuple((len(layer), *(part.p.shape for part in layer)) for layer in layers)
            first, last = few[0].layer, few[-1].layer
            compiled(fused.move, (kind, like.dtype, like.device))(
                [[*islice(places, len(layer))] for layer in layers],
                may[first : last + 1].to(like.device),
                units[first : last + 1].to(like.device, like.dtype),
                constant(numbers, like.dtype, like.device),
            )

    def _may(self, moving: list[Move], largest: Peaks, ok: Tensor) -> Tensor:
        """Which layers may move. One without any gradient stays: its average would shrink, its step would not."""
        return ok & (largest.of(moving) > 0)

    def _units(self, moving: list[Move], largest: Peaks) -> Tensor:
        """Powers of two near the largest entry of each layer's gradient."""
        return power_of_two(largest.of(moving))

    def _gates(self, moving: list[Move], rms: Tensor, largest: Peaks, ok: Tensor) -> Tensor:
        """1 for layers that move."""
        if not moving:
            return rms
        may = self._may(moving, largest, ok).to(rms.device)
        return (may & (rms > 0) & (rms < math.inf)).to(rms.dtype)

    def _look_ahead(self, parts: list[Part], momentum: float) -> None:
        """Directions become what Nesterov's average of them will be a step later, in place."""
        new = [part.direction.to(part.p.dtype) for part in parts]
        rules.look_ahead([part.p for part in parts], [self.state[part.p] for part in parts], new, momentum)
        for part, ahead in zip(parts, new, strict=True):
            if ahead is not part.direction:
                part.direction.copy_(ahead)

    def _remember(self, parts: list[Part], momentum: float, gates: Tensor) -> None:
        """The average takes in what :meth:`_look_ahead` was given, if it is finite."""
        ahead = [part.direction.to(part.p.dtype) for part in parts]
        rules.remember([part.p for part in parts], [self.state[part.p] for part in parts], ahead, momentum, gates)

    def _move_naturally(self, moving: list[Move], ok: Tensor) -> Tensor:
        """``M <- momentum M + D + weight_decay W``, ``W <- W - lr M``, all layers or none."""
        stacks, sharing = self._computed_here(moving), self._sharing
        mine = [move for stack in stacks for move in stack]
        found = [self._preconditioned(stack) for stack in stacks]
        if found:
            ok = ok & rules.peaks(found).isfinite().all().to(ok.device)
        if sharing.stores_apart:
            ok = sharing.ranks.maximum((~ok).float()) == 0
        parts: list[Part] = []
        for stack, natural in zip(stacks, found, strict=True):
            here = ok.to(natural.device)
            levels = self._levels([move.tracked for move in stack])
            natural = natural if levels is None else natural / align(levels, natural).to(natural.dtype)
            parts += parts_of(stack, parted(torch.where(here, natural, 0), len(stack)))
        if sharing.ranks.is_sharded:
            if sharing.stores_apart:
                parts, _ = sharing.exchanged(moving, mine, parts, ok.expand(len(mine)))
            parts = [replace(part, direction=share(part.direction, part.p).contiguous()) for part in parts]
        scale = self._clipping(parts, moving)
        kinds = _kinds(parts)
        for same in kinds:
            directions = [part.direction.to(part.p.dtype) for part in same]
            if scale is not None and same[0].group["kl_clip"] is not None:
                directions = list(torch._foreach_mul(directions, scale.to(directions[0])))
            if not self._precondition_only:
                states, gates = [self.state[part.p] for part in same], ok.to(directions[0]).expand(len(same))
                params: list[Tensor] = [part.p for part in same]
                directions = rules.gathered_speed(params, states, directions, same[0].group, gates)
            for part, direction in zip(same, directions, strict=True):
                part.direction = direction
        if sharing.moves_apart:
            parts, _ = sharing.exchanged(moving, mine, parts, ok.expand(len(mine)))
            kinds = _kinds(parts)
        for same in kinds:
            moves = [part.direction for part in same]
            gates = ok.to(moves[0]).expand(len(same))
            if self._precondition_only:
                _replace_gradients(same, moves, gates)
            else:
                rules.follow([part.p for part in same], moves, same[0].group, gates)
        return ok

    def _clipping(self, parts: list[Part], moving: list[Move]) -> Tensor | None:
        """``min(1, sqrt(kl_clip / (lr^2 sum <G, D>)))``: the predicted change is at most ``kl_clip``."""
        if all(move.group["kl_clip"] is None for move in moving):
            return None
        change = torch.zeros((), device=moving[0].tracked.layer.weight.device)
        for part in parts:
            if part.group["kl_clip"] is not None:
                unit = part.group["lr"] ** 2 / part.group["kl_clip"]
                change = change + unit * (local(gradient_of(part.p)) * part.direction).sum().to(change.device)
        if self._sharing.ranks.is_sharded or self._sharing.stores_apart:
            change = self._sharing.ranks.sum_of_shares(change)
        # Not finite where nothing is to move: a factor for directions that are zeros then.
        return change.nan_to_num().clamp(min=1).rsqrt()


def gradient_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _replace_gradients(parts: list[Part], directions: Iterable[Tensor], gates: Tensor) -> None:
    for part, direction, gate in zip(parts, directions, gates.unbind(), strict=True):
        gradient = local(gradient_of(part.p))
        gradient.copy_(torch.where(gate > 0, direction, gradient))


def _kinds(parts: list[Part]) -> list[list[Part]]:
    """Parameters that move together."""
    return alike(parts, lambda part: (id(part.group), part.p.dtype, part.p.device))
