"""What a structure is: a matrix Lie group whose elements are a few plain tensors."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..linalg import is_differentiated, probe, spectral_norm_by_powers, widen
from . import derived
from .elements import Blocks, Element, accumulate, add, times
from .operator import SymmetricOperator

__all__ = ["ORDERS", "Element", "Group", "accumulate", "add", "check_order", "positive_size", "times"]

ORDERS = (1, 2, None)
"""Truncations of the exponential: ``I + N``, ``I + N + N^2/2``, and the exponential itself."""


def positive_size(name: str, value: object) -> int:
    """Return ``value`` as a positive integer; the error for any other value says ``name``."""
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


class Group(Blocks, ABC):
    """A subgroup of GL(k), its Lie algebra, and what their operations cost (Eq. submanifolds).

    A group owns no state. An element ``A`` is a tuple of tensors (its blocks) whose shapes, behind any leading batch
    dimensions, are ``shapes``. Elements of the algebra, written ``N``, and gradients with respect to the blocks have
    the same shapes. Vectors are rows: in :meth:`apply` and :meth:`restrict` an argument of shape ``(*batch, n, k)``
    holds ``n`` vectors; :meth:`matvec` and its kin take ``(*sample, *batch, k)`` as :mod:`torch.distributions` does.

    Coordinates are orthonormal (Sec. 3.2 of the paper): ``N = D . eta`` with ``D_j = 1 / ||E_j + E_j^T||_F`` for the
    generator ``E_j``, so that the affine-invariant metric of ``tau = A A^T`` at ``eta = 0`` is the identity (Eq.
    metric_simple). :meth:`scale` is that linear map, restricted to the coordinate space (a symmetric block is stored in
    full, and symmetrized); it is its own adjoint.

    To add a structure, set the attributes ``k``, ``shapes`` and ``dim``, define the abstract methods ``mul``,
    ``apply`` and ``ldiv``, set the flags ``trivial_transport``, ``is_algebra`` and ``has_matrix_exp`` where their
    defaults do not hold, and run :func:`gnomon.testing.check_group`. ``gnomon.groups.derived.DERIVED_FROM`` says
    what every default is derived from. These hold under a condition, or cost more than the structure may ask for:

    ===================================  ========================================================================
    default                              derived from
    ===================================  ========================================================================
    ``restrict``, ``pullback``           ``apply`` and ``mul``, by reverse differentiation
    ``apply_inverse``                    ``ldiv`` of the identity, ``apply``
    ``to_dense``, ``logabsdet``          ``apply`` to the k columns of I; ``to_dense``, in O(k^3)
    ``square_diagonal``                  ``to_dense``; override it for a sparse structure
    ``dual``                             ``restrict`` of the k x k matrix; override it for a sparse structure
    ``from_dense``                       ``restrict``, ``dual``; the generators must be orthogonal
    ``from_diagonal``, ``identity``      ``from_dense`` of a k x k matrix; ``from_diagonal``
    ``scale``                            ``dual``, ``pullback``; the ``E_j + E_j^T`` must be orthogonal
    ``unscale``, ``metric_dual``         ``scale``, ``dual``, ``pullback``
    ``factor``                           ``apply_inverse``, ``restrict``, ``scale``, ``move``, by iteration
    ``transposed``, ``transpose``        itself, as a symmetric structure is; ``to_dense``, ``from_dense``
    ``congruence``, ``products``         ``to_dense``, ``restrict``; k products
    ``norm_bound``, ``reach``            ``apply`` to magnitudes; the generators must have no negative entry
    ``stretch``                          ``reach`` and ``length``, whichever is less; often far above the norm
    ``squared``, ``times_square``        the element itself; two calls of ``apply``
    ===================================  ========================================================================
    """

    k: int
    """The matrices are k x k."""
    dim: int
    """Degrees of freedom of the submanifold ``{A A^T}``."""
    trivial_transport: bool = False
    """Whether parallel transport is the identity on the coordinates (symmetric or abelian structures)."""
    is_algebra: bool = True
    """Whether the structure is a linear space of matrices, so that ``N^2`` and polynomials in it are ``mul`` too."""
    has_matrix_exp: bool = True
    """Whether ``exp`` is the matrix exponential; otherwise it agrees with it to first order."""

    # ------------------------------------------------------------------ the core
    @abstractmethod
    def mul(self, a: Element, b: Element) -> Element:
        """Return ``A B``, a fresh result."""

    @abstractmethod
    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        """Return ``A x`` (or ``A^T x``) for each row ``x`` of ``(*batch, n, k)``."""

    @abstractmethod
    def ldiv(self, a: Element, b: Element) -> Element:
        """Return ``A^-1 B``."""

    # ------------------------------------------------------------------ elements
    def identity_like(self, a: Element) -> Element:
        """Return the neutral element, once for each element of a batch."""
        return self.identity(self.batch_shape(a), dtype=a[0].dtype, device=a[0].device)

    def identity(
        self,
        batch_shape: Sequence[int] = (),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Element:
        """Return the neutral element."""
        return self.from_diagonal(torch.ones(*batch_shape, self.k, dtype=dtype, device=device))

    def from_diagonal(self, diagonal: Tensor) -> Element:
        """Return the element nearest to ``Diag(diagonal)``, which is that matrix itself if the structure holds it."""
        return self.from_dense(torch.diag_embed(diagonal))

    def from_dense(self, matrix: Tensor) -> Element:
        """Return the projection of a k x k matrix onto the structure."""
        inner = self.restrict(derived.eye_like(self, matrix), matrix)
        squares = derived.generator_squares(self, matrix.dtype, matrix.device)
        return tuple(x / square for x, square in zip(inner, squares, strict=True))

    def to_dense(self, a: Element) -> Tensor:
        """Return the k x k matrix. It is meant for people and tests."""
        return self.apply(a, derived.eye_like(self, a[0]).expand(*self.batch_shape(a), -1, -1)).mT

    def factor(self, tau: Tensor) -> Element:
        """Return the group's Cholesky factor: ``A A^T = tau`` on the submanifold, and near tau elsewhere."""
        return derived.nearest_factor(self, tau)

    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        """Return ``A^-1 x`` (or ``A^-T x``) for each row ``x`` of ``(*batch, n, k)``."""
        return self.apply(self.ldiv(a, self.identity_like(a)), rows, transpose)

    def logabsdet(self, a: Element) -> Tensor:
        """Return ``log |det A|``, of the batch shape."""
        return torch.linalg.slogdet(widen(self.to_dense(a))).logabsdet.to(a[0].dtype)

    # ------------------------------------------------------------------ covectors and coordinates
    def restrict(self, x: Tensor, y: Tensor) -> Element:
        """Return ``<E_j, X^T Y>`` for every generator, from rows ``X`` and ``Y``, without forming ``X^T Y``."""
        return derived.adjoint_of_apply(self, x, y)

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        """Return ``<E_j, A^T G>``, the gradient in ``N`` of ``f(A Exp(N))`` at 0 from ``G = df/dA``; a fresh result.

        Only the entries of ``G`` inside the structure matter, because the structure is closed under
        multiplication. With ``left`` it is ``<E_j, G A^T>``, for ``f(Exp(N) A)``.
        """
        return derived.adjoint_of_mul(self, a, grad, left)

    def dual(self, n: Element) -> Element:
        """Return the covector ``E_j -> <N, E_j>_F``.

        It is ``N`` itself where a block's entries are matrix entries.
        """
        return self.restrict(derived.eye_like(self, n[0]), self.to_dense(n))

    def scale(self, eta: Element) -> Element:
        """Return ``D . eta``, which turns orthonormal coordinates into an algebra element; a fresh result."""
        scales = derived.generator_scales(self, eta[0].dtype, eta[0].device)
        return tuple(x * d for x, d in zip(eta, scales, strict=True))

    def unscale(self, n: Element) -> Element:
        """Return the coordinates of an algebra element, ``N / D``."""
        return self.scale(derived.symmetric_gram(self, n))  # <D_j (E_j + E_j^T), N + N^T>

    @property
    def coordinate_sets(self) -> tuple[tuple[int, ...], ...]:
        """Which blocks are orthonormal together: all of them, unless a group is normalized factor by factor."""
        return (tuple(range(len(self.shapes))),)

    # ------------------------------------------------------------------ transposes
    @property
    def transposed(self) -> Group:
        """The group of the transposed matrices: itself, where the structure is symmetric."""
        return self

    def transpose(self, a: Element) -> Element:
        """Return ``A^T`` as an element of :attr:`transposed`; coordinates and covectors are transposed alike."""
        return self.transposed.from_dense(self.to_dense(a).mT)

    # ------------------------------------------------------------------ derived operations
    def matvec(self, a: Element, x: Tensor) -> Tensor:
        """Return ``A x`` for vectors ``(*sample, *batch, k)``."""
        return derived.by_rows(self, a, x, lambda rows: self.apply(a, rows))

    def rmatvec(self, a: Element, x: Tensor) -> Tensor:
        """Return ``A^T x`` for vectors ``(*sample, *batch, k)``."""
        return derived.by_rows(self, a, x, lambda rows: self.apply(a, rows, transpose=True))

    def solve(self, a: Element, x: Tensor) -> Tensor:
        """Return ``A^-1 x`` for vectors ``(*sample, *batch, k)``."""
        return derived.by_rows(self, a, x, lambda rows: self.apply_inverse(a, rows))

    def rsolve(self, a: Element, x: Tensor) -> Tensor:
        """Return ``A^-T x`` for vectors ``(*sample, *batch, k)``."""
        return derived.by_rows(self, a, x, lambda rows: self.apply_inverse(a, rows, transpose=True))

    def apply_squared(self, a: Element, rows: Tensor, overwrite: bool = False) -> Tensor:
        """Return ``A A^T x`` for each row ``x`` of ``(*batch, n, k)``.

        With ``overwrite`` the result may be in the rows' memory.
        """
        if is_differentiated(rows, *a):
            return self.apply(a, self.apply(a, rows, transpose=True))  # nothing in place that a derivative needs
        return self.times_square(self.squared(a), rows, overwrite)

    def squared(self, a: Element) -> Element:
        """Return ``A A^T`` in the form that :meth:`times_square` takes.

        It has the batch dimensions of A, and is worth keeping.
        """
        return a

    def times_square(
        self, square: Element, rows: Tensor, overwrite: bool = False, scratch: Tensor | None = None
    ) -> Tensor:
        """Return :meth:`apply_squared` from the result of :meth:`squared`, without derivatives.

        With ``scratch``, memory as large as the rows' and laid out as they are, the result may be in that.
        """
        return self.apply(square, self.apply(square, rows, transpose=True))

    def gram(self, a: Element, x: Tensor) -> Element:
        """Return ``<E_j, A^T X^T X A>`` from rows ``X`` of shape ``(*batch, n, k)``, without a k x k matrix."""
        xa = self.apply(a, x, transpose=True)
        return self.restrict(xa, xa)

    @property
    def products(self) -> int:
        """How many products with an operator :meth:`congruence` takes, beside diagonals."""
        return self.k

    def congruence(self, a: Element, h: SymmetricOperator) -> Element:
        """Return ``<E_j, A^T H A>`` for one element (no batch), from as few products with ``H`` as the structure needs.

        Without a better way it takes one product for each of the k columns of ``A``.
        """
        columns = self.to_dense(a)
        return self.restrict(columns, h.apply(columns.mT).mT)

    def bracket(self, n: Element, m: Element) -> Element:
        """Return ``[N, M] = N M - M N`` of two algebra elements."""
        return accumulate(self.mul(n, m), self.mul(m, n), -1)

    def trace(self, covector: Element) -> Tensor:
        """Return ``tr(M)`` from ``<E_j, M>``, of the batch shape."""
        return (self.flatten(self.identity_like(covector)) * self.flatten(covector)).sum(-1)

    def metric_dual(self, covector: Element) -> Element:
        """Return ``2 D . D . <E_j, M>`` for a symmetric M: the algebra element along which ``<N, M>`` grows fastest.

        It may be in the memory of the covector.
        """
        return times(2, self.scale(self.scale(covector)))

    def squared_norm(self, a: Element) -> Tensor:
        """Return ``||A||_F^2``, of the batch shape."""
        return (self.flatten(a) * self.flatten(self.dual(a))).sum(-1)

    def square_diagonal(self, a: Element) -> Tensor:
        """Return the diagonal of ``A A^T``, of shape ``(*batch, k)``."""
        return self.to_dense(a).square().sum(-1)

    def length(self, eta: Element) -> Tensor:
        """Return ``||eta||``, the geodesic length of a tangent vector, of the batch shape and in float64."""
        return torch.linalg.vector_norm(self.flatten(eta), dim=-1, dtype=torch.float64)

    def norm_bound(self, n: Element) -> Tensor:
        """Return ``sqrt(||N||_1 ||N||_inf)``, which is at least the spectral norm.

        It does not grow with k as ``||N||_F`` does.
        """
        magnitudes = tuple(block.detach().abs() for block in n)
        ones = n[0].new_ones(*self.batch_shape(n), 1, self.k)
        sums = [self.apply(magnitudes, ones, transpose).squeeze(-2) for transpose in (False, True)]
        return (sums[0].amax(-1) * sums[1].amax(-1)).sqrt()

    def norm_estimate(self, n: Element) -> Tensor:
        """Return an estimate of the spectral norm, from half of it to three times it, of the batch shape.

        Here it is from below, by four steps of the power method on ``N^T N``.
        """
        batch = self.batch_shape(n)
        start = probe(self.k, n[0].dtype, n[0].device).expand(*batch, 1, self.k)
        norms = spectral_norm_by_powers(lambda x: self.apply(n, x), lambda x: self.apply(n, x, transpose=True), start)
        return norms.reshape(batch).to(n[0].dtype)

    def reach(self, eta: Element) -> Tensor:
        """Return a bound on ``||2 D.eta||_2``: a step changes no direction of tau by more than e to this power."""
        return 2 * self.norm_bound(self.scale(eta))

    def stretch(self, eta: Element) -> Tensor:
        """Return a bound on ``||D.eta + (D.eta)^T||_2``.

        A step changes no direction of tau by more than e to this power. It is the step's length in Thompson's metric.
        The geodesic length, the Frobenius norm of the same matrix, is at least as large, and grows with the number of
        coordinates.
        """
        reach = self.reach(eta)
        return torch.minimum(reach, self.length(eta).to(reach.dtype))

    def quick_stretch(self, eta: Element) -> Tensor | None:
        """Return a quick estimate of ``stretch(eta)``, about as large or larger.

        It is None where the stretch itself is quick to compute. For large matrices the bound is one of probability: an
        unlucky step in a hundred exceeds it a little.
        """
        return None

    def exp(self, n: Element, order: int | None = None) -> Element:
        """Return ``Exp(N)``, or its truncation after the linear (1) or quadratic (2) term.

        The quadratic one, ``(I + (I + N)^2) / 2``, is never singular for symmetric or triangular ``N``.
        """
        check_order(order)
        if order is None:
            return self._exact_exp(n)
        linear = add(self.identity_like(n), n)
        return linear if order == 1 else add(linear, self.mul(n, n), 0.5)

    def _exact_exp(self, n: Element) -> Element:
        return derived.taylor_exponential(self, n)

    def move(self, a: Element, n: Element, order: int | None = None, left: bool = False) -> Element:
        """Return ``A Exp(N)``, or ``Exp(N) A`` with ``left``, at a given order of the exponential.

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
        """Return ``A Exp(+-D.eta)``, or ``Exp(+-D.eta) A`` with ``left``: the point at coordinates eta."""
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
