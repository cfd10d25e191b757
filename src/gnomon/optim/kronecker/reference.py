"""INGD as the paper has it (Fig. matDL_opt), for networks of linear layers.

It is the same algorithm as ``INGD(model, preset="paper")``, without structures, other layers or any saving of work. It
is there to be read, and the fast one is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .factor_update import published_precond_lr


def update_factors(
    K: Tensor, C: Tensor, m_K: Tensor, m_C: Tensor, x: Tensor, g: Tensor, a1: float, b1: float, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return new K, C, m_K and m_C from the n inputs x and output gradients g of a layer.

    The loss is a mean over n.
    """
    n, p, d = len(x), len(K), len(C)
    H_K = K.T @ (x.T @ x / n) @ K
    H_C = C.T @ (n * g.T @ g) @ C
    c2, k2 = damping * (C.T @ C).trace(), damping * (K.T @ K).trace()
    m_K = a1 * m_K + b1 / (2 * d) * (H_C.trace() * H_K + c2 * K.T @ K - d * torch.eye(p).to(K))
    m_C = a1 * m_C + b1 / (2 * p) * (H_K.trace() * H_C + k2 * C.T @ C - p * torch.eye(d).to(C))
    return K - K @ m_K, C - C @ m_C, m_K, m_C


class ReferenceINGD:
    """Trains the ``nn.Linear`` layers of a model; each is a d x p matrix W with its bias as the last column."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        damping: float = 5e-3,
        precond_lr: Callable[[int], float] = published_precond_lr,
        precond_momentum: float = 0.5,
        update_every: int = 10,
    ) -> None:
        self.lr, self.a2, self.gamma, self.damping = lr, momentum, weight_decay, damping
        self.b1, self.a1, self.every, self.t = precond_lr, precond_momentum, update_every, 0
        self.layers: dict[Any, dict[str, Tensor]] = {m: {} for m in model.modules() if isinstance(m, nn.Linear)}
        for layer, state in self.layers.items():
            d, p = layer.out_features, layer.in_features + 1
            for name, size in (("K", p), ("C", d)):
                state[name] = torch.eye(size).to(layer.weight)
                state[f"m_{name}"] = torch.zeros(size, size).to(layer.weight)
            state["M"] = torch.zeros(d, p).to(layer.weight)
            layer.register_forward_hook(self._record)

    def _record(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the inputs with a column of ones for the bias, and the gradients of the outputs."""
        state, x = self.layers[layer], inputs[0].detach()
        state["x"] = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        output.register_hook(lambda g: state.update(g=g))

    @torch.no_grad()
    def step(self) -> None:
        for layer, s in self.layers.items():
            if self.t % self.every == 0:
                old = s["K"], s["C"], s["m_K"], s["m_C"]
                new = update_factors(*old, s["x"], s["g"], self.a1, self.b1(self.t), self.damping)
                s["K"], s["C"], s["m_K"], s["m_C"] = new
            G = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            W = torch.cat([layer.weight, layer.bias[:, None]], 1)
            s["M"] = self.a2 * s["M"] + s["C"] @ s["C"].T @ G @ s["K"] @ s["K"].T + self.gamma * W
            W = W - self.lr * s["M"]
            layer.weight.copy_(W[:, :-1])
            layer.bias.copy_(W[:, -1])
        self.t += 1
