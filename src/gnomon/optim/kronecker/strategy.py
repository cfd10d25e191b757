"""Who computes what: one process that computes everything. :mod:`gnomon.optim.distributed` has the ways of several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .factor_rule import FactorRule
from .layers.base import FactoredLayer, Move, Part, Stack
from .statistics import Factors, Statistics


class FactorStore(Protocol):
    """What a strategy asks of the preconditioner."""

    rule: FactorRule

    def stack(self, layers: Sequence[FactoredLayer]) -> Stack: ...
    def projection_factors(self, layer: FactoredLayer) -> Factors: ...


class StatisticsSource(Protocol):
    """What a strategy and the preconditioner ask of the collector."""

    due: set[nn.Parameter]
    is_closed: bool

    @property
    def takes_gradients(self) -> bool: ...
    @property
    def preconditioner(self) -> FactorStore: ...
    def watched(self) -> list[FactoredLayer]: ...
    def statistics(self, layer: FactoredLayer) -> Statistics | None: ...
    def put_statistics(self, layer: FactoredLayer, statistics: Statistics | None) -> None: ...
    def is_complete(self, layer: FactoredLayer) -> bool: ...
    def was_reached(self, layer: FactoredLayer) -> bool: ...
    def rows(self, layer: FactoredLayer) -> tuple[Tensor, Tensor] | None: ...
    def row_count(self, layer: FactoredLayer) -> int: ...


class Alone:
    """One process. Ways of sharing the work override what they do differently."""

    count = 1
    """The number of ranks."""
    stores_apart = False
    """Whether one rank alone stores the factors of a layer."""
    moves_apart = False
    """Whether the momenta of a layer's parameters are where its factors are."""
    is_sharded = False
    """Whether a rank holds only a part of each parameter."""
    moves_shares = False
    """Whether averages and steps of directions are made of the parts that ranks hold."""
    takes_part = True
    """Whether all ranks run the forward pass that is running."""

    def arrange(self, layers: Sequence[FactoredLayer], cost: Callable[[FactoredLayer], float]) -> None:
        """Say which rank updates which layer."""

    def is_mine(self, layer: FactoredLayer) -> bool:
        """Return whether this rank updates a layer's factors."""
        return True

    def stored_keys(self, layer: FactoredLayer, rule: FactorRule) -> Collection[str]:
        """Return the parts of a layer's state that this rank stores."""
        return rule.shapes(layer)

    # ------------------------------------------------------------------ statistics
    def is_fresh(self, weight: nn.Parameter) -> bool:
        """Return whether the gradient of a weight was dropped since the last backward pass."""
        return weight.grad is None

    def hand_over(self, collector: StatisticsSource, layer: FactoredLayer, backward_pass: int) -> None:
        """Take the statistics of a layer that a backward pass has just completed."""

    def reduce(self, collector: StatisticsSource) -> None:
        """Replace statistics by those of all ranks' batches together."""

    def has_statistics(self, collector: StatisticsSource) -> bool:
        """Return whether there are statistics of any layer."""
        return any(collector.statistics(layer) is not None for layer in collector.watched())

    def forget(self) -> None:
        """Drop statistics that are on their way."""

    # ------------------------------------------------------------------ factors
    def publish(self, preconditioner: FactorStore, layers: Sequence[FactoredLayer]) -> None:
        """Send factors that have moved from their owners to all ranks."""

    def sum(self, count: Tensor) -> Tensor:
        """Add a number up over ranks."""
        return count

    # ------------------------------------------------------------------ gradients and directions
    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of tensors that this rank holds, in the same memory."""
        return list(tensors)

    def sharded_as(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return a whole tensor, sharded as a parameter of its shape is."""
        return tensor

    def maximum(self, values: Tensor) -> Tensor:
        """Return the largest of each number over the ranks that hold parts of parameters."""
        return values

    def portions(self, moving: list[Move]) -> list[list[Move]]:
        """Divide layers into lists whose gradients are whole at the same time."""
        return [moving]

    def gather_gradients(self, layers: Sequence[FactoredLayer]) -> None:
        """Get the parts of gradients that other ranks hold; all ranks take part."""

    def gather_weights(self, layers: Sequence[FactoredLayer]) -> None:
        """Get the parts of weights that other ranks hold, where momenta are whole; all ranks take part."""

    def drop_gradients(self, layers: Sequence[FactoredLayer]) -> None:
        """Free what :meth:`gather_gradients` and :meth:`gather_weights` have got."""

    def zeros_as(self, p: nn.Parameter) -> Tensor:
        """Return zeros for the momentum of a layer's parameter."""
        return torch.zeros_like(p, memory_format=torch.contiguous_format)

    def weights(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the parts of parameters that this rank has momenta of."""
        return self.local(parameters)

    def gradients_at_hand(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the parts of gradients that this rank has momenta of."""
        return self.local([p.grad for p in parameters if p.grad is not None])

    def gradients(self, layer: FactoredLayer) -> list[Tensor]:
        """Return the whole gradients of a layer's parameters; zeros where a parameter has none."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.layer.parameters]

    def gather_directions(
        self, moving: list[Move], mine: list[Move], made: list[Part], *numbers: Tensor
    ) -> tuple[list[Part], Tensor]:
        """Return the parts of all layers that move, from the ranks that made them, and numbers for each layer."""
        raise NotImplementedError("one process makes all directions itself")

    def share(self, parts: list[Part]) -> list[Part]:
        """Return what this rank needs of whole directions for its parts of the parameters."""
        return parts

    def gather_shares(self, parts: list[Part]) -> list[Part]:
        """Return whole directions, from the parts of them that ranks have."""
        return parts

    def rms_of_shares(self, parts: list[Part], layers: Sequence[FactoredLayer]) -> Tensor:
        """Return the root mean square of each layer's direction, of which every rank has a part."""
        raise NotImplementedError("one process has whole directions")

    def sum_of_shares(self, value: Tensor) -> Tensor:
        """Add a number of each rank's parts of parameters up over ranks."""
        return value

    def agrees(self, ok: Tensor) -> Tensor:
        """Return whether a condition holds at all ranks that make directions."""
        return ok


SharingRule = Callable[[nn.Module, Any], Alone]
"""Finds the ranks that train a model together; the second argument is a wrapper that was noticed later, or None."""


def alone(model: nn.Module, wrapper: Any = None) -> Alone:
    """Return the strategy of a process that trains alone, whatever the model is wrapped in."""
    return Alone()
