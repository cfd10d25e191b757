"""What the backward passes since the last step have shown of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from ..torch_internals import version
from .statistics import Statistics


@dataclass
class Record:
    """What the backward passes since the last step have shown of a layer."""

    statistics: Statistics | None = None
    rows: tuple[Tensor, Tensor] | None = None
    """x and g with ``G = g^T x``, where they are few and the only ones."""
    passes: int = 0
    """The number of backward passes of the loss through a module of the layer."""
    row_count: int = 0
    """The number of rows with one for each position, of which statistics may have used a part."""
    samples: dict[int, int] = field(default_factory=dict)
    """The number of samples by forward pass: a layer that is used twice in one pass counts its samples once."""
    expected: int = 0
    """The number of uses in forward passes that no backward pass has come back through."""
    last_pass: int | None = None
    """The last backward pass through a module of the layer, in this and earlier steps; None where there was none."""
    is_provisional: bool = False
    """Whether no pass since the last step has added to the gradient of the weight."""

    def forget(self) -> None:
        self.statistics, self.rows, self.passes, self.row_count = None, None, 0, 0
        self.samples, self.is_provisional = {}, False

    def return_to(self, before: Record) -> None:
        """Take back a pass."""
        self.statistics, self.rows, self.passes = before.statistics, before.rows, before.passes
        self.samples, self.last_pass, self.row_count = before.samples, before.last_pass, before.row_count


@dataclass(frozen=True)
class Before:
    """A layer as a backward pass found it."""

    weight: nn.Parameter
    record: Record
    gradient: Tensor | None
    version: int

    @classmethod
    def of(cls, weight: nn.Parameter, record: Record) -> Before:
        kept = replace(record, samples=dict(record.samples))
        return cls(weight, kept, weight.grad, 0 if weight.grad is None else version(weight.grad))

    def has_new_gradient(self) -> bool:
        """Return whether something was added to the gradient, in its memory or in a new one."""
        gradient = self.weight.grad
        return gradient is not None and (gradient is not self.gradient or version(gradient) != self.version)
