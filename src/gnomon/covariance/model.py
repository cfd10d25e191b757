"""Families of Gaussians, and their likeliest member for given second moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..groups import Element, Group, LowRank
from ..groups.likelihood import Form, likeliest
from ..groups.moments import Moments, RowMoments
from ..linalg import widen
from ..manifolds import SPD, Gaussian
from ..optim import LBFGS
from .sample import LARGEST_DENSE

ITERATIONS = 500
ENOUGH = 1e-9
"""A fit has converged after :data:`IDLE` iterations that gain less than this, in nats."""
IDLE = 3
MEMORY = 20
"""The pairs that L-BFGS remembers."""
SHORT_MEMORY = 8
"""The same for many features."""


class Model(Protocol):
    """A family of Gaussians with a free mean."""

    @property
    def name(self) -> str: ...

    def fit(self, moments: Moments, mean: Tensor, near: Gaussian | None = None) -> Gaussian:
        """Return the likeliest member for data with these second moments around their mean.

        A search may begin at a member that is likely to be near.

        Raises:
            SingularMomentsError: where the likelihood has no maximum.
        """


@dataclass(frozen=True)
class StructureModel:
    """Gaussians whose covariance or precision has its factor in a group."""

    group: Group
    form: Form
    name: str

    def fit(self, moments: Moments, mean: Tensor, near: Gaussian | None = None) -> Gaussian:
        # A low rank of many features goes to the solver too: the closed form of factor analysis has a k x k matrix.
        if isinstance(self.group, LowRank) and isinstance(moments, RowMoments):
            element = minimize(self.group, moments, self.form)
        elif isinstance(self.group, LowRank) and near is not None:
            search = self.group.factor if self.form == "covariance" else self.group.inverse_factor
            element = search(moments.dense(), near._parts()[1][1].detach())
        else:
            element = likeliest(self.group, moments, self.form, minimize)
        return gaussian(self.group, self.form, element, mean)


@torch.no_grad()
def gaussian(group: Group, form: Form, element: Element, mean: Tensor) -> Gaussian:
    """Return the Gaussian with this factor and mean."""
    result = Gaussian(group, form=form, loc=mean, init=1.0, dtype=mean.dtype)
    result.frame.copy_(result.group.pack(result.affine.join(element, mean)))
    return result


@torch.enable_grad()
def minimize(group: Group, moments: Moments, form: Form) -> Element:
    """Return the factor that minimizes ``1/2 (log det Sigma + tr(Sigma^-1 S))``.

    L-BFGS searches for it in moving normal coordinates.
    """
    rows, added = _rows(group, moments)
    point = SPD(group, factor="outer" if form == "covariance" else "inverse", init=moments.diagonal(), project=True)
    if isinstance(group, LowRank) and form == "covariance":
        _start_at_components(point, group, rows, moments.diagonal())
    optimizer = LBFGS(point.parameters(), history_size=MEMORY if group.k <= LARGEST_DENSE else SHORT_MEMORY)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (point.inv_quad(rows).sum() + point.logdet())
        if added is not None:
            loss = loss + 0.5 * (added * _diagonal_of_inverse(point)).sum()
        loss.backward()
        return loss

    last, idle = optimizer.evaluate(closure), 0
    for _ in range(ITERATIONS):
        loss = float(optimizer.step(closure))
        idle = idle + 1 if last - loss < ENOUGH * max(1.0, group.k / 100) else 0
        last = loss
        if idle == IDLE:
            break
    return group.unpack(point.frame)


def _rows(group: Group, moments: Moments) -> tuple[Tensor, Tensor | None]:
    """Return rows R with ``R^T R = S`` and None, or rows R and a diagonal d with ``S = R^T R + Diag(d)``."""
    if group.k > LARGEST_DENSE and isinstance(moments, RowMoments):
        if not isinstance(group, LowRank) and bool((moments.added > 0).any()):
            raise ValueError(
                f"shrinkage must be 0 for {group} of more than {LARGEST_DENSE} features: the diagonal of its inverse "
                "is not at hand"
            )
        return moments.rows, moments.added
    values, vectors = torch.linalg.eigh(moments.dense())
    return (values.clamp(min=0).sqrt() * vectors).mT, None


def _diagonal_of_inverse(point: SPD) -> Tensor:
    """Return the diagonal of ``Sigma^-1`` for a low-rank structure."""
    assert isinstance(point.group, LowRank)
    element = point.element()
    if point.chart.form == "outer":
        return point.group.inverse_diagonal(element)
    _, noise, loadings = element
    return noise.square() * (1 + loadings.square().sum(-2))


@torch.no_grad()
def _start_at_components(point: SPD, group: LowRank, rows: Tensor, variances: Tensor) -> None:
    """Set the loadings to the principal components of the correlations, found from the products of the rows."""
    scale = variances.rsqrt()
    z = rows * scale
    values, vectors = torch.linalg.eigh(widen(z @ z.mT))
    values, vectors = values[-group.rank :].flip(0), vectors[:, -group.rank :].flip(1)
    if len(values) < group.rank:
        return
    components = (vectors.mT @ z) / values.clamp(min=1e-12).sqrt().unsqueeze(-1)  # of length one
    rest = (len(variances) - values.sum()).clamp(min=0) / max(len(variances) - group.rank, 1)
    loadings = ((values - rest).clamp(min=1e-3).sqrt().unsqueeze(-1) * components).mT
    noise = (1 - loadings.square().sum(-1)).clamp(min=0.05)
    element = group.element(loadings / scale.unsqueeze(-1), noise.sqrt() / scale)
    point.frame.copy_(group.pack(element))
