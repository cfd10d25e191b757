"""How weights move along a direction: pure functions over lists of tensors.

Every rule can be told on the device to do nothing. Gates are a tensor with 1 or 0 for each parameter. Where a gate is
0, all that a rule writes stays as it is, without a branch on the host: directions are zeros there, and the weights of
what is added and of what is forgotten become 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...linalg import polar_factor, polar_factors_of_halves, promoted
from .layers.base import FactoredLayer, Settings, State, States, alike, move_state
from .strategy import Alone


# ---------------------------------------------------------------------- rules
def added(weight: float, gates: Tensor) -> list[Tensor]:
    """Return what new values are multiplied with: ``weight``, or 0 where nothing may change."""
    return list((gates * weight).unbind())


def kept(weight: float, gates: Tensor) -> list[Tensor]:
    """Return what old values are multiplied with: ``weight``, or 1 where nothing may change."""
    return list((gates * (weight - 1) + 1).unbind())


def look_ahead(new: list[Tensor], averages: list[Tensor], momentum: float) -> None:
    """Replace G by Nesterov's ``momentum B' + (1 - momentum) G``, where B' is what G will make of the average B."""
    torch._foreach_lerp_(new, averages, momentum**2)


def remember(averages: list[Tensor], ahead: list[Tensor], momentum: float, gates: Tensor) -> None:
    """Do ``B <- momentum B + (1 - momentum) G``, which is ``(momentum B + A) / (1 + momentum)``.

    A is what :func:`look_ahead` has made of G. In this order a value that is not finite is noticed before it is in the
    average.
    """
    torch._foreach_lerp_(averages, ahead, added(1 / (1 + momentum), gates))


def decay(params: list[Tensor], amount: float, gates: Tensor) -> None:
    """Do ``W <- (1 - amount) W``."""
    if amount:
        torch._foreach_mul_(params, kept(1 - amount, gates))


def decay_of(group: State) -> float:
    """Return ``lr weight_decay``, times ``lr / peak_lr`` where decay follows the schedule.

    At the end of a schedule decay then vanishes before the steps do, and the last steps fit the loss alone.
    """
    peak = group.get("peak_lr")
    return group["lr"] * group["weight_decay"] * (group["lr"] / peak if peak else 1.0)


def decoupled(params: list[Tensor], directions: list[Tensor], lengths: Tensor, group: State, gates: Tensor) -> None:
    """Do ``W <- (1 - decay) W - lr length direction``, where a length is 0 with its gate."""
    decay(params, decay_of(group), gates)
    torch._foreach_addcmul_(params, directions, added(-group["lr"], lengths))


def accumulate_momentum(
    params: list[Tensor], momenta: list[Tensor], directions: list[Tensor], group: State, gates: Tensor
) -> None:
    """Do ``M <- momentum M + direction + weight_decay W``."""
    torch._foreach_mul_(momenta, kept(group["momentum"], gates))
    torch._foreach_add_(momenta, directions)
    if group["weight_decay"]:
        torch._foreach_addcmul_(momenta, params, added(group["weight_decay"], gates))


def descend(params: list[Tensor], momenta: list[Tensor], group: State, gates: Tensor) -> None:
    """Do ``W <- W - lr M``."""
    torch._foreach_addcmul_(params, momenta, added(-group["lr"], gates))


def heavy_ball(params: list[Tensor], states: list[State], gradients: list[Tensor], group: State, gates: Tensor) -> None:
    """Do a step with the paper's form of momentum, which is that of torch's SGD."""
    momenta = tensors_of(states, "momentum_buffer")
    accumulate_momentum(params, momenta, gradients, group, gates)
    descend(params, momenta, group, gates)


