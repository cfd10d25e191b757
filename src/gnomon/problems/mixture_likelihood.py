"""Maximum likelihood of Gaussian mixtures through the augmented embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..linalg import as_tensor
from ..manifolds import SPD, Gaussian
from .base import Matrix, Problem, normal, pick
from .random import random_spd

_LOG_2PI = math.log(2 * math.pi)


class Mixture(nn.Module):
    """Components (a batch of Gaussians or of SPD matrices of size d + 1) and their weights, ``softmax(logits)``."""

    def __init__(self, components: nn.Module, logits: Tensor) -> None:
        super().__init__()
        self.components = components
        self.logits = nn.Parameter(logits)

    @property
    def weights(self) -> Tensor:
        return self.logits.softmax(-1)

    def log_densities(self, x: Tensor) -> Tensor:
        """Return the log-density of each row under each component, without the weights."""
        if isinstance(self.components, Gaussian):
            return self.components.log_prob(x.unsqueeze(-2))
        return augmented_log_density(self.components, x)  # type: ignore[arg-type]


def augment(x: Tensor) -> Tensor:
    """Return ``y = (x, 1)``."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def augmented_log_density(components: Matrix, x: Tensor) -> Tensor:
    """Return ``log( sqrt(2 pi) e^(1/2) N(y | 0, S) )`` for ``y = (x, 1)`` and each S of a batch.

    The augmentation is that of Hosseini and Sra (2015). Where ``S = [[Sigma + mu mu^T, mu], [mu^T, 1]]`` it is ``log
    N(x | mu, Sigma)``.
    """
    y = augment(x).unsqueeze(-2)
    return -0.5 * (components.inv_quad(y) - 1 + components.logdet() + x.shape[-1] * _LOG_2PI)


def embed(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return the augmented matrix of a Gaussian (Sec. sngd_special)."""
    mean = mean.unsqueeze(-1)
    top = torch.cat([covariance + mean @ mean.mT, mean], -1)
    return torch.cat([top, torch.cat([mean.mT, torch.ones_like(mean[..., :1, :])], -1)], -2)


class MixtureLikelihood(Problem):
    """``l = -1/N sum_i log sum_j w_j q(x_i | S_j)``: the negative mean log-likelihood of a mixture (Fig. c).

    Two starts for one loss: :meth:`start` puts the components on the Gaussian submanifold, where every iterate is a
    mixture of d-dimensional Gaussians; :meth:`ambient` on the full manifold of (d + 1) x (d + 1) matrices, of which
    only the optimum is (Hosseini and Sra 2015).
    """

    def __init__(self, X: Tensor, components: int, means: Tensor | None = None) -> None:
        if not 1 <= components <= len(X):
            raise ValueError(f"components must be between 1 and the {len(X)} rows of X, got {components!r}")
        self.X, self.components = as_tensor("X", X), components
        self.means = spread(self.X, components) if means is None else as_tensor("means", means, self.X)

    @classmethod
    def random(
        cls,
        d: int,
        components: int = 3,
        *,
        samples: int = 1000,
        condition: float = 10.0,
        separation: float = 1.0,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> MixtureLikelihood:
        """Return a problem with equal shares of Gaussians, and a random start.

        The means are ``separation`` times the typical width apart.
        """
        covariances = torch.stack([random_spd(d, condition, generator=generator) for _ in range(components)])
        width = covariances.diagonal(dim1=-2, dim2=-1).sum(-1).mean().sqrt()
        means = separation * width / (2 * d) ** 0.5 * normal(components, d, generator=generator)
        labels = torch.randint(components, (samples,), generator=generator)
        noise = normal(samples, d, 1, generator=generator)
        X = means[labels] + (torch.linalg.cholesky(covariances)[labels] @ noise).squeeze(-1)
        return cls(X.to(dtype), components, spread(X.to(dtype), components, generator))

    def _covariance(self) -> Tensor:
        return torch.atleast_2d(self.X.mT.cov(correction=0))

    def _mixture(self, points: nn.Module) -> Mixture:
        return Mixture(points, self.X.new_zeros(self.components))

    def start(self) -> Mixture:
        """Return the start on the Gaussian submanifold: spread-out means, the covariance of all data, equal weights."""
        options = {"form": "precision", "init": self._covariance(), "batch_shape": (self.components,)}
        return self._mixture(Gaussian(self.X.shape[-1], loc=self.means, **options))  # type: ignore[arg-type]

    def embedded_start(self) -> Tensor:
        """Return the same start as augmented matrices."""
        return embed(self.means, self._covariance().expand(self.components, -1, -1))

    def ambient(self) -> Mixture:
        """Return the same start on the full manifold."""
        init = self.embedded_start()
        return self._mixture(SPD(init.shape[-1], factor="inverse", init=init, batch_shape=(self.components,)))

    def __call__(self, point: Mixture, rows: Tensor | None = None) -> Tensor:
        """Return the loss on all rows of X, or on the mini-batch of those with the given indices."""
        log_joint = point.log_densities(pick(self.X, rows)) + point.logits.log_softmax(-1)
        return -log_joint.logsumexp(-1).mean()

    def gradient(self, S: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients in the augmented matrices and the logits, from the responsibilities r::

        dl/dS_j = 1/(2N) sum_i r_ij (S_j^-1 - S_j^-1 y_i y_i^T S_j^-1),    dl/da_j = w_j - 1/N sum_i r_ij
        """
        y, inverse = augment(self.X), torch.linalg.inv(S)
        z = torch.einsum("jab,ib->ija", inverse, y)
        log_joint = -0.5 * ((z * y.unsqueeze(1)).sum(-1) + torch.logdet(S)) + logits.log_softmax(-1)
        r = log_joint.softmax(-1) / len(y)
        mass = r.sum(0)
        in_matrices = 0.5 * (mass[:, None, None] * inverse - torch.einsum("ij,ija,ijb->jab", r, z, z))
        return in_matrices, logits.softmax(-1) - mass


def spread(X: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Return rows far from each other.

    Each is drawn with probability proportional to its squared distance to those before.
    """
    generator = generator or torch.Generator().manual_seed(0)
    chosen = [int(torch.randint(len(X), (), generator=generator))]
    while len(chosen) < count:
        nearest = torch.cdist(X.double(), X[chosen].double()).amin(-1).square().cpu()
        chosen.append(int(torch.multinomial(nearest + 1e-300, 1, generator=generator)))
    return X[chosen]
