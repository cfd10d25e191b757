"""Metric learning."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import riemannian
from ..linalg import as_tensor
from .base import Matrix, SPDProblem, normal, pick


class MetricLearning(SPDProblem):
    """A Mahalanobis metric under which similar pairs are near and dissimilar ones far (Zadeh et al. 2016)::

        l(A) = mean over similar pairs  u^T A u  +  mean over dissimilar pairs  v^T A^-1 v

    for differences ``u`` and ``v`` (rows). With second moments U and V the minimizer is the geometric mean
    ``U^-1 # V``, the midpoint of the geodesic between them, if both are invertible. On a structured point the cost is
    that of the structure.
    """

    def __init__(self, similar: Tensor, dissimilar: Tensor) -> None:
        similar = as_tensor("similar", similar)
        dissimilar = as_tensor("dissimilar", dissimilar, similar)
        super().__init__(similar)
        self.similar, self.dissimilar = similar, dissimilar
        self._u, self._v = (x.mT @ x / len(x) for x in (similar, dissimilar))
        if min(int(torch.linalg.matrix_rank(moment)) for moment in (self._u, self._v)) == self.k:
            self.minimizer = riemannian.geodesic(torch.linalg.inv(self._u), self._v, 0.5)
            self.minimum = float((self._u * self.minimizer).sum() + (self._v * torch.linalg.inv(self.minimizer)).sum())

    @classmethod
    def random(
        cls,
        k: int,
        *,
        classes: int = 3,
        pairs: int = 500,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> MetricLearning:
        """Return a problem with pairs of points of ``classes`` clusters that share one elongated shape."""
        if classes < 2:
            raise ValueError(f"classes must be at least 2, or there are no dissimilar pairs, got {classes!r}")
        centers = 3 * normal(classes, k, dtype=dtype, generator=generator)
        shape = normal(k, k, dtype=dtype, generator=generator) / k**0.5
        labels = torch.randint(classes, (2, pairs), generator=generator)
        other = (labels + torch.randint(1, classes, (2, pairs), generator=generator)) % classes
        noise = normal(4, pairs, k, dtype=dtype, generator=generator) @ shape.mT
        dissimilar = centers[labels[1]] - centers[other[1]] + noise[2] - noise[3]
        return cls(noise[0] - noise[1], dissimilar)

    @classmethod
    def from_labels(
        cls, X: Tensor, labels: Tensor, pairs: int = 1000, *, generator: torch.Generator | None = None
    ) -> MetricLearning:
        """Return a problem with random pairs of labelled rows, which are similar if the labels agree."""
        X, labels = as_tensor("X", X), as_tensor("labels", labels)
        i, j = torch.randint(len(X), (2, 50 * pairs), generator=generator).to(labels.device)
        same, distinct = labels[i] == labels[j], i != j
        chosen = [torch.nonzero(mask & distinct).flatten()[:pairs] for mask in (same, ~same)]
        if any(len(rows) == 0 for rows in chosen):
            raise ValueError(
                f"among {50 * pairs} random pairs of the {len(X)} rows none has equal labels, or none different ones; "
                "give at least two classes of two rows, or more pairs"
            )
        similar, dissimilar = (X[i[rows]] - X[j[rows]] for rows in chosen)
        return cls(similar, dissimilar)

    def __call__(self, point: Matrix, rows: Tensor | None = None) -> Tensor:
        """Return the loss on all pairs, or on a mini-batch of both kinds."""
        near, far = pick(self.similar, rows), pick(self.dissimilar, rows)
        return point.quad(near).mean() + point.inv_quad(far).mean()

    def gradient(self, S: Tensor) -> Tensor:
        """Return ``U - S^-1 V S^-1``."""
        inverse = torch.linalg.inv(S)
        return self._u - inverse @ self._v @ inverse
