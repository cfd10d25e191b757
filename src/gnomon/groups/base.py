"""What a structure is: a matrix Lie group whose elements are a few plain tensors."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..linalg import align, is_differentiated, probe, spectral_norm_by_powers
from .operator import SymmetricOperator

Element: TypeAlias = tuple[Tensor, ...]
"""The blocks of a group or algebra element, each with the same leading batch dimensions."""

ORDERS = (1, 2, None)
"""Truncations of the exponential: ``I + N``, ``I + N + N^2/2``, and the exponential itself."""

_TAYLOR_RADIUS = 0.5  # the remainder of degree 15 is then below 0.5^16 / 16! < 1e-18


def add(a: Element, b: Element, factor: float = 1) -> Element:
    """``A + factor B``, blockwise."""
    return tuple([torch.add(x, y, alpha=factor) for x, y in zip(a, b, strict=True)])


def accumulate(a: Element, b: Element, factor: float = 1) -> Element:
    """``A + factor B`` in the memory of A, which must be a fresh result."""
    for x, y in zip(a, b, strict=True):
        x.add_(y, alpha=factor)
    return a


def times(factor: float, element: Element) -> Element:
    """Blockwise multiple."""
    return tuple(factor * block for block in element)


def positive_size(name: str, value: object) -> int:
    """``value`` as a positive integer; an error that names it otherwise."""
    try:
        size = operator.index(value)  # type: ignore[arg-type]  # NumPy's integers too
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return size


def check_order(order: int | None) -> None:
    if order not in ORDERS:
        raise ValueError(f"order must be 1, 2 or None (the exact exponential), got {order!r}")


class Group(ABC):
    """A subgroup of GL(k), its Lie algebra, and what their operations cost.

    A group owns no state. An element ``A`` is a tuple of tensors (its blocks) whose shapes, behind any
    leading batch dimensions, are ``shapes``. Elements of the algebra, written ``N``, and gradients with
    respect to the blocks have the same shapes. Vectors are rows: in :meth:`apply` and :meth:`restrict` an
    argument of shape ``(*batch, n, k)`` holds ``n`` vectors; :meth:`matvec` and its kin take
    ``(*sample, *batch, k)`` as :mod:`torch.distributions` does.

    Coordinates are orthonormal (Sec. 3.2 of the paper): ``N = D . eta`` with ``D_j = 1 / ||E_j + E_j^T||_F``
    for the generator ``E_j``, so that the affine-invariant metric of ``tau = A A^T`` at ``eta = 0`` is the
    identity. :meth:`scale` is that linear map, restricted to the coordinate space (a symmetric block is
    stored in full, and symmetrized); it is its own adjoint.

    To add a structure, define the abstract methods and run :func:`gnomon.testing.check_group` on it.
    """

    k: int
    """The matrices are k x k."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each block."""
    dim: int
    """Degrees of freedom of the submanifold ``{A A^T}``."""
    trivial_transport: bool = False
    """Whether parallel transport is the identity on the coordinates (symmetric or abelian structures)."""
    is_algebra: bool = True
    """Whether ``mul`` is bilinear in the blocks, so that ``N^2`` and polynomials in it are ``mul`` too."""
    has_matrix_exp: bool = True
    """Whether ``exp`` is the matrix exponential; otherwise it agrees with it to first order."""

    # ------------------------------------------------------------------ storage
    @property
    def numel(self) -> int:
        """Numbers stored for an element."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of an element kept in one tensor: its only block's, or that of all blocks end to end."""
        return self.shapes[0] if len(self.shapes) == 1 else (self.numel,)

    def pack(self, a: Element) -> Tensor:
        """Blocks to one tensor, ``(*batch, *storage_shape)``."""
        return a[0] if len(a) == 1 else self.flatten(a)

    def unpack(self, stored: Tensor) -> Element:
        """One tensor to blocks, as views."""
        return (stored,) if len(self.shapes) == 1 else self.unflatten(stored)

    def flatten(self, a: Element) -> Tensor:
        """Blocks to one vector, ``(*batch, numel)``."""
        return torch.cat([block.flatten(-len(shape)) for block, shape in zip(a, self.shapes, strict=True)], -1)

    def unflatten(self, flat: Tensor) -> Element:
        """One vector to blocks, as views."""
        parts = zip(flat.split(self._sizes, -1), self.shapes, strict=True)
        return tuple(part if len(shape) == 1 else part.unflatten(-1, shape) for part, shape in parts)

    def batch_shape(self, a: Element) -> torch.Size:
        return a[0].shape[: a[0].ndim - len(self.shapes[0])]

    def identity_like(self, a: Element) -> Element:
        return self.identity(self.batch_shape(a), dtype=a[0].dtype, device=a[0].device)

    def identity(
        self,
        batch_shape: Sequence[int] = (),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Element:
        """The neutral element."""
        return self.from_diagonal(torch.ones(*batch_shape, self.k, dtype=dtype, device=device))

    @property
    def coordinate_sets(self) -> tuple[tuple[int, ...], ...]:
        """Which blocks are orthonormal together: all of them, unless a group is normalized factor by factor."""
        return (tuple(range(len(self.shapes))),)

    # ------------------------------------------------------------------ the structure
    @abstractmethod
    def mul(self, a: Element, b: Element) -> Element:
        """``A B``."""

    @abstractmethod
    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        """``A x`` (or ``A^T x``) for each row ``x`` of ``(*batch, n, k)``."""

    @abstractmethod
    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        """``A^-1 x`` (or ``A^-T x``) for each row ``x`` of ``(*batch, n, k)``."""

    @abstractmethod
    def ldiv(self, a: Element, b: Element) -> Element:
        """``A^-1 B``."""

    @abstractmethod
    def logabsdet(self, a: Element) -> Tensor:
        """``log |det A|``, of the batch shape."""

    @abstractmethod
    def restrict(self, x: Tensor, y: Tensor) -> Element:
        """``<E_j, X^T Y>`` for every generator, from rows ``X`` and ``Y``, without forming ``X^T Y``."""

    @abstractmethod
    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        """``<E_j, A^T G>``: the gradient in ``N`` of ``f(A Exp(N))`` at 0 from ``G = df/dA``.

        Only the entries of ``G`` inside the structure matter, because the structure is closed under
        multiplication. With ``left`` it is ``<E_j, G A^T>``, for ``f(Exp(N) A)``.
        """

    @abstractmethod
    def scale(self, eta: Element) -> Element:
        """``D . eta``: from orthonormal coordinates to the algebra."""

    @abstractmethod
    def unscale(self, n: Element) -> Element:
        """The coordinates of an algebra element, ``N / D``."""

    def dual(self, n: Element) -> Element:
        """The covector ``E_j -> <N, E_j>_F`` (``N`` itself where a block's entries are matrix entries)."""
        return n

    # ------------------------------------------------------------------ to and from dense
    @abstractmethod
    def to_dense(self, a: Element) -> Tensor:
        """The k x k matrix. For people and tests."""

    @abstractmethod
    def from_dense(self, matrix: Tensor) -> Element:
        """The projection of a k x k matrix onto the structure."""

    @abstractmethod
    def from_diagonal(self, diagonal: Tensor) -> Element:
        """The element nearest to ``Diag(diagonal)``: that matrix itself, where the structure holds it."""

    @abstractmethod
    def factor(self, tau: Tensor) -> Element:
        """The group's Cholesky factor: ``A A^T = tau`` where tau is on the submanifold, and is near it elsewhere."""

    # ------------------------------------------------------------------ transposes
    @property
    def transposed(self) -> Group:
        """The group of the transposed matrices: itself, where the structure is symmetric."""
        return self

    def transpose(self, a: Element) -> Element:
        """``A^T`` as an element of :attr:`transposed`; coordinates and covectors are transposed alike."""
        return self.transposed.from_dense(self.to_dense(a).mT)

    # ------------------------------------------------------------------ derived operations
    def matvec(self, a: Element, x: Tensor) -> Tensor:
        """``A x`` for vectors ``(*sample, *batch, k)``."""
        return by_rows(self, a, x, lambda rows: self.apply(a, rows))

    def rmatvec(self, a: Element, x: Tensor) -> Tensor:
        """``A^T x`` for vectors ``(*sample, *batch, k)``."""
        return by_rows(self, a, x, lambda rows: self.apply(a, rows, transpose=True))

    def solve(self, a: Element, x: Tensor) -> Tensor:
        """``A^-1 x`` for vectors ``(*sample, *batch, k)``."""
        return by_rows(self, a, x, lambda rows: self.apply_inverse(a, rows))

    def rsolve(self, a: Element, x: Tensor) -> Tensor:
        """``A^-T x`` for vectors ``(*sample, *batch, k)``."""
        return by_rows(self, a, x, lambda rows: self.apply_inverse(a, rows, transpose=True))

    def apply_squared(self, a: Element, rows: Tensor, overwrite: bool = False) -> Tensor:
        """``A A^T x`` for each row ``x`` of ``(*batch, n, k)``; with ``overwrite`` it may be in the rows' memory."""
        if is_differentiated(rows, *a):
            return self.apply(a, self.apply(a, rows, transpose=True))  # nothing in place that a derivative needs
        return self.times_square(self.squared(a), rows, overwrite)

    def squared(self, a: Element) -> Element:
        """``A A^T`` as :meth:`times_square` wants it; it has the batch dimensions of A, and is worth keeping."""
        return a

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        """:meth:`apply_squared` from what :meth:`squared` gives, without derivatives.

        With ``scratch``, memory as large as the rows' and laid out as they are, the result may be in that.
        """
        return self.apply(square, self.apply(square, rows, transpose=True))

    def gram(self, a: Element, x: Tensor) -> Element:
        """``<E_j, A^T X^T X A>`` from rows ``X`` of shape ``(*batch, n, k)``, without a k x k matrix."""
        xa = self.apply(a, x, transpose=True)
        return self.restrict(xa, xa)

    @property
    def products(self) -> int:
        """How many products with an operator :meth:`congruence` takes, beside diagonals."""
        return self.k

    def congruence(self, a: Element, h: SymmetricOperator) -> Element:
        """``<E_j, A^T H A>`` for one element (no batch), from as few products with ``H`` as the structure needs.

        Without a better way it takes one product for each of the k columns of ``A``.
        """
        columns = self.to_dense(a)
        return self.restrict(columns, h.apply(columns.mT).mT)

    def bracket(self, n: Element, m: Element) -> Element:
        """``[N, M] = N M - M N`` of two algebra elements."""
        return accumulate(self.mul(n, m), self.mul(m, n), -1)

    def trace(self, covector: Element) -> Tensor:
        """``tr(M)`` from ``<E_j, M>``, of the batch shape."""
        return (self.flatten(self.identity_like(covector)) * self.flatten(covector)).sum(-1)

    def metric_dual(self, covector: Element) -> Element:
        """``2 D . D . <E_j, M>`` for a symmetric M: the algebra element along which ``<N, M>`` grows fastest.

        It may be in the memory of the covector.
        """
        return times(2, self.scale(self.scale(covector)))

    def squared_norm(self, a: Element) -> Tensor:
        """``||A||_F^2``, of the batch shape."""
        return (self.flatten(a) * self.flatten(self.dual(a))).sum(-1)

    def length(self, eta: Element) -> Tensor:
        """``||eta||``, the geodesic length of a tangent vector, of the batch shape and in float64."""
        return torch.linalg.vector_norm(self.flatten(eta), dim=-1, dtype=torch.float64)

    def norm_bound(self, n: Element) -> Tensor:
        """``sqrt(||N||_1 ||N||_inf)``, at least the spectral norm; it does not grow with k as ``||N||_F`` does."""
        magnitudes = tuple(block.detach().abs() for block in n)
        ones = n[0].new_ones(*self.batch_shape(n), 1, self.k)
        sums = [self.apply(magnitudes, ones, transpose).squeeze(-2) for transpose in (False, True)]
        return (sums[0].amax(-1) * sums[1].amax(-1)).sqrt()

    def norm_estimate(self, n: Element) -> Tensor:
        """About the spectral norm: from below, by four steps of the power method on ``N^T N``; of the batch shape."""

        batch = self.batch_shape(n)
        start = probe(self.k, n[0].dtype, n[0].device).expand(*batch, 1, self.k)
        norms = spectral_norm_by_powers(lambda x: self.apply(n, x), lambda x: self.apply(n, x, transpose=True), start)
        return norms.reshape(batch).to(n[0].dtype)

    def reach(self, eta: Element) -> Tensor:
        """A bound on ``||2 D.eta||_2``: a step changes no direction of tau by more than e to this power."""
        return 2 * self.norm_bound(self.scale(eta))

    def exp(self, n: Element, order: int | None = None) -> Element:
        """``Exp(N)``, or its truncation after the linear (1) or quadratic (2) term.

        The quadratic one, ``(I + (I + N)^2) / 2``, is never singular for symmetric or triangular ``N``.
        """
        check_order(order)
        if order is None:
            return self._exact_exp(n)
        linear = add(self.identity_like(n), n)
        return linear if order == 1 else add(linear, self.mul(n, n), 0.5)

    def _exact_exp(self, n: Element) -> Element:
        return taylor_exponential(self, n)

    def move(self, a: Element, n: Element, order: int | None = None, left: bool = False) -> Element:
        """``A Exp(N)``, or ``Exp(N) A`` with ``left``, at a given order of the exponential.

        The truncated forms add to ``A`` and never form ``I + N``, whose rounding would lose small steps.
        """
        check_order(order)
        if order is None:
            e = self.exp(n)
            return self.mul(e, a) if left else self.mul(a, e)
        first = self.mul(n, a) if left else self.mul(a, n)
        moved = add(a, first)
        if order == 1:
            return moved
        return accumulate(moved, self.mul(n, first) if left else self.mul(first, n), 0.5)

    def retract(self, a: Element, eta: Element, order: int | None = 2, left: bool = False, sign: int = 1) -> Element:
        """``A Exp(+-D.eta)``, or ``Exp(+-D.eta) A`` with ``left``: the point at coordinates eta of the frame A."""
        n = self.scale(eta)
        return self.move(a, n if sign > 0 else times(-1, n), order, left)

    # ------------------------------------------------------------------ identity as a value
    def _arguments(self) -> str:
        return str(self.k)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments()})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def taylor_exponential(group: Group, n: Element) -> Element:
    """``Exp(N)`` by scaling and squaring of the Taylor polynomial of degree 15: products alone, so within the
    structure.

    The polynomial is evaluated in powers of ``N^4`` (Paterson and Stockmeyer), with six products. (The dense
    ``torch.linalg.matrix_exp`` loses four digits at norms about 0.03.)
    """
    batch = group.batch_shape(n)
    squarings = (group.norm_bound(n).double() / _TAYLOR_RADIUS).clamp(min=1).log2().ceil()
    squarings = squarings.where(squarings.isfinite(), 0)
    n = tuple(block * align(0.5**squarings, block).to(block.dtype) for block in n)
    n2 = group.mul(n, n)
    powers = [group.identity_like(n), n, n2, group.mul(n, n2)]
    n4 = group.mul(n2, n2)
    result: Element | None = None
    for start in (12, 8, 4, 0):
        if result is not None:
            result = group.mul(result, n4)
        for degree, power in enumerate(powers, start):
            term = times(1 / math.factorial(degree), power)
            result = term if result is None else add(result, term)
    assert result is not None
    for done in range(int(squarings.max()) if batch.numel() else 0):
        squared = group.mul(result, result)
        # Each batch element is squared as often as its own norm asks: more would only cost digits.
        pairs = zip(result, squared, strict=True)
        result = tuple(torch.where(align(squarings, new) > done, new, old) for old, new in pairs)
    return result


def by_rows(group: Group, a: Element, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """An operation on rows ``(*batch, n, k)`` for vectors ``(*sample, *batch, k)``."""
    if x.ndim == 0 or x.shape[-1] != group.k:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but {group} acts on vectors of length {group.k} along the last "
            "dimension; transpose x if its vectors are columns"
        )
    batch = group.batch_shape(a)
    try:
        shape = torch.broadcast_shapes(x.shape[:-1], batch)
    except RuntimeError:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, which does not broadcast with the batch shape {tuple(batch)}: "
            f"give (*sample, *{tuple(batch)}, {group.k})"
        ) from None
    samples = math.prod(shape[: len(shape) - len(batch)])
    rows = x.expand(*shape, group.k).reshape(samples, *batch, group.k).movedim(0, -2)
    return operation(rows).movedim(-2, 0).reshape(*shape, group.k)
