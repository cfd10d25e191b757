"""Dictionary learning with SPD atoms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .. import riemannian
from ..linalg import as_tensor
from ..manifolds import SPD
from .base import Problem, pick
from .random import random_spd


class Dictionary(nn.Module):
    """SPD atoms ``B_i`` and, for each matrix, positive codes ``a_i = softplus(logits_i)``."""

    def __init__(self, atoms: SPD, codes: Tensor) -> None:
        super().__init__()
        self.atoms = atoms
        self.logits = nn.Parameter(codes + torch.log(-torch.expm1(-codes)))

    @property
    def codes(self) -> Tensor:
        return softplus(self.logits)

    def matrices(self, rows: Tensor | None = None) -> Tensor:
        """Return ``sum_i a_ji B_i`` for each j."""
        return combine(pick(self.codes, rows), self.atoms.matrix())


def combine(codes: Tensor, atoms: Tensor) -> Tensor:
    return torch.einsum("ni,ijk->njk", codes, atoms)


class DictionaryLearning(Problem):
    """Each of N matrices as a sparse positive combination of SPD atoms (Cherian and Sra 2017)::

        l(B, a) = 1/N sum_j ( 1/2 dist(X_j, sum_i a_ji B_i)^2 + lambda sum_i a_ji )

    with the affine-invariant distance. ``X`` has the shape ``(N, k, k)``. Without penalty, data that were made from
    as many atoms can be explained exactly: the minimum is then 0.
    """

    def __init__(self, X: Tensor, atoms: int, penalty: float = 0.0) -> None:
        if not penalty >= 0:
            raise ValueError(f"penalty must be at least 0, got {penalty!r}")
        if not 1 <= atoms <= len(X):
            raise ValueError(f"atoms must be between 1 and the {len(X)} matrices of X, got {atoms!r}")
        self.X, self.atoms, self.penalty = as_tensor("X", X), atoms, penalty

    @classmethod
    def random(
        cls,
        k: int,
        *,
        atoms: int = 4,
        samples: int = 50,
        penalty: float = 0.0,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> DictionaryLearning:
        """Return a problem with combinations of random atoms with exponentially distributed codes."""
        truth = torch.stack([random_spd(k, 10.0, generator=generator) for _ in range(atoms)])
        codes = 0.1 - torch.rand(samples, atoms, dtype=torch.float64, generator=generator).log()
        problem = cls(combine(codes, truth).to(dtype), atoms, penalty)
        if penalty == 0:
            problem.minimum = 0.0
        return problem

    def start(self) -> Dictionary:
        """Return atoms from among the data, and equal codes."""
        count = self.atoms
        chosen = torch.linspace(0, len(self.X) - 1, count).round().long().to(self.X.device)
        size = self.X.shape[-1]
        atoms = SPD(size, init=self.X[chosen], batch_shape=(count,))
        return Dictionary(atoms, self.X.new_full((len(self.X), count), 1 / count))

    def __call__(self, point: Dictionary, rows: Tensor | None = None) -> Tensor:
        """Return the loss on all matrices, or on the mini-batch of those with the given indices."""
        fit = 0.5 * riemannian.distance(pick(self.X, rows), point.matrices(rows)).square()
        return (fit + self.penalty * pick(point.codes, rows).sum(-1)).mean()

    def gradient(self, atoms: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients in the atoms and the codes.

        They come from that of half a squared distance, ``-P^-1 log(X P^-1)`` at P.
        """
        P = combine(codes, atoms)
        inverse = torch.linalg.inv(P)
        toward = riemannian.log(P, self.X)
        G = -(inverse @ toward @ inverse) / len(self.X)
        in_codes = torch.einsum("njk,ijk->ni", G, atoms) + self.penalty / len(self.X)
        return torch.einsum("ni,njk->ijk", codes, G), in_codes
