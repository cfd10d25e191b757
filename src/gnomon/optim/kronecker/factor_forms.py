"""The forms that a Kronecker factor may have, as one protocol.

There are three: the matrix itself (:mod:`.dense_factor`), an element of a sparse structure (:mod:`.structured_factor`),
and the product ``P = A A^T`` (:mod:`.gram_factor`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...groups import Element
from .statistics import Moment, MomentForm


class Projection(NamedTuple):
    """``H = A^T S A`` of a moment S: its trace, and H itself or what H is computed from; one of them is None."""

    trace: Tensor
    covector: Element | None
    """``<E_j, H>`` for every generator of the structure."""
    half: Element | None = None
    """``S A`` (or S, for a gram factor), from which H is computed together with the damping."""


class FactorForm(MomentForm, Protocol):
    """One factor A of a layer's preconditioner: how it is stored, projects curvature, moves and is applied.

    An element is a tuple of tensors with the blocks of a layer, or of several, along their first dimension.
    """

    @property
    def form(self) -> str:
        """The name of the form in a saved state."""

    @property
    def has_root(self) -> bool:
        """Whether A itself is stored; otherwise only ``A A^T`` is."""

    @property
    def has_momentum(self) -> bool: ...

    @property
    def has_scale(self) -> bool:
        """Whether multiples of A are of the same structure."""

    @property
    def storage_shape(self) -> tuple[int, ...]: ...

    @property
    def momentum_shape(self) -> tuple[int, ...]: ...

    @property
    def covector_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what :meth:`project_rows` gives, for each block."""

    @property
    def row_cost(self) -> int:
        """About how many multiplications ``A A^T x`` takes."""

    @property
    def square_size(self) -> int:
        """How many numbers :meth:`square` takes beside A; 0 where it is A itself."""

    def __hash__(self) -> int: ...

    # storage
    def identity(self, blocks: int, dtype: torch.dtype, device: torch.device | str) -> Tensor: ...
    def pack(self, a: Element) -> Tensor: ...
    def unpack(self, stored: Tensor) -> Element: ...
    def pack_momentum(self, m: Element) -> Tensor: ...
    def unpack_momentum(self, stored: Tensor) -> Element: ...
    def to_dense(self, a: Element) -> Tensor: ...
    def from_dense(self, matrix: Tensor) -> Element: ...

    # the update
    def project(self, a: Element, moment: Moment) -> Projection:
        """Return ``A^T S A``."""

    def through(self, a: Element, rows: Tensor) -> Tensor:
        """Return ``A^T x`` for each row x, or ``A A^T x`` where A is not stored."""

    def project_product(self, x: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor]) -> Projection:
        """Return ``A^T S A`` for a symmetric ``S = X^T Z``.

        X and Z are given by their rows as they are and as :meth:`through` gives them.
        """

    def mean_square(self, a: Element) -> Tensor:
        """Return ``tr(A^T A) / k``."""

    def tangent(self, a: Element, h: Projection, weight: Tensor, damping: Tensor, limit: float, rate: float) -> Element:
        """Return ``rate/2 P(weight H + damping A^T A - I)``, scaled back where its spectral norm is above ``limit``.

        P keeps diagonals and symmetric blocks and doubles couplings. The sum is scaled as a whole: a bound on the
        curvature alone would leave the growth by the identity without a counterweight.
        """

    def moved(self, a: Element, m: Element, order: int, factor: float) -> Element:
        """Return ``A Exp(factor m)``."""

    def rescaled(self, a: Element, factor: Tensor) -> Element:
        """Return ``factor A``, in the memory of A."""

    # the preconditioner
    def square(self, a: Element) -> Element:
        """Return ``A A^T`` in the form that :meth:`apply_square` takes."""

    def apply_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        """Return ``A A^T x`` for each row x.

        The result may be in the memory of the rows, or in ``scratch``, laid out as they are.
        """

    def project_outer(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``x^T y``, restricted to the structure and packed."""

    def keeps_square(self, rows: int, uses: int) -> bool:
        """Return whether to compute and store ``A A^T`` is cheaper than to apply A twice, for so many uses."""


class FactorPair(NamedTuple):
    """The forms of the factors of ``(K K^T) x (C C^T)``, for a batch of ``d x p`` matrices."""

    left: FactorForm
    """The form of K, on the inputs."""
    right: FactorForm
    """The form of C, on the outputs."""
