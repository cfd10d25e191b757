"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) in the type of the weights.

PyTorch's own multiplies in bfloat16, which most CPUs only emulate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic of the Newton-Schulz iteration that Muon's author chose."""
HIDDEN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.RNNBase)
"""The layers whose matrices Muon moves, except the last one of a model."""


def orthogonalized(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return roughly ``U V^T`` for a matrix ``U S V^T``: its singular values become about 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(Optimizer):
    """Orthogonalized momentum for hidden matrices, and AdamW for embeddings, the last layer, norms and biases.

    A convolution's weight is a matrix with a row for each output. With Nesterov's average B of the gradients, and a
    scale at which a step is about as long as AdamW's (Liu et al. 2025, arXiv:2502.16982)::

        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(d, p)) orthogonalized(B)
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        hidden, others = separated(model)
        super().__init__(hidden, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._hidden = self.param_groups[0]
        self._others = AdamW([{"params": others}], lr=lr)
        # The group is the same dictionary in both, so that a schedule of this optimizer reaches AdamW.
        self.param_groups.extend(self._others.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move all parameters. A closure is not supported."""
        lr, momentum, weight_decay = (self._hidden[name] for name in ("lr", "momentum", "weight_decay"))
        for weight in self._hidden["params"]:
            if weight.grad is None:
                continue
            average = self.state[weight].setdefault("average", torch.zeros_like(weight))
            average.lerp_(weight.grad, 1 - momentum)
            direction = orthogonalized(weight.grad.lerp(average, momentum).flatten(1))
            weight.mul_(1 - lr * weight_decay)
            weight.add_(direction.view_as(weight), alpha=-0.2 * lr * math.sqrt(max(direction.shape)))
        self._others.step()


def separated(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable matrices of hidden layers, and all other trainable parameters."""
    layers = [module for module in model.modules() if isinstance(module, HIDDEN)]
    hidden = [p for layer in layers[:-1] for p in layer.parameters() if p.ndim >= 2 and p.requires_grad]
    chosen = set(map(id, hidden))
    return hidden, [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
