"""What a rule for factors and a rule for directions must offer. A new rule of either kind is one file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...groups import Group
from .factor_forms import FactorPair
from .layers.base import FactoredLayer, Settings, Side, Stack, State, Turn
from .statistics import Factors, Statistics


class FactorRule(Protocol):
    """How factors are stored, follow the curvature and are applied. A new rule is one class with these methods."""

    @property
    def name(self) -> str:
        """The name of the method in summaries."""

    @property
    def relative(self) -> bool:
        """Whether curvature is relative to its mean, so that a gradient matrix may stand in for statistics."""

    @property
    def shared_keys(self) -> tuple[str, ...]:
        """The parts of the state that ranks need which apply factors without updating them."""

    def pair(self, groups: tuple[Group, Group], dtype: torch.dtype, settings: Settings) -> FactorPair:
        """Return the forms of a layer's factors; settings may be functions of the step."""

    def shapes(self, layer: FactoredLayer) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in the state of a layer."""

    def dtypes(self, layer: FactoredLayer) -> dict[str, torch.dtype]:
        """Return the types of the same tensors."""

    def initial(self, layer: FactoredLayer, key: str) -> Tensor:
        """Return what a tensor of the state begins with."""

    def projection_factors(self, layer: FactoredLayer, state: State) -> Factors:
        """Return the factors through which rows are projected when they come; None for moments as they are."""

    def update(self, stack: Stack, settings: Settings, source: Statistics | Tensor, ok: Tensor) -> Tensor:
        """Update the factors where ``ok`` is True; return whether each layer's new factors are finite."""

    def apply(
        self, stack: Stack, side: Side, rows: Tensor, uses: int, overwrite: bool, scratch: Tensor | None
    ) -> Tensor:
        """Multiply each row by a side of the preconditioner; the same is asked for ``uses`` times between updates."""

    def levels(self, stack: Stack) -> Tensor | None:
        """Return the units of the preconditioner for each block, or None where it has none of its own."""

    def forget_products(self, layers: Iterable[FactoredLayer]) -> None:
        """Drop what was computed from factors that have changed."""

    def loaded(self, layer: FactoredLayer, state: State) -> State:
        """Return a state that was saved with factors in other forms, in the forms of this layer."""

    def check(self, layers: Iterable[FactoredLayer], settings: Settings) -> None:
        """Raise where a setting was changed to a value that the state of a layer has no place for."""

    # for several ranks, and for people
    def sent(self, layer: FactoredLayer, key: str, value: Tensor) -> Tensor:
        """Return a part of the state as it is sent to other ranks."""

    def received(self, layer: FactoredLayer, key: str, sent: Tensor) -> Tensor:
        """Return the part of the state that :meth:`sent` has turned into what was sent."""

    def work(self, layer: FactoredLayer) -> tuple[int, int]:
        """Return the multiplications of an update of a layer's factors, and of preconditioning its gradient."""

    def product_bytes(self, layer: FactoredLayer, uses: int) -> int:
        """Return the bytes of what is stored between updates beside the state."""

    @property
    def cached_tensors(self) -> list[Tensor]:
        """What is stored now beside the state."""


class DirectionRule(Protocol):
    """How the direction of a step comes from an average of preconditioned gradients. A new rule is one class."""

    def check(self, layers: Sequence[FactoredLayer]) -> None:
        """Raise where the rule cannot serve the layers of a model."""

    def turn(self, layer: FactoredLayer) -> Turn | None:
        """Return the function that turns a layer's averages into directions; None where they are such already.

        It is asked for when the optimizer is built, and again when the number of rows of a batch is known.
        """
