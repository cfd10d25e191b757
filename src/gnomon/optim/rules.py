"""How parameters move along a direction. Every rule can be told on the device to do nothing.

``ok`` is a tensor that holds True or False. Where it is False all that a rule writes stays as it is, without a branch
on the host: gradients count as zero, and the weights of what is added and of what is forgotten become 0 and 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def peaks(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude in each; not finite where an entry is not."""
    return list(torch._foreach_norm(tensors, float("inf")))


def all_finite(magnitudes: list[Tensor]) -> Tensor:
    """Whether all are, as a tensor on the first one's device."""
    device = magnitudes[0].device
    return torch.stack([magnitude.to(device, torch.float32) for magnitude in magnitudes]).isfinite().all()


def cleaned(tensor: Tensor, ok: Tensor) -> Tensor:
    """The tensor, or zeros."""
    return torch.where(ok.to(tensor.device), tensor, 0)


def kept(weight: float, ok: Tensor, like: Tensor) -> Tensor:
    """What an old value is multiplied with: ``weight``, or 1 where nothing may change."""
    return torch.where(ok.to(like.device), like.new_full((), weight), 1)


def share(weight: float | Tensor, ok: Tensor, like: Tensor) -> Tensor:
    """What a new value is multiplied with: ``weight``, or 0 where nothing may change."""
    weight = weight.to(like) if isinstance(weight, Tensor) else like.new_full((), weight)
    return torch.where(ok.to(like.device), weight, 0)


def averaged(state: State, gradient: Tensor, momentum: float, ok: Tensor) -> Tensor:
    """``B <- momentum B + (1 - momentum) G``; gives Nesterov's look ahead, the same once more from B."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    buffer: Tensor = state["momentum_buffer"]
    buffer.lerp_(gradient, share(1 - momentum, ok, buffer))
    return buffer.lerp(gradient, 1 - momentum)


def decay(p: Tensor, amount: float, ok: Tensor) -> None:
    """``W <- (1 - amount) W``"""
    if amount:
        p.mul_(kept(1 - amount, ok, p))


def decoupled(p: Tensor, state: State, direction: Tensor, group: State, ok: Tensor) -> None:
    """``W <- (1 - lr weight_decay) W - lr direction``"""
    decay(p, group["lr"] * group["weight_decay"], ok)
    p.sub_((direction * share(group["lr"], ok, direction)).to(p.dtype))


def heavy_ball(p: Tensor, state: State, direction: Tensor, group: State, ok: Tensor) -> None:
    """``M <- momentum M + direction + weight_decay W``, ``W <- W - lr M``: the paper's form, and torch's SGD."""
    step = direction.to(p.dtype) + share(group["weight_decay"], ok, p) * p
    if "momentum_buffer" in state:
        buffer = state["momentum_buffer"].mul_(kept(group["momentum"], ok, p)).add_(step)
    else:
        buffer = state["momentum_buffer"] = step
    p.sub_(buffer * share(group["lr"], ok, p))


def adamw(p: Tensor, state: State, gradient: Tensor, group: State, ok: Tensor) -> None:
    """torch's AdamW with beta_1 = momentum; moments in float32 at least, as squares in half precision vanish."""
    beta1, beta2 = group["momentum"], group["beta2"]
    gradient = gradient.to(torch.promote_types(p.dtype, torch.float32))
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["steps"] = torch.zeros((), device=p.device)
    steps = state["steps"].add_(ok.to(p.device)).clamp(min=1)
    first = state["exp_avg"].mul_(kept(beta1, ok, gradient)).add_(gradient, alpha=1 - beta1)
    second = state["exp_avg_sq"].mul_(kept(beta2, ok, gradient)).addcmul_(gradient, gradient, value=1 - beta2)
    decay(p, group["lr"] * group["weight_decay"], ok)
    root = (second / (1 - beta2**steps)).sqrt_().add_(group["eps"])
    p.sub_((first / root * share(group["lr"] / (1 - beta1**steps), ok, first)).to(p.dtype))


FALLBACKS = {"adamw": adamw, "sgd": heavy_ball}
"""How parameters move that have no preconditioner."""
