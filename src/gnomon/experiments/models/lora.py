"""Low-rank adaptation of linear layers (Hu et al. 2022, arXiv:2106.09685)."""

from __future__ import annotations

from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen linear layer W with a trainable one beside it: ``W x + (scale / rank) B A x``. B is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale / rank
        self.A, self.B = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.A.weight, a=5**0.5)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * self.B(self.A(x))


def adapt(model: nn.Module, part: nn.Module, rank: int, scale: float = 16.0) -> nn.Module:
    """Freeze a model and add adapters, in place, to the linear layers of a part of it. Return the model."""
    model.requires_grad_(False)
    parents = [module for module in part.modules() if not isinstance(module, nn.Linear)]
    for parent in parents:
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Adapted(layer, rank, scale))
    return model
