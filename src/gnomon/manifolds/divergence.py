"""The Kullback-Leibler divergence of two Gaussians at the cost of their structures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal

from ..groups import Dense, Diagonal, Element, Group, LowRank, SymmetricOperator, Triangular

if TYPE_CHECKING:
    from .gaussian import Gaussian


class Square(NamedTuple):
    """``S = A A^T``, or with ``inverse`` its inverse ``A^-T A^-1``, for an element A of a group."""

    group: Group
    element: Element
    inverse: bool

    @property
    def inverted(self) -> Square:
        return self._replace(inverse=not self.inverse)

    @property
    def products(self) -> int:
        """How many products with H :meth:`trace_with` takes."""
        return self.group.rank if isinstance(self.group, LowRank) else self.group.products

    def _root(self) -> tuple[Group, Element]:
        """R in its group, for ``S = R R^T``."""
        group, a = self.group, self.element
        if not self.inverse:
            return group, a
        return group.transposed, group.transpose(group.ldiv(a, group.identity_like(a)))

    def trace_with(self, other: Square) -> Tensor:
        """``tr(S H)`` for another such matrix H: ``R^T H R`` from as few products with H as the structure of R asks."""
        h = other.operator()
        if isinstance(self.group, LowRank):
            trace = self.group.inverse_trace_with if self.inverse else self.group.trace_with
            return trace(self.element, h)
        group, root = self._root()
        return group.trace(group.congruence(root, h))

    def operator(self) -> SymmetricOperator:
        """S by its products and its diagonal."""
        diagonal = self._diagonal()
        return SymmetricOperator(self.group.k, self._product, lambda part: diagonal[..., part.where])

    def _product(self, rows: Tensor) -> Tensor:
        act = self.group.apply_inverse if self.inverse else self.group.apply
        return act(self.element, act(self.element, rows, not self.inverse), self.inverse)

    def _diagonal(self) -> Tensor:
        if self.inverse and isinstance(self.group, LowRank):
            return self.group.inverse_diagonal(self.element)
        group, root = self._root()
        return group.square_diagonal(root)

    def logdet(self) -> Tensor:
        return (-2 if self.inverse else 2) * self.group.logabsdet(self.element)

    def quadratic_form(self, x: Tensor) -> Tensor:
        """``x^T S x``."""
        half = self.group.solve if self.inverse else self.group.rmatvec
        return half(self.element, x).square().sum(-1)


class Normals(NamedTuple):
    """A mean, a covariance by its factor, and the covariance's log-determinant."""

    mean: Tensor
    covariance: Square
    logdet: Tensor


def trace_of_ratio(p: Square, q: Square) -> Tensor:
    """``tr(S_q^-1 S_p)``.

    Where both factors are in one group it is ``||A_q^-1 A_p||_F^2``, or ``||A_p^-1 A_q||_F^2`` if they are those of the
    precisions. Otherwise one matrix is known by its products and its diagonal, and the other by its factor: the one
    whose structure needs fewer products.
    """
    if p.group == q.group and p.inverse == q.inverse and not isinstance(p.group, LowRank):
        first, second = (p, q) if p.inverse else (q, p)
        return p.group.squared_norm(p.group.ldiv(first.element, second.element))
    precision = q.inverted
    if p.products <= precision.products:
        return p.trace_with(precision)
    return precision.trace_with(p)


def _of_distribution(other: Distribution) -> Normals | None:
    if isinstance(other, Independent) and other.reinterpreted_batch_ndims == 1:
        other = other.base_dist
    if isinstance(other, Normal) and other.batch_shape:
        covariance = Square(Diagonal(other.batch_shape[-1]), (other.scale,), False)
    elif isinstance(other, MultivariateNormal):
        group = Triangular(other.event_shape[0])
        covariance = Square(group, group.from_dense(other.scale_tril), False)
    elif isinstance(other, LowRankMultivariateNormal):
        k, rank = other.event_shape[0], other.cov_factor.shape[-1]
        if rank < k:
            low = LowRank(k, rank)
            covariance = Square(low, low.element(other.cov_factor, other.cov_diag.sqrt()), False)
        else:
            covariance = Square(Dense(k), (other.scale_tril,), False)
    else:
        return None
    return Normals(other.mean, covariance, covariance.logdet())


def as_normals(name: str, value: Gaussian | Distribution) -> Normals:
    """A Gaussian of ours or of torch's, in one form."""
    found = value.normals() if hasattr(value, "normals") else _of_distribution(value)
    if found is None:
        raise TypeError(
            f"{name} must be a gnomon.Gaussian or one of torch's Normal (with a vector of means), Independent Normal, "
            f"MultivariateNormal and LowRankMultivariateNormal, got {type(value).__name__}"
        )
    return found


def kl_divergence(p: Gaussian | Distribution, q: Gaussian | Distribution) -> Tensor:
    """``KL(p || q)`` of two Gaussians, of ours or of torch's, at the cost of their structures.

    ``1/2 ( tr(S_q^-1 S_p) + |m_p - m_q|^2_q - d + log det S_q - log det S_p )`` with the Mahalanobis distance of q. The
    trace costs some products with one matrix, as many as the other's structure needs: r for ``Arrow`` and ``LowRank``,
    head + tail for ``Heisenberg``, none for ``Diagonal``; between two of the others (``Dense``, ``BlockDiagonal``,
    ``Toeplitz``, ``Triangular``) it is d, unless they are the same.
    """
    first, second = as_normals("p", p), as_normals("q", q)
    d, other = first.covariance.group.k, second.covariance.group.k
    if d != other:
        raise ValueError(f"p has dimension {d} and q has dimension {other}; they must be the same")
    trace = trace_of_ratio(first.covariance, second.covariance)
    distance = second.covariance.inverted.quadratic_form(first.mean - second.mean)
    return 0.5 * (trace + distance - d + second.logdet - first.logdet)
