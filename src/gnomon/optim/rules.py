"""How parameters move along a direction. Every rule can be told on the device to do nothing.

Gates are a tensor with 1 or 0 for each parameter. Where it is 0 all that a rule writes stays as it is, without a branch
on the host: directions are zeros there, and the weights of what is added and of what is forgotten become 0 and 1. Rules
work on lists of tensors, so that many small ones are not many calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ranks import local

State = dict[str, Any]


def peaks(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude in each, on the first one's device; not finite where an entry is not, zero for no entry."""
    # A maximum norm takes twenty times as long.
    ends = [end for t in tensors for end in torch.aminmax(t if t.numel() else t.new_zeros(1))]
    device = tensors[0].device
    if any(end.device != device or end.dtype != torch.float32 for end in ends):
        ends = [end.to(device, torch.float32) for end in ends]
    return torch.stack(ends).view(-1, 2).abs().amax(1)


def added(weight: float, gates: Tensor) -> list[Tensor]:
    """What new values are multiplied with: ``weight``, or 0 where nothing may change."""
    return list((gates * weight).unbind())


def kept(weight: float, gates: Tensor) -> list[Tensor]:
    """What old values are multiplied with: ``weight``, or 1 where nothing may change."""
    return list((gates * (weight - 1) + 1).unbind())


def buffers(params: list[Tensor], states: list[State]) -> list[Tensor]:
    """The momentum of each, zeros at first; of parameters that are sharded, what this rank holds."""
    for state, p in zip(states, params, strict=True):
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
    return [local(state["momentum_buffer"]) for state in states]


def look_ahead(params: list[Tensor], states: list[State], new: list[Tensor], momentum: float) -> None:
    """G becomes Nesterov's ``momentum B' + (1 - momentum) G``, where B' is what the average B will be by G."""
    torch._foreach_lerp_(new, buffers(params, states), momentum**2)


def remember(params: list[Tensor], states: list[State], ahead: list[Tensor], momentum: float, gates: Tensor) -> None:
    """``B <- momentum B + (1 - momentum) G``, from the A of :func:`look_ahead`: ``(momentum B + A) / (1 + momentum)``.

    In that order what is not finite is noticed before it is in the average.
    """
    torch._foreach_lerp_(buffers(params, states), ahead, added(1 / (1 + momentum), gates))


def decay(params: list[Tensor], amount: float, gates: Tensor) -> None:
    """``W <- (1 - amount) W``"""
    if amount:
        torch._foreach_mul_([local(p) for p in params], kept(1 - amount, gates))


def decoupled(params: list[Tensor], directions: list[Tensor], lengths: Tensor, group: State, gates: Tensor) -> None:
    """``W <- (1 - lr weight_decay) W - lr length direction``, where a length is 0 with its gate."""
    decay(params, group["lr"] * group["weight_decay"], gates)
    torch._foreach_addcmul_([local(p) for p in params], directions, added(-group["lr"], lengths))


def gathered_speed(
    params: list[Tensor], states: list[State], directions: list[Tensor], group: State, gates: Tensor
) -> list[Tensor]:
    """``M <- momentum M + direction + weight_decay W``; gives M itself."""
    momenta = buffers(params, states)
    torch._foreach_mul_(momenta, kept(group["momentum"], gates))
    torch._foreach_add_(momenta, directions)
    if group["weight_decay"]:
        torch._foreach_addcmul_(momenta, [local(p) for p in params], added(group["weight_decay"], gates))
    return momenta


def follow(params: list[Tensor], momenta: list[Tensor], group: State, gates: Tensor) -> None:
    """``W <- W - lr M``"""
    torch._foreach_addcmul_([local(p) for p in params], momenta, added(-group["lr"], gates))


def heavy_ball(
    params: list[Tensor], states: list[State], directions: list[Tensor], group: State, gates: Tensor
) -> None:
    """Both: the paper's form, and torch's SGD."""
    follow(params, gathered_speed(params, states, directions, group, gates), group, gates)


def adamw(params: list[Tensor], states: list[State], gradients: list[Tensor], group: State, gates: Tensor) -> None:
    """torch's AdamW with beta_1 = momentum; moments in float32 at least, as squares in half precision vanish."""
    beta1, beta2 = group["momentum"], group["beta2"]
    gradients = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    for state, p, g in zip(states, params, gradients, strict=True):
        if "exp_avg" not in state:
            state |= {key: torch.zeros_like(p, dtype=g.dtype) for key in ("exp_avg", "exp_avg_sq")}
            state["steps"] = torch.zeros((), device=g.device)
    steps, first, second = ([local(state[key]) for state in states] for key in ("steps", "exp_avg", "exp_avg_sq"))
    wide = gates.to(gradients[0].dtype)
    torch._foreach_add_(steps, [*gates.to(steps[0].dtype).unbind()])
    torch._foreach_mul_(first, kept(beta1, wide))
    torch._foreach_add_(first, gradients, alpha=1 - beta1)
    torch._foreach_mul_(second, kept(beta2, wide))
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
    decay(params, group["lr"] * group["weight_decay"], gates)
    # All are counted alike, unless some had no gradient at times.
    counts = torch.stack(steps).clamp(min=1)
    roots = torch._foreach_mul(second, [*(1 / (1 - beta2**counts)).unbind()])
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    moves = torch._foreach_div(first, roots)
    torch._foreach_mul_(moves, added(group["lr"], wide / (1 - beta1**counts)))
    here = [local(p) for p in params]
    torch._foreach_sub_(here, [move.to(p.dtype) for move, p in zip(moves, here, strict=True)])


FALLBACKS = {"adamw": adamw, "sgd": heavy_ball}
"""How parameters move that have no preconditioner."""
