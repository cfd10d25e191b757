"""Block-triangular matrices composed of other groups, and the named structures built on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..linalg import SMALL_SIZE, matmul, spectral_norm, widen
from .base import Element, Group, add, positive_size
from .dense import Dense
from .diagonal import Diagonal
from .operator import SymmetricOperator


def _assign(place: Tensor, value: Tensor) -> None:
    if value is not place:
        place.copy_(value)


def _product(rows: Tensor, wide: Tensor) -> Tensor:
    """Return ``rows wide^T``, computed as a transposed product.

    That is two to ten times as quick where one side is thin.
    """
    return matmul(wide, rows.mT).mT


def _add_product(rows: Tensor, x: Tensor, y: Tensor) -> None:
    """Add ``x y`` to the rows in their memory, which may be that of a transposed matrix."""
    if not rows.ndim == x.ndim == y.ndim == 3:
        rows.add_(x @ y)
    elif rows.stride(-1) == 1:
        rows.baddbmm_(x, y)
    else:
        rows.mT.baddbmm_(y.mT, x.mT)


def _coupling_norm(coupling: Tensor) -> Tensor:
    """Return a bound on the spectral norm; where neither side is small, the Frobenius norm."""
    tall = coupling if coupling.shape[-2] >= coupling.shape[-1] else coupling.mT
    return spectral_norm(tall) if tall.shape[-1] <= SMALL_SIZE else torch.linalg.vector_norm(tall, dim=(-2, -1))


def _quick_coupling_norm(coupling: Tensor) -> Tensor:
    """Return the same as :func:`_coupling_norm` with one pass over a long side.

    One value is read from the device, to see that squares are in range.
    """
    tall = coupling if coupling.shape[-2] >= coupling.shape[-1] else coupling.mT
    if tall.shape[-1] > SMALL_SIZE:
        return _coupling_norm(tall)
    gram = matmul(tall.mT, tall)
    squares, info = gram.diagonal(dim1=-2, dim2=-1).sum(-1), torch.finfo(gram.dtype)
    in_range = bool(((squares > info.tiny**0.5) & (squares < info.max**0.5)).all())
    return spectral_norm(gram).sqrt() if in_range else _coupling_norm(tall)


class BlockTriangular(Group):
    """Groups on the diagonal, dense coupling below (or above) it.

    With more than two parts the rest is a ``BlockTriangular`` of its own, so that there is one coupling
    per object: a matrix ``C`` from the columns of the *source* part to the rows of the *target* part
    (lower: first to rest; upper: rest to first). D is that of the parts, and 1/sqrt(2) on the coupling.
    Blocks: those of the first part, those of the rest, the coupling.
    """

    def __init__(self, blocks: Sequence[Group], upper: bool = False) -> None:
        blocks = tuple(blocks)
        if len(blocks) < 2:
            raise ValueError(f"blocks must hold at least two groups, got {blocks!r}")
        for block in blocks:
            if not isinstance(block, Group):
                raise TypeError(f"blocks must be groups, got {block!r}; for a plain size use Dense({block!r})")
            if not block.is_algebra:
                raise ValueError(
                    f"blocks cannot hold {block}, whose squares leave its coordinates; put the block-triangular "
                    "structure inside the Kronecker factors instead"
                )
        self.blocks = blocks
        self.upper = upper
        self.first = blocks[0]
        self.rest = blocks[1] if len(blocks) == 2 else BlockTriangular(blocks[1:], upper)
        self.k = self.first.k + self.rest.k
        self.source, self.target = (self.rest, self.first) if upper else (self.first, self.rest)
        self.shapes = (*self.first.shapes, *self.rest.shapes, (self.target.k, self.source.k))
        self.dim = self.first.dim + self.rest.dim + self.target.k * self.source.k

    def _arguments(self) -> str:
        return f"({', '.join(map(repr, self.blocks))}), upper={self.upper}"

    # Each operation works on (source, target, coupling); these two convert from and to the stored order.
    def _open(self, a: Element) -> tuple[Element, Element, Tensor]:
        cut = len(self.first.shapes)
        first, rest, coupling = a[:cut], a[cut:-1], a[-1]
        return (rest, first, coupling) if self.upper else (first, rest, coupling)

    def _close(self, source: Element, target: Element, coupling: Tensor) -> Element:
        first, rest = (target, source) if self.upper else (source, target)
        return (*first, *rest, coupling)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        first, rest = rows[..., : self.first.k], rows[..., self.first.k :]
        return (rest, first) if self.upper else (first, rest)

    def _join(self, source: Tensor, target: Tensor) -> Tensor:
        return torch.cat([target, source] if self.upper else [source, target], -1)

    def mul(self, a: Element, b: Element) -> Element:
        (a_s, a_t, a_c), (b_s, b_t, b_c) = self._open(a), self._open(b)
        coupling = self.target.apply(a_t, b_c.mT).mT + self.source.apply(b_s, a_c, transpose=True)
        return self._close(self.source.mul(a_s, b_s), self.target.mul(a_t, b_t), coupling)

    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        a_s, a_t, coupling = self._open(a)
        x_s, x_t = self._split(rows)
        y_s = self.source.apply(a_s, x_s, transpose)
        y_t = self.target.apply(a_t, x_t, transpose)
        if transpose:
            return self._join(y_s + _product(x_t, coupling.mT), y_t)
        return self._join(y_s, y_t + _product(x_s, coupling))

    def squared(self, a: Element) -> Element:
        """Return ``A A^T`` as a thin matrix and the square of one part.

        Let ``A = [[S, 0], [C, T]]`` (source, then target). If the source is the smaller part, the thin matrix is
        ``H = [S; C]``, stored as rows, and ``A A^T = H H^T + [[0, 0], [0, T T^T]]``. Otherwise it is the target's rows
        of ``A A^T = [[S S^T, S C^T], [C S^T, C C^T + T T^T]]``. The square of a diagonal T is stored with zeros for S,
        so that rows are multiplied as a whole.
        """
        a_s, a_t, coupling = self._open(a)
        if self._source_is_thin:
            thin, squares = self._join(self.source.to_dense(a_s).mT, coupling.mT), self.target.squared(a_t)
            if self._target_is_diagonal:
                squares = (self._join(torch.zeros_like(thin[..., 0, : self.source.k]), squares[0]),)
            return (thin, *squares)
        t = self.target.to_dense(a_t)
        thin = self._join(self.source.apply(a_s, coupling), matmul(coupling, coupling.mT) + matmul(t, t.mT))
        return (thin, *self.source.squared(a_s))

    @property
    def _source_is_thin(self) -> bool:
        return self.source.k <= self.target.k

    @property
    def _target_is_diagonal(self) -> bool:
        return type(self.target) is Diagonal

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        result = rows if overwrite else rows.clone()
        self._become_product(result, square)
        return result

    def _become_product(self, rows: Tensor, square: Element, more: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Replace rows X by ``X A A^T`` in place.

        With ``more``, a pair U and V, add ``U V`` too, and return ``X V^T`` for the old rows X. (Without it, what is
        returned is of no use.) All that is thin is read and added in one pass, because memory takes the time.
        """
        thin, other = square[0], square[1:]
        if self._source_is_thin:
            wide = thin if more is None else torch.cat([thin, more[1]], -2)
            within = back = _product(rows, wide)
            if more is not None:
                within, back = torch.cat([within[..., : self.source.k], more[0]], -1), back[..., self.source.k :]
            if self._target_is_diagonal:
                rows.mul_(other[0].unsqueeze(-2))
            else:
                x_s, x_t = self._split(rows)
                _assign(x_t, self.target.times_square(other, x_t, overwrite=True))
                x_s.zero_()
            _add_product(rows, within, wide)
            return back
        x_s, x_t = self._split(rows)
        (across, own), kept = self._split(thin), x_t.clone()
        back = kept if more is None else _product(rows, more[1])
        if isinstance(self.source, BlockTriangular):
            inner = self.source._become_product(x_s, other, (kept, across))
        else:
            inner = _product(x_s, across)
            _assign(x_s, self.source.times_square(other, x_s, overwrite=True))
            _add_product(x_s, kept, across)
        _add_product(inner, kept, own.mT)
        x_t.copy_(inner)
        if more is not None:
            _add_product(rows, *more)
        return back

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        a_s, a_t, coupling = self._open(a)
        x_s, x_t = self._split(rows)
        if transpose:
            y_t = self.target.apply_inverse(a_t, x_t, transpose)
            y_s = self.source.apply_inverse(a_s, x_s - y_t @ coupling, transpose)
        else:
            y_s = self.source.apply_inverse(a_s, x_s)
            y_t = self.target.apply_inverse(a_t, x_t - y_s @ coupling.mT)
        return self._join(y_s, y_t)

    def ldiv(self, a: Element, b: Element) -> Element:
        (a_s, a_t, a_c), (b_s, b_t, b_c) = self._open(a), self._open(b)
        x_s, x_t = self.source.ldiv(a_s, b_s), self.target.ldiv(a_t, b_t)
        remainder = b_c - self.source.apply(x_s, a_c, transpose=True)
        return self._close(x_s, x_t, self.target.apply_inverse(a_t, remainder.mT).mT)

    def logabsdet(self, a: Element) -> Tensor:
        a_s, a_t, _ = self._open(a)
        return self.source.logabsdet(a_s) + self.target.logabsdet(a_t)

    def restrict(self, x: Tensor, y: Tensor) -> Element:
        (x_s, x_t), (y_s, y_t) = self._split(x), self._split(y)
        return self._close(self.source.restrict(x_s, y_s), self.target.restrict(x_t, y_t), _product(x_t.mT, y_s.mT))

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        (a_s, a_t, a_c), (g_s, g_t, g_c) = self._open(a), self._open(grad)
        n_s = self.source.pullback(a_s, g_s, left)
        n_t = self.target.pullback(a_t, g_t, left)
        if left:
            n_t = add(n_t, self.target.restrict(g_c.mT, a_c.mT))
            return self._close(n_s, n_t, self.source.apply(a_s, g_c))
        n_s = add(n_s, self.source.restrict(a_c, g_c))
        return self._close(n_s, n_t, self.target.apply(a_t, g_c.mT, transpose=True).mT)

    def scale(self, eta: Element) -> Element:
        e_s, e_t, coupling = self._open(eta)
        return self._close(self.source.scale(e_s), self.target.scale(e_t), math.sqrt(0.5) * coupling)

    def unscale(self, n: Element) -> Element:
        n_s, n_t, coupling = self._open(n)
        return self._close(self.source.unscale(n_s), self.target.unscale(n_t), math.sqrt(2) * coupling)

    def dual(self, n: Element) -> Element:
        n_s, n_t, coupling = self._open(n)
        return self._close(self.source.dual(n_s), self.target.dual(n_t), coupling)

    def trace(self, covector: Element) -> Tensor:
        m_s, m_t, _ = self._open(covector)
        return self.source.trace(m_s) + self.target.trace(m_t)

    def squared_norm(self, a: Element) -> Tensor:
        a_s, a_t, coupling = self._open(a)
        return self.source.squared_norm(a_s) + self.target.squared_norm(a_t) + coupling.square().sum((-2, -1))

    def square_diagonal(self, a: Element) -> Tensor:
        a_s, a_t, coupling = self._open(a)
        target = self.target.square_diagonal(a_t) + coupling.square().sum(-1)
        return self._join(self.source.square_diagonal(a_s), target)

    def norm_estimate(self, n: Element) -> Tensor:
        """Return the norm of the 2 x 2 matrix of the parts' norms, which is no less than the norm of the whole.

        The singular values of ``[[s, 0], [c, t]]`` have the sum ``|(s + t, c)|`` and the difference ``|(s - t, c)|``.
        """
        n_s, n_t, coupling = self._open(n)
        s, t, c = self.source.norm_estimate(n_s), self.target.norm_estimate(n_t), _coupling_norm(coupling)
        return (torch.hypot(s + t, c) + torch.hypot(s - t, c)) / 2

    def stretch(self, eta: Element) -> Tensor:
        """Return the norm of the symmetric 2 x 2 matrix of the parts' norms, a bound on that of the whole."""
        e_s, e_t, coupling = self._open(eta)
        s, t, c = self.source.stretch(e_s), self.target.stretch(e_t), _quick_coupling_norm(widen(coupling))
        return (s + t + torch.hypot(s - t, math.sqrt(2) * c.to(coupling.dtype))) / 2

    def metric_dual(self, covector: Element) -> Element:
        m_s, m_t, coupling = self._open(covector)
        return self._close(self.source.metric_dual(m_s), self.target.metric_dual(m_t), coupling)

    @property
    def transposed(self) -> Group:
        return BlockTriangular([block.transposed for block in self.blocks], not self.upper)

    def transpose(self, a: Element) -> Element:
        cut = len(self.first.shapes)
        return (*self.first.transpose(a[:cut]), *self.rest.transpose(a[cut:-1]), a[-1].mT)

    @property
    def products(self) -> int:
        return min(self.source.k + self.target.products, self.target.k + self.source.products)

    def congruence(self, a: Element, h: SymmetricOperator) -> Element:
        """Return ``<E_j, A^T H A>`` from products of H with A's columns of the source, or from H's rows of the target.

        Either gives its own block, the coupling and all that it adds to the other part, in which the rest is a
        congruence; the way with fewer products is taken.
        """
        a_s, a_t, coupling = self._open(a)
        cut = self.first.k
        first, rest = h.part(0, cut), h.part(cut, self.k)
        h_s, h_t = (rest, first) if self.upper else (first, rest)
        if self.source.k + self.target.products == self.products:
            columns = self._join(self.source.to_dense(a_s).mT, coupling.mT)  # A's columns of the source, as rows
            x_s, x_t = self._split(columns)
            y_s, y_t = self._split(h.apply(columns))
            m_s = self.source.restrict(x_s.mT, y_s.mT)
            m_s = add(m_s, self.source.restrict(x_t.mT, y_t.mT))
            m_c = self.target.apply(a_t, y_t, transpose=True).mT
            return self._close(m_s, self.target.congruence(a_t, h_t), m_c)
        ones = torch.eye(self.target.k, dtype=coupling.dtype, device=coupling.device)
        zeros = ones.new_zeros(self.target.k, self.source.k)
        h_ts, h_tt = self._split(h.apply(self._join(zeros, ones)))  # the target's rows of H
        moved = self.source.apply(a_s, h_ts, transpose=True)  # H_ts S
        column = h_tt @ coupling
        m_s = self.source.congruence(a_s, h_s)
        m_s = add(m_s, self.source.restrict(coupling, column + moved))
        m_s = add(m_s, self.source.restrict(moved, coupling))
        m_c = self.target.apply(a_t, (column + moved).mT, transpose=True).mT
        t = self.target.to_dense(a_t)
        return self._close(m_s, self.target.restrict(t, h_tt @ t), m_c)

    def _corners(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the (source, source), (target, target) and (target, source) blocks of a dense matrix."""
        cut = self.first.k
        first, rest = slice(None, cut), slice(cut, None)
        s, t = (rest, first) if self.upper else (first, rest)
        return matrix[..., s, s], matrix[..., t, t], matrix[..., t, s]

    def to_dense(self, a: Element) -> Tensor:
        a_s, a_t, coupling = self._open(a)
        source_rows = self._join(self.source.to_dense(a_s), torch.zeros_like(coupling.mT))
        target_rows = self._join(coupling, self.target.to_dense(a_t))
        return torch.cat([target_rows, source_rows] if self.upper else [source_rows, target_rows], -2)

    def from_dense(self, matrix: Tensor) -> Element:
        m_s, m_t, coupling = self._corners(matrix)
        return self._close(self.source.from_dense(m_s), self.target.from_dense(m_t), coupling)

    def from_diagonal(self, diagonal: Tensor) -> Element:
        d_s, d_t = self._split(diagonal)
        coupling = diagonal.new_zeros(*diagonal.shape[:-1], self.target.k, self.source.k)
        return self._close(self.source.from_diagonal(d_s), self.target.from_diagonal(d_t), coupling)

    def factor(self, tau: Tensor) -> Element:
        # Off the submanifold this is the regression of target on source, which keeps the rest positive definite.
        tau_s, tau_t, tau_c = self._corners(tau)
        a_s = self.source.factor(tau_s)
        slope = torch.cholesky_solve(tau_c.mT, torch.linalg.cholesky(tau_s)).mT
        coupling = self.source.apply(a_s, slope, transpose=True)
        return self._close(a_s, self.target.factor(tau_t - slope @ tau_c.mT), coupling)


class Arrow(BlockTriangular):
    """The paper's rank-one submanifold (Sec. low_rank_spd) and its rank-r form.

    ``A = [[a, 0], [b, Diag(c)]]`` with a dense r x r head ``a``: given the first r features, which drive the others,
    those are independent. (For factors that are not observed see :class:`LowRank`.) A step costs O(k r^2).
    """

    def __init__(self, k: int, rank: int = 1) -> None:
        k, rank = positive_size("k", k), positive_size("rank", rank)
        if rank >= k:
            raise ValueError(f"rank must be below k = {k}, got {rank}; the full manifold is Dense({k})")
        self.rank = rank
        super().__init__((Dense(rank), Diagonal(k - rank)))

    def _arguments(self) -> str:
        return f"{self.k}, rank={self.rank}"


class Heisenberg(BlockTriangular):
    """Dense corners of sizes ``head`` and ``tail``, a diagonal middle and dense borders.

    ``A = [[H, *, *], [0, Diag(m), *], [0, 0, T]]``: a step costs O(k (head + tail)^2).
    """

    def __init__(self, k: int, head: int, tail: int) -> None:
        k, head, tail = positive_size("k", k), positive_size("head", head), positive_size("tail", tail)
        if head + tail >= k:
            raise ValueError(f"head + tail must be below k = {k}, got {head} + {tail}; the full manifold is Dense({k})")
        self.head, self.tail = head, tail
        super().__init__((Dense(head), Diagonal(k - head - tail), Dense(tail)), upper=True)

    def _arguments(self) -> str:
        return f"{self.k}, head={self.head}, tail={self.tail}"
