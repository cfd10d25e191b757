"""Gaussians as distributions: what marginals and conditionals of structured Gaussians are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    constraints,
    register_kl,
)

from ..groups import Group, Square
from ..linalg import as_tensor
from .divergence import Normals, kl_divergence

LOG_2PI = math.log(2 * math.pi)

Indices = int | slice | Sequence[int] | Sequence[bool] | Tensor


class StructuredNormal(Distribution):
    """N(mu, Sigma) with a factor of Sigma, or of its inverse, in a group: a :class:`torch.distributions.Distribution`.

    :meth:`gnomon.Gaussian.marginal` and :meth:`gnomon.Gaussian.conditional` give such distributions. Draws, densities
    and divergences cost what the structure costs; ``covariance_matrix`` and ``precision_matrix`` are dense. Gradients
    flow to the Gaussian that it was made from. Marginals and conditionals are computed in float64 and rounded once.

    Args:
        loc: the mean, ``(*batch_shape, d)``.
        covariance: Sigma; its batch shape broadcasts with that of the mean.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # as in torch.distributions
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, loc: Tensor, covariance: Square, validate_args: bool | None = None) -> None:
        batch = torch.broadcast_shapes(loc.shape[:-1], covariance.batch_shape)
        self.loc = loc.expand(*batch, -1)
        self.covariance = covariance
        super().__init__(batch, loc.shape[-1:], validate_args=validate_args)

    def __repr__(self) -> str:
        form = "precision" if self.covariance.inverse else "covariance"
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"{type(self).__name__}({self.structure!r}, form={form!r}{batch})"

    @property
    def structure(self) -> Group:
        """The group of the factor."""
        return self.covariance.group

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> StructuredNormal:
        loc = self.loc.expand(*batch_shape, *self.event_shape)
        return StructuredNormal(loc, self.covariance, validate_args=self._validate_args)

    # ------------------------------------------------------------------ moments
    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.covariance.diagonal().expand_as(self.loc)

    @property
    def covariance_matrix(self) -> Tensor:
        """Sigma, dense."""
        return self.covariance.to_dense().expand(*self.batch_shape, -1, -1)

    @property
    def precision_matrix(self) -> Tensor:
        """``Sigma^-1``, dense."""
        return self.covariance.inverted.to_dense().expand(*self.batch_shape, -1, -1)

    # ------------------------------------------------------------------ densities and draws
    def log_prob(self, value: Tensor) -> Tensor:
        value = as_tensor("value", value, self.loc)
        if self._validate_args:
            self._validate_sample(value)
        distance = self.covariance.inverted.quadratic_form(value - self.loc)
        return -0.5 * (distance + self.covariance.logdet() + self.event_shape[0] * LOG_2PI)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.loc + self.covariance.color(torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def entropy(self) -> Tensor:
        entropy = 0.5 * (self.event_shape[0] * (1 + LOG_2PI) + self.covariance.logdet())
        return entropy.expand(self.batch_shape)

    def normals(self) -> Normals:
        """Return the distribution in the form that :func:`gnomon.kl_divergence` takes."""
        return Normals(self.loc, self.covariance, self.covariance.logdet())

    # ------------------------------------------------------------------ some of the coordinates
    def marginal(self, indices: Indices) -> StructuredNormal:
        """Return the distribution of some coordinates; see :meth:`gnomon.Gaussian.marginal`."""
        where = self._positions(indices)
        part = self.covariance.to(torch.float64).part(where)
        return StructuredNormal(self.loc[..., where], part.to(self.loc.dtype))

    def conditional(self, indices: Indices, values: Tensor) -> StructuredNormal:
        """Return the distribution of the other coordinates; see :meth:`gnomon.Gaussian.conditional`."""
        given = self._positions(indices)
        others = torch.ones(self.event_shape[0], dtype=torch.bool, device=given.device).index_fill(0, given, False)
        rest = others.nonzero().squeeze(-1)
        if not len(rest):
            raise ValueError(f"indices name all {len(given)} coordinates, so that there are none left to describe")
        loc, precision = self.loc.double(), self.covariance.inverted.to(torch.float64)
        shift = _values(values, len(given), loc) - loc[..., given]
        part = precision.part(rest)
        whole = shift.new_zeros(*shift.shape[:-1], len(others)).index_copy(-1, given, shift)
        pull = part.inverted.matvec(precision.matvec(whole)[..., rest])  # P_rr^-1 P_rg (values - mu_g)
        return StructuredNormal((loc[..., rest] - pull).to(self.loc.dtype), part.inverted.to(self.loc.dtype))

    def _positions(self, indices: Indices) -> Tensor:
        return as_positions(indices, self.event_shape[0], self.loc.device)


def _values(given: object, count: int, like: Tensor) -> Tensor:
    """Return the values of some coordinates, with the type and device of ``like``."""
    values = as_tensor("values", given, like).to(like)
    if values.ndim == 0 or values.shape[-1] != count:
        raise ValueError(
            f"values has shape {tuple(values.shape)}, but indices name {count} coordinates; give (*batch, {count})"
        )
    finite = values.isfinite()
    if not bool(finite.all()):
        raise ValueError(f"values holds {values[~finite].flatten()[0].item()}; name only coordinates that are known")
    return values


def as_positions(indices: Indices, d: int, device: torch.device) -> Tensor:
    """Return different positions from 0 to d - 1 in the order given, from a number, numbers, a slice or a mask."""
    if isinstance(indices, slice):
        where = torch.tensor(range(d)[indices])
    else:
        where = as_tensor("indices", indices).detach().to("cpu")
        if (
            getattr(getattr(indices, "dtype", None), "kind", "") == "u"
        ):  # NumPy's unsigned integers, of which torch has few
            where = where.long()
    if where.dtype == torch.bool:
        if where.shape != (d,):
            raise ValueError(f"indices is a mask of shape {tuple(where.shape)}; a mask must have {d} entries")
        where = where.nonzero().squeeze(-1)
    elif where.numel() and (where.is_floating_point() or where.is_complex()):
        raise TypeError(f"indices must be integers, a mask or a slice, got numbers of type {where.dtype}")
    if where.ndim > 1:
        raise ValueError(f"indices has shape {tuple(where.shape)}; give one list of coordinates")
    where = where.reshape(-1).long()
    if not len(where):
        raise ValueError("indices names no coordinate; give at least one")
    outside = where[(where < -d) | (where >= d)]
    if len(outside):
        raise ValueError(f"indices holds {int(outside[0])}, but there are {d} coordinates: 0 to {d - 1}, or -{d} to -1")
    where = where % d
    values, counts = where.unique(return_counts=True)
    if len(values) < len(where):
        raise ValueError(f"indices names coordinate {int(values[counts > 1][0])} more than once; give it once")
    return where.to(device)


for _other in (Independent, MultivariateNormal, LowRankMultivariateNormal):
    register_kl(StructuredNormal, _other)(kl_divergence)
    register_kl(_other, StructuredNormal)(kl_divergence)
register_kl(StructuredNormal, StructuredNormal)(kl_divergence)
