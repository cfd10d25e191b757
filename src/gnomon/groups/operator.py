"""A symmetric matrix that is known by its products, such as a Hessian."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad


class SymmetricOperator:
    """``H + shift I``, from products with H and a rule for its diagonals that may cost less than k of them.

    Args:
        k: the size.
        product: rows ``x`` of shape ``(n, k)`` to rows ``H x``.
        diagonal: the diagonal of H or of a part of it, exact or estimated.
        shift: a multiple of the identity to add.
        start: where a part begins in the whole.
    """

    def __init__(
        self,
        k: int,
        product: Callable[[Tensor], Tensor],
        diagonal: Callable[[SymmetricOperator], Tensor],
        shift: float = 0.0,
        start: int = 0,
    ) -> None:
        self.k, self.shift, self.start = k, shift, start
        self._product, self._diagonal = product, diagonal

    @property
    def where(self) -> slice:
        """The rows of the whole that this is a part of."""
        return slice(self.start, self.start + self.k)

    def apply(self, rows: Tensor) -> Tensor:
        """Return ``(H + shift I) x`` for each row x."""
        return self._product(rows) + self.shift * rows

    def diagonal(self) -> Tensor:
        unshifted = SymmetricOperator(self.k, self._product, self._diagonal, 0.0, self.start)
        return self._diagonal(unshifted) + self.shift

    def part(self, start: int, stop: int) -> SymmetricOperator:
        """Return the principal block of rows and columns ``start`` to ``stop``."""

        def product(rows: Tensor) -> Tensor:
            return self._product(pad(rows, (start, self.k - stop)))[..., start:stop]

        return SymmetricOperator(stop - start, product, self._diagonal, self.shift, self.start + start)
