"""The Kullback-Leibler divergence of two Gaussians at the cost of their structures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal

from ..groups import Dense, Diagonal, LowRank, Square, Triangular

if TYPE_CHECKING:
    from .gaussian import Gaussian


class Normals(NamedTuple):
    """A mean, a covariance by its factor, and the covariance's log-determinant."""

    mean: Tensor
    covariance: Square
    logdet: Tensor

    def to(self, dtype: torch.dtype) -> Normals:
        """Return the same Gaussian in another precision."""
        return Normals(self.mean.to(dtype), self.covariance.to(dtype), self.logdet.to(dtype))


def trace_of_ratio(p: Square, q: Square) -> Tensor:
    """Return ``tr(S_q^-1 S_p)``.

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
    """Return a Gaussian of ours or of torch's in one form."""
    found = value.normals() if hasattr(value, "normals") else _of_distribution(value)
    if found is None:
        raise TypeError(
            f"{name} must be a gnomon.Gaussian or one of torch's Normal (with a vector of means), Independent Normal, "
            f"MultivariateNormal and LowRankMultivariateNormal, got {type(value).__name__}"
        )
    return found


def kl_divergence(p: Gaussian | Distribution, q: Gaussian | Distribution) -> Tensor:
    """Return ``KL(p || q)`` of two Gaussians, of ours or of torch's, at the cost of their structures.

    ``1/2 ( tr(S_q^-1 S_p) + |m_p - m_q|^2_q - d + log det S_q - log det S_p )`` with the Mahalanobis distance of q. The
    trace costs some products with one matrix, as many as the other's structure needs: r for ``Arrow`` and ``LowRank``,
    head + tail for ``Heisenberg``, none for ``Diagonal``; between two of the others (``Dense``, ``BlockDiagonal``,
    ``Toeplitz``, ``Triangular``) it is d, unless they are the same. Two precisions meet in the higher one.
    """
    first, second = as_normals("p", p), as_normals("q", q)
    d, other = first.covariance.group.k, second.covariance.group.k
    if d != other:
        raise ValueError(f"p has dimension {d} and q has dimension {other}; they must be the same")
    dtype = torch.promote_types(first.mean.dtype, second.mean.dtype)
    first, second = first.to(dtype), second.to(dtype)
    trace = trace_of_ratio(first.covariance, second.covariance)
    distance = second.covariance.inverted.quadratic_form(first.mean - second.mean)
    return 0.5 * (trace + distance - d + second.logdet - first.logdet)
