"""The likelihood of a mixture, its gradient, and the statistics of EM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..groups import Dense, Element, LowRank, Square, Triangular
from ..manifolds import Gaussian

CHUNK = 2**20
"""Numbers in the largest temporary of a pass over the data, ``rows x components x features``: 8 MiB."""
DENSE_FEATURES = 100
"""Up to so many features a density is one product with the dense inverse of the factor, whatever the structure."""
LARGEST_STATISTICS = 2**24
"""Numbers in the second moments of all components at most; of larger ones the gradient is taken from the data."""


class Statistics(NamedTuple):
    """What one pass over the data tells: the loss, and weighted moments of the samples of each component."""

    loss: float
    shares: Tensor
    """The responsibilities, averaged: ``(K,)``."""
    means: Tensor
    """``(K, d)``"""
    covariances: Tensor
    """Around these means, with the floor on the diagonal: ``(K, d, d)``."""


class Objective:
    """``-sum_i w_i log sum_k p_k exp( log N(x_i; mu_k, Sigma_k) - floor/2 tr Sigma_k^-1 )``, in the units of the data.

    Args:
        z: standardized rows.
        weights: of the rows, with the sum one.
        components: the Gaussians in these units.
        logits: of the probabilities ``p_k``.
        floor: the variance that is added to every feature.
        log_volume: from these units to those of the data.
        tied: the components have one factor in common. Gradients are then projected to moves that all of them make
            together, so that steps keep it so.
    """

    def __init__(
        self,
        z: Tensor,
        weights: Tensor,
        components: Gaussian,
        logits: nn.Parameter,
        floor: float,
        log_volume: float,
        tied: bool = False,
    ) -> None:
        self.z, self.weights, self.components, self.logits, self.floor = z, weights, components, logits, floor
        self._log_volume, self.tied = log_volume, tied
        self._augmented = torch.cat([z, torch.ones_like(z[:, :1])], 1)  # (z, 1): one product makes all moments

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.components.eta, self.logits]  # type: ignore[list-item]

    @property
    def has_statistics(self) -> bool:
        """Whether the second moments of all components are small enough to be kept."""
        return len(self.logits) * self.components.d**2 <= LARGEST_STATISTICS

    # ------------------------------------------------------------------ from weighted moments
    @torch.no_grad()
    def statistics(self) -> Statistics:
        """Return the loss, and the moments of the samples of each component (the E-step of EM)."""
        augmented, density, loss = self._augmented, self._joint(), self._log_volume
        k, width = len(self.logits), augmented.shape[1]
        sums = augmented.new_zeros(width, k * width)
        size = max(1, CHUNK // (width * k))
        for rows, weights in zip(augmented.split(size), self.weights.split(size), strict=True):
            joint = density(rows)
            each = joint.logsumexp(1, keepdim=True)
            loss -= float(weights @ each.squeeze(1))
            parts = (joint - each).exp_().mul_(weights.unsqueeze(1))
            sums.addmm_(rows.T, (parts.unsqueeze(2) * rows.unsqueeze(1)).flatten(1))
        moments = sums.view(width, k, width).transpose(0, 1)
        shares = moments[:, -1, -1].clone()
        moments = moments / shares.clamp(min=1e-300)[:, None, None]
        means = moments[:, -1, :-1]
        covariances = moments[:, :-1, :-1] - means.unsqueeze(-1) * means.unsqueeze(-2)
        covariances.diagonal(dim1=-2, dim2=-1).clamp_(min=0).add_(self.floor)
        return Statistics(loss, shares, means, covariances)

    def gradient_from(self, statistics: Statistics) -> None:
        """Set the gradients to those of the expected likelihood of the completed data, by Fisher's identity."""
        for parameter in self.parameters:
            parameter.grad = None
        _, shares, means, covariances = statistics
        group, factor, _ = self.components._parts()
        roots = torch.linalg.cholesky_ex(covariances).L.mT
        with torch.enable_grad():
            if self.components.form == "covariance":
                whitened = group.apply_inverse(factor, roots)
            else:
                whitened = group.apply(factor, roots, transpose=True)
            distances = whitened.square().sum((-2, -1)) + self.components._standardize(means).square().sum(-1)
            energy = 0.5 * (distances + self.components.logdet()) - self.logits.log_softmax(0)
            (shares @ energy).backward()
        self._tie()

    def _tie(self) -> None:
        if self.tied:
            for block in self.of_factors(self.components.eta.grad):
                block.copy_(block.mean(0, keepdim=True).expand_as(block))

    @property
    def carries_ties(self) -> bool:
        """Whether vectors that are carried to a new frame keep a tie: in precision form they mix with the means."""
        return not self.tied or self.components.form == "covariance"

    def of_factors(self, stored: Tensor | None) -> Element:
        """Return the part of stored coordinates that moves the factors, as views; the rest moves the means."""
        assert stored is not None
        affine = self.components.affine
        return affine.unpack(stored)[: len(affine.linear.shapes)]

    def _joint(self) -> Callable[[Tensor], Tensor]:
        """Return a function from rows ``(z, 1)`` to the joint log densities, of shape ``(n, K)``.

        These are ``log p_k + log N(x; mu_k, Sigma_k) - floor/2 tr Sigma_k^-1``.
        """
        components = self.components
        group, factor, vector = components._parts()
        d = components.d
        if d > DENSE_FEATURES and not isinstance(group, (Dense, Triangular)):
            prior = self._prior()
            return lambda rows: components.log_prob(rows[:, :-1].unsqueeze(1)) + prior
        whitening, logdet = _whitening(Square(group, factor, components.form == "precision"))
        shift = vector if components.form == "precision" else -(whitening @ vector.unsqueeze(-1)).squeeze(-1)
        trace = whitening.square().sum((-2, -1))
        constant = self.logits.log_softmax(0) - 0.5 * (logdet + d * math.log(2 * math.pi) + self.floor * trace)
        wide = torch.cat([whitening.reshape(-1, d).T, shift.reshape(1, -1)])

        def density(rows: Tensor) -> Tensor:
            return constant - 0.5 * (rows @ wide).square_().view(len(rows), -1, d).sum(-1)

        return density

    # ------------------------------------------------------------------ from rows
    def gradient(self, rows: Tensor | None = None) -> float:
        """Set the gradients and return the loss, on all data or on some rows (by index)."""
        for parameter in self.parameters:
            parameter.grad = None
        prior = self._prior()
        # A leaf of its own, so that the parts can be differentiated one by one and the prior only once.
        leaf = prior.detach().requires_grad_()
        loss = self._loss(rows, leaf, torch.Tensor.backward)
        prior.backward(leaf.grad)
        self._tie()
        return loss

    @torch.no_grad()
    def value(self) -> float:
        """Return the loss on all data."""
        return self._loss(None, self._prior(), lambda part: None)

    def _loss(self, index: Tensor | None, prior: Tensor, each: Callable[[Tensor], None]) -> float:
        z, weights = (self.z, self.weights) if index is None else (self.z[index], self.weights[index])
        weights = weights / weights.sum()
        total = self._log_volume
        size = max(1, CHUNK // (z.shape[1] * len(prior)))
        for rows, part_weights in zip(z.split(size), weights.split(size), strict=True):
            part = -part_weights @ (self.components.log_prob(rows.unsqueeze(1)) + prior).logsumexp(1)
            each(part)
            total += part.item()
        return total

    def _prior(self) -> Tensor:
        """Return ``log p_k - floor/2 tr Sigma_k^-1``, of shape ``(K,)``."""
        linear, factor, _ = self.components._parts()
        if self.components.form == "precision":
            trace = linear.squared_norm(factor)
        elif isinstance(linear, LowRank):
            trace = linear.inverse_diagonal(factor).sum(-1)
        else:
            trace = linear.squared_norm(linear.ldiv(factor, linear.identity_like(factor)))
        return self.logits.log_softmax(0) - 0.5 * self.floor * trace


def _whitening(covariance: Square) -> tuple[Tensor, Tensor]:
    """Return W with ``W Sigma W^T = I``, and ``log det Sigma``."""
    group, factor = covariance.group, covariance.element
    first = factor[0]
    if isinstance(group, Dense):
        lower = first.mT if covariance.inverse else first
        if not bool(lower.triu(1).any()):  # as EM leaves it: no LU decomposition, which takes as long as small data
            logs = lower.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
            if covariance.inverse:
                return lower, -2 * logs
            return torch.linalg.solve_triangular(lower, torch.eye(group.k, dtype=first.dtype), upper=False), 2 * logs
    eye = torch.eye(group.k, dtype=first.dtype).expand(*covariance.batch_shape, group.k, group.k)
    if covariance.inverse:
        return group.apply(factor, eye, transpose=True).mT, covariance.logdet()
    return group.apply_inverse(factor, eye).mT, covariance.logdet()
