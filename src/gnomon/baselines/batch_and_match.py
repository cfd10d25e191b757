"""Batch and match (Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei and Saul, 2024): variational inference by scores.

fit = gnomon.baselines.BatchAndMatch(log_density, dim=10, batch=32, generator=generator)
for _ in range(100):
    fit.step()
fit.loc, fit.covariance
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class BatchAndMatch:
    """Fits a full Gaussian so that its score is that of a target on a batch of draws.

    A step draws z from the current Gaussian and takes the scores g of the target there. It minimizes the mean over the
    batch of ``|g - score of q(z)|^2`` in the norm of q's covariance, and ``2 / lambda`` times the divergence from the
    current Gaussian to q. With means and covariances of the batch, ``z_bar``, ``C``, ``g_bar``, ``G``, the result is:

        U = lambda G + lambda / (1 + lambda) g_bar g_bar^T
        V = Sigma + lambda C + lambda / (1 + lambda) (mu - z_bar) (mu - z_bar)^T
        Sigma <- the positive definite solution S of S U S + S = V
        mu <- (mu + lambda (Sigma g_bar + z_bar)) / (1 + lambda)

    The rate is the paper's for targets that are not Gaussian, ``lambda = batch dim / (t + 1)`` in step t from 0. With
    ``decay=False`` it is ``batch dim``, the paper's for Gaussian targets.

    ``log_density`` maps ``(draws, dim)`` to ``(draws,)``. A step whose scores are not finite changes nothing and
    counts in ``skipped``. ``evaluations`` counts the gradients, one for each draw.
    """

    def __init__(
        self,
        log_density: Callable[[Tensor], Tensor],
        dim: int,
        *,
        batch: int = 32,
        decay: bool = True,
        loc: Tensor | None = None,
        covariance: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if batch < 2:
            raise ValueError(f"batch must be at least 2, got {batch}: one draw has no covariance")
        self.log_density = log_density
        self.dim, self.batch, self.decay, self.generator = dim, batch, decay, generator
        self.loc = torch.zeros(dim, dtype=torch.float64) if loc is None else loc.clone()
        self.covariance = torch.eye(dim, dtype=torch.float64) if covariance is None else covariance.clone()
        self.steps, self.skipped, self.evaluations = 0, 0, 0

    def draws(self, count: int) -> Tensor:
        """Return independent draws of the current Gaussian."""
        noise = torch.randn(count, self.dim, dtype=self.loc.dtype, generator=self.generator)
        return self.loc + noise @ torch.linalg.cholesky(self.covariance).mT

    def step(self) -> None:
        """Draw a batch and match its scores."""
        z = self.draws(self.batch).requires_grad_()
        (g,) = torch.autograd.grad(self.log_density(z).sum(), z)
        rate = self.batch * self.dim / (self.steps + 1 if self.decay else 1)
        self.steps += 1
        self.evaluations += self.batch
        if not bool(g.isfinite().all()):
            self.skipped += 1
            return
        z = z.detach()
        z_mean, C = _moments(z)
        g_mean, G = _moments(g)
        share = rate / (1 + rate)
        U = rate * G + share * torch.outer(g_mean, g_mean)
        V = self.covariance + rate * C + share * torch.outer(self.loc - z_mean, self.loc - z_mean)
        self.covariance = solve_quadratic(U, V)
        self.loc = (1 - share) * self.loc + share * (self.covariance @ g_mean + z_mean)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(0)
    return mean, (x - mean).mT @ (x - mean) / len(x)


def solve_quadratic(U: Tensor, V: Tensor) -> Tensor:
    """Return the positive definite S with ``S U S + S = V``, for a positive definite V and a positive semidefinite U.

    ``S = 2 L (I + (I + 4 L^T U L)^(1/2))^-1 L^T`` with ``V = L L^T``.
    """
    L = torch.linalg.cholesky(V)
    values, vectors = torch.linalg.eigh(L.mT @ U @ L)
    root = L @ (vectors * (2 / (1 + torch.sqrt(1 + 4 * values.clamp(min=0)))).sqrt())
    return root @ root.mT
