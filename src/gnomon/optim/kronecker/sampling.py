"""Targets drawn from a model's own predictions, for the Fisher matrix itself."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

Likelihood = Literal["categorical", "bernoulli", "gaussian"]


def sampled_loss(output: Tensor, likelihood: Likelihood) -> Tensor:
    """Return ``-log p(y | output)`` with ``y`` drawn from that distribution.

    It is summed over an output and averaged over outputs. Random numbers are torch's global ones. An output that is not
    finite gets any target, and a loss that is not finite.
    """
    with torch.no_grad():
        wide = output.float()
        if likelihood == "categorical":
            flat = wide.reshape(-1, wide.shape[-1])
            target = torch.multinomial(flat.softmax(-1).nan_to_num(1.0), 1).squeeze(-1)
        elif likelihood == "bernoulli":
            target = torch.bernoulli(wide.sigmoid().nan_to_num(0.5)).to(output.dtype)
        elif likelihood == "gaussian":
            target = output + torch.randn_like(output)
        else:
            raise ValueError(f"likelihood must be 'categorical', 'bernoulli' or 'gaussian', got {likelihood!r}")
    if likelihood == "categorical":
        return cross_entropy(output.reshape(-1, output.shape[-1]), target)
    if likelihood == "bernoulli":
        losses = binary_cross_entropy_with_logits(output, target, reduction="none")
    else:
        losses = 0.5 * (output - target).square()
    return losses.flatten(1).sum(-1).mean() if losses.ndim > 1 else losses.mean()
