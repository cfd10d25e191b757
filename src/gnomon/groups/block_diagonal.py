"""Block-diagonal matrices with dense blocks of one size, the last one smaller if it must be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import Element, Group, positive_size
from .dense import Dense

SMALL_BLOCK = 8


def _frobenius_norm(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1))


def _beginning(memory: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return the first numbers of dense memory in a shape, whatever their order was."""
    return None if memory is None else memory.as_strided((shape.numel(),), (1,)).view(shape)


class BlockDiagonal(Group):
    """``k // block`` dense blocks, multiplied as one batch, and one of the remaining size; D = 1/2.

    The blocks are :class:`Dense`, so everything is that group's operation with the block index as a
    batch dimension.
    """

    trivial_transport = True

    def __init__(self, k: int, block: int) -> None:
        self.k = k = positive_size("k", k)
        self.block = min(positive_size("block", block), k)
        count, remainder = divmod(k, self.block)
        self._stack = Dense(self.block)
        self._count = count
        self._last = Dense(remainder) if remainder else None
        self.shapes = ((count, self.block, self.block),) + (self._last.shapes if self._last else ())
        self.dim = count * self._stack.dim + (self._last.dim if self._last else 0)

    def _arguments(self) -> str:
        return f"{self.k}, block={self.block}"

    def _each(self, operation: Callable[..., Element], *elements: Element) -> Element:
        """Return ``operation(group, *blocks)`` of the stack of blocks and of the last block."""
        groups = [self._stack] + ([self._last] if self._last else [])
        return tuple(
            operation(group, *((blocks,) for blocks in parts))[0]
            for group, *parts in zip(groups, *elements, strict=True)
        )

    def _split(self, rows: Tensor) -> Element:
        """Split rows ``(*batch, n, k)`` into ``(*batch, count, n, block)`` and the rest."""
        head = self._count * self.block
        stacked = rows[..., :head].unflatten(-1, (self._count, self.block)).movedim(-2, -3)
        return (stacked, rows[..., head:]) if self._last else (stacked,)

    def _join(self, parts: Element) -> Tensor:
        stacked = parts[0].movedim(-3, -2).flatten(-2)
        return torch.cat([stacked, parts[1]], -1) if self._last else stacked

    def mul(self, a: Element, b: Element) -> Element:
        return self._each(Dense.mul, a, b)

    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return self._join(self._each(lambda g, a, x: (g.apply(a, x[0], transpose),), a, self._split(rows)))

    def gram(self, a: Element, x: Tensor) -> Element:
        return self._each(lambda g, a, x: g.gram(a, x[0]), a, self._split(x))

    def squared(self, a: Element) -> Element:
        return self._each(Dense.squared, a)

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        if not overwrite or rows.shape[:-2] != self.batch_shape(square):
            return self._join(tuple(x @ blocks for x, blocks in zip(self._split(rows), square, strict=True)))
        if scratch is not None and rows.stride(-1) != 1:
            for x, blocks, result in zip(self._split(rows), square, self._split(scratch), strict=True):
                torch.matmul(blocks, x.mT, out=result.mT)
            return scratch
        for x, blocks in zip(self._split(rows), square, strict=True):
            # Quicker than to write strided blocks at once.
            x.copy_(torch.matmul(x, blocks, out=_beginning(scratch, x.shape)))
        return rows

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return self._join(self._each(lambda g, a, x: (g.apply_inverse(a, x[0], transpose),), a, self._split(rows)))

    def ldiv(self, a: Element, b: Element) -> Element:
        return self._each(Dense.ldiv, a, b)

    def logabsdet(self, a: Element) -> Tensor:
        return self._total(Dense.logabsdet, a)

    def restrict(self, x: Tensor, y: Tensor) -> Element:
        return self._each(lambda g, x, y: g.restrict(x[0], y[0]), self._split(x), self._split(y))

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        return self._each(lambda g, a, grad: g.pullback(a, grad, left), a, grad)

    def scale(self, eta: Element) -> Element:
        return self._each(Dense.scale, eta)

    def unscale(self, n: Element) -> Element:
        return self._each(Dense.unscale, n)

    def dual(self, n: Element) -> Element:
        return n

    def _total(self, quantity: Callable[[Dense, Element], Tensor], a: Element) -> Tensor:
        """Return the sum of a quantity over the blocks."""
        stacked = quantity(self._stack, (a[0],)).sum(-1)
        return stacked + quantity(self._last, (a[1],)) if self._last else stacked

    def trace(self, covector: Element) -> Tensor:
        return self._total(Dense.trace, covector)

    def squared_norm(self, a: Element) -> Tensor:
        return self._total(Dense.squared_norm, a)

    def square_diagonal(self, a: Element) -> Tensor:
        blocks = [x.square().sum(-1) for x in a]
        return torch.cat([blocks[0].flatten(-2), *blocks[1:]], -1)

    def _greatest(self, quantity: Callable[[Dense, Element], Tensor], a: Element) -> Tensor:
        """Return the greatest value of a quantity over the blocks."""
        stacked = quantity(self._stack, (a[0],)).amax(-1)
        return torch.maximum(stacked, quantity(self._last, (a[1],))) if self._last else stacked

    def norm_estimate(self, n: Element) -> Tensor:
        return self._greatest(Dense.norm_estimate, n)

    def stretch(self, eta: Element) -> Tensor:
        """Return the greatest stretch of a block.

        For many small blocks it is the greatest Frobenius norm, which takes a tenth of the time.
        """
        small = self.block <= SMALL_BLOCK
        return self._greatest(lambda g, eta: _frobenius_norm(eta[0]) if small else g.stretch(eta), eta)

    def metric_dual(self, covector: Element) -> Element:
        return self._each(Dense.metric_dual, covector)

    def transpose(self, a: Element) -> Element:
        return self._each(Dense.transpose, a)

    def to_dense(self, a: Element) -> Tensor:
        blocks = [*a[0].unbind(-3), *a[1:]]
        offsets = [i * self.block for i in range(len(blocks))]
        return torch.cat([pad(b, (i, self.k - i - b.shape[-1])) for i, b in zip(offsets, blocks, strict=True)], -2)

    def from_dense(self, matrix: Tensor) -> Element:
        where = [slice(i, i + self.block) for i in range(0, self._count * self.block, self.block)]
        stacked = torch.stack([matrix[..., w, w] for w in where], -3)
        if not self._last:
            return (stacked,)
        head = self.k - self._last.k
        return (stacked, matrix[..., head:, head:])

    def from_diagonal(self, diagonal: Tensor) -> Element:
        head = self._count * self.block
        stacked = torch.diag_embed(diagonal[..., :head].unflatten(-1, (self._count, self.block)))
        return (stacked, torch.diag_embed(diagonal[..., head:])) if self._last else (stacked,)

    def factor(self, tau: Tensor) -> Element:
        return self._each(lambda g, block: g.factor(block[0]), self.from_dense(tau))