def adamw(params: list[Tensor], states: list[State], gradients: list[Tensor], group: State, gates: Tensor) -> None:
    """Do torch's AdamW with beta_1 = momentum. Moments are in float32 at least, as squares in half precision vanish."""
    beta1, beta2 = group["momentum"], group["beta2"]
    gradients = [g.to(promoted(g.dtype, torch.float32)) for g in gradients]
    steps, first, second = (tensors_of(states, key) for key in ("steps", "exp_avg", "exp_avg_sq"))
    wide = gates.to(gradients[0].dtype)
    torch._foreach_add_(steps, [*gates.to(steps[0].dtype).unbind()])
    torch._foreach_mul_(first, kept(beta1, wide))
    torch._foreach_add_(first, gradients, alpha=1 - beta1)
    torch._foreach_mul_(second, kept(beta2, wide))
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
    decay(params, decay_of(group), gates)
    # The counts are equal, unless some parameters had no gradient at times.
    counts = torch.stack(steps).clamp(min=1)
    roots = torch._foreach_mul(second, [*(1 / (1 - beta2**counts)).unbind()])
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    moves = torch._foreach_div(first, roots)
    torch._foreach_mul_(moves, added(group["lr"], wide / (1 - beta1**counts)))
    torch._foreach_sub_(params, [move.to(p.dtype) for move, p in zip(moves, params, strict=True)])


def along_polar_factor(averages: Tensor, step: int, count: int, has_bias: bool, in_halves: bool) -> None:
    """Replace each of ``count`` matrices, which lie side by side in the outputs of a batch ``(blocks, d, p)``, by its
    polar factor.

    With ``in_halves`` each half of a matrix has its own polar factor. The halves are others at every second step, so
    that two steps make three quarters of all pairs of rows orthogonal. The bias, a last column, is scaled as the
    weight is on average: it is no direction of the inputs.
    """
    weights = averages[..., :-1] if has_bias else averages
    blocks, d, p = weights.shape
    matrices = weights.reshape(blocks * count, d // count, p)
    factors = polar_factors_of_halves(matrices, step % 2 == 1) if in_halves else polar_factor(matrices)
    turned = factors.reshape(blocks, d, p)
    if has_bias:
        lengths = [torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (turned, weights)]
        averages[..., -1].mul_((lengths[0] / lengths[1].clamp(min=torch.finfo(averages.dtype).tiny)).unsqueeze(-1))
    weights.copy_(turned)


Rule = Callable[[list[Tensor], list[State], list[Tensor], State, Tensor], None]
FALLBACKS: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "adamw": (adamw, ("exp_avg", "exp_avg_sq", "steps")),
    "sgd": (heavy_ball, ("momentum_buffer",)),
}
"""How parameters move that have no factors, and the tensors of their state."""


def started(states: States, p: nn.Parameter, keys: Iterable[str]) -> State:
    """Return the state of a parameter, with zeros for the tensors that it lacked."""
    state, wide = states[p], promoted(p.dtype, torch.float32)
    for key in keys:
        if key not in state:
            if key == "steps":
                state[key] = torch.zeros((), dtype=torch.float32, device=p.device)
            elif key == "momentum_buffer":
                state[key] = torch.zeros_like(p, memory_format=torch.contiguous_format)
            else:
                state[key] = torch.zeros_like(p, dtype=wide)
    return state


def start_moves(
    fallback: str,
    layers: Sequence[FactoredLayer],
    parameters: Sequence[nn.Parameter],
    states: States,
    strategy: Alone,
) -> None:
    """Make the momenta of layers, where this rank has them, and the state of other parameters."""
    members = {p: layer for layer in layers for p in layer.layer.parameters}
    for p in parameters:
        state = states[p]  # of parameters that others own it is empty, which torch's checkpoints ask for
        if p not in members:
            started(states, p, FALLBACKS[fallback][1])
        elif strategy.is_mine(members[p]) or not strategy.moves_apart:
            state["momentum_buffer"] = strategy.zeros_as(p)


def tensors_of(states: Sequence[State], key: str) -> list[Tensor]:
    return [state[key] for state in states]


def fall_back(
    name: str,
    parameters: list[nn.Parameter],
    group_of: dict[nn.Parameter, Settings],
    states: States,
    strategy: Alone,
    ok: Tensor,
) -> None:
    """Move parameters that have no factors, by a rule of :data:`FALLBACKS`."""
    (rule, keys), local = FALLBACKS[name], strategy.local
    for same in alike(parameters, lambda p: (id(group_of[p]), p.dtype, p.device)):
        for p in same:
            move_state(states[p], p)
        found = [started(states, p, keys) for p in same]
        parts = [dict(zip(keys, local([state[key] for key in keys]), strict=True)) for state in found]
        here = ok.to(same[0].device)
        gradients = [torch.where(here, g, 0) for g in local([gradient_of(p) for p in same])]
        rule(local(same), parts, gradients, group_of[same[0]], here.to(same[0].dtype).expand(len(same)))


def gradient_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
