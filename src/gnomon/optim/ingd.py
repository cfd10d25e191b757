"""INGD: inverse-free natural-gradient descent for neural networks (Fig. matDL_opt)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..groups import Dense, Element, Group
from ..groups.base import accumulate, times
from .capture import Capture
from .factors import KroneckerFactors, Statistics
from .layers import Approximation, Layer, layer_of

Scalar = float | Callable[[int], float]
"""A number, or a function of the step's number."""
Factory = Callable[[int], Group]


def published_precond_lr(step: int) -> float:
    """The paper's warm-up of b1: 0.0002 for 100 iterations, 0.002 up to 500, then 0.01."""
    return 0.0002 if step < 100 else 0.002 if step < 500 else 0.01


@dataclass
class _Tracked:
    """A layer with its factors, and what the hooks have gathered for the next update."""

    layer: Layer
    factors: KroneckerFactors
    statistics: Statistics | None = None
    samples: dict[int, int] = field(default_factory=dict)
    """By forward pass: a layer that is used twice in one of them counts its samples once."""


class INGD(Optimizer):
    """The update of the paper's figure, as it stands.

    With ``mu_AA`` the second moment of a layer's inputs and ``mu_GG`` that of its per-sample output gradients
    (empirical Fisher), ``H_K = K^T mu_AA K`` and ``H_C = C^T mu_GG C``, every ``update_every`` steps::

        m_K <- a1 m_K + b1/(2d) ( tr(H_C) H_K + damping tr(C^T C) K^T K - d I )        K <- K (I - m_K)
        m_C <- a1 m_C + b1/(2p) ( tr(H_K) H_C + damping tr(K^T K) C^T C - p I )        C <- C (I - m_C)

    and at every step, for the layer's weight with its bias as a last column::

        M <- momentum M + C C^T G K K^T + weight_decay W                               W <- W - lr M

    from ``K = C = I``, with ``a1 = precond_momentum`` and ``b1 = precond_lr``. ``convention="outside"`` keeps b1 out of
    the momentum, ``m <- a1 m + (...)``, ``K <- K (I - b1 m)``, which differs where b1 changes. Layers are Linear,
    convolutions and transposed convolutions; other parameters follow momentum SGD with the same settings.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        damping: float = 5e-3,
        precond_lr: Scalar = published_precond_lr,
        precond_momentum: float = 0.5,
        update_every: int = 10,
        structure: tuple[Factory, Factory] = (Dense, Dense),
        approx: Approximation = "expand",
        convention: Literal["inside", "outside"] = "inside",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("damping", damping)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
        for name, value in (("momentum", momentum), ("precond_momentum", precond_momentum)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
        if not isinstance(update_every, int) or update_every < 1:
            raise ValueError(f"update_every must be a positive integer, got {update_every!r}")
        if approx not in ("expand", "reduce"):
            raise ValueError(f"approx must be 'expand' or 'reduce', got {approx!r}")
        if convention not in ("inside", "outside"):
            raise ValueError(f"convention must be 'inside' or 'outside', got {convention!r}")
        self.approx, self.convention, self.precond_lr = approx, convention, precond_lr
        self._tracked = {
            module: _Tracked(layer, KroneckerFactors(structure[0](layer.p), structure[1](layer.d)))
            for module in model.modules()
            if (layer := layer_of(module)) is not None and layer.weight.requires_grad
        }
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
            "precond_momentum": precond_momentum,
            "update_every": update_every,
            "step": 0,
        }
        super().__init__([p for p in model.parameters() if p.requires_grad], defaults)
        self._capture = Capture(model, list(self._tracked), self._receive)

    # ------------------------------------------------------------------ statistics
    def _receive(self, module: nn.Module, x: Tensor, g: Tensor, number: int) -> None:
        """A batch of inputs and output gradients of a layer, on steps that update."""
        tracked = self._tracked[module]
        k, c = self._factors(tracked)
        rows = tracked.layer.rows(x.to(k[0].dtype), g.to(c[0].dtype), self.approx)
        samples = x.shape[0]
        new = max(samples - tracked.samples.get(number, 0), 0)
        tracked.samples[number] = max(samples, tracked.samples.get(number, 0))
        part = tracked.factors.statistics(k, c, *rows, terms=new)
        tracked.statistics = part if tracked.statistics is None else tracked.statistics + part

    def _factors(self, tracked: _Tracked) -> tuple[Element, Element]:
        state = self.state[tracked.layer.weight]
        left, right = tracked.factors.left, tracked.factors.right
        if "K" not in state:
            like = {"dtype": tracked.layer.weight.dtype, "device": tracked.layer.weight.device}
            for name, group in (("K", left), ("C", right)):
                state[name] = group.pack(group.identity((tracked.layer.blocks,), **like))  # type: ignore[arg-type]
                state[f"m_{name}"] = torch.zeros_like(state[name])
        return left.unpack(state["K"]), right.unpack(state["C"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the hooks have gathered with them."""
        super().zero_grad(set_to_none)
        for tracked in self._tracked.values():
            tracked.statistics = None
            tracked.samples.clear()

    # ------------------------------------------------------------------ the step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        done = set()
        for tracked in self._tracked.values():
            if tracked.layer.weight.grad is not None:
                if tracked.statistics is not None and group["step"] % group["update_every"] == 0:
                    self._update(tracked, group)
                done.update(tracked.layer.parameters)
                self._move(tracked, group)
            tracked.statistics = None
            tracked.samples.clear()
        for p in group["params"]:
            if p not in done and p.grad is not None:
                self._descend(p, p.grad, group)
        group["step"] += 1
        self._capture.active = group["step"] % group["update_every"] == 0
        return loss

    def _update(self, tracked: _Tracked, group: dict[str, Any]) -> None:
        """The factors follow the curvature."""
        assert tracked.statistics is not None
        state = self.state[tracked.layer.weight]
        k, c = self._factors(tracked)
        b1 = self.precond_lr(group["step"]) if callable(self.precond_lr) else self.precond_lr
        inside, outside = (b1, 1.0) if self.convention == "inside" else (1.0, b1)
        pressures = tracked.factors.pressure(k, c, tracked.statistics, group["damping"])
        sides = (("K", tracked.factors.left, k), ("C", tracked.factors.right, c))
        for (name, structure, factor), pressure in zip(sides, pressures, strict=True):
            old = structure.unpack(state[f"m_{name}"])
            momentum = accumulate(times(group["precond_momentum"], old), pressure, inside)
            state[f"m_{name}"] = structure.pack(momentum)
            state[name] = structure.pack(structure.move(factor, times(-outside, momentum), order=1))

    def _move(self, tracked: _Tracked, group: dict[str, Any]) -> None:
        layer = tracked.layer
        bias = None if layer.bias is None else layer.bias.grad
        assert layer.weight.grad is not None
        natural = tracked.factors.precondition(*self._factors(tracked), layer.matrix(layer.weight.grad, bias))
        for p, direction in zip(layer.parameters, layer.tensors(natural), strict=True):
            self._descend(p, direction, group)

    def _descend(self, p: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """``M <- momentum M + direction + weight_decay W``, ``W <- W - lr M``."""
        state = self.state[p]
        step = direction + group["weight_decay"] * p
        if "momentum_buffer" in state:
            step.add_(state["momentum_buffer"], alpha=group["momentum"])
        state["momentum_buffer"] = step
        p.sub_(step, alpha=group["lr"])

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._capture.close()
