"""What the draws of one step tell: the gradient, its noise, the gap to the optimum and the bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups import Element, SymmetricOperator
from ..groups.base import add
from ..manifolds import Gaussian
from ..optim.hessian import Exact, Hutchinson
from .gradients import log_prob_of_noise, mean_of, path_gradient, price_gradient, push
from .sampling import standard_draws
from .steps import squared_norm
from .target import Scores, Target

EXACT_DIAGONAL = 512
"""Up to this dimension Price's gradient takes exact diagonals of the Hessian; beyond, random signs estimate them."""


class Estimate(NamedTuple):
    """The mean of two independent estimates of the gradient, from halves of the draws.

    ``gap`` is their inner product, without bias the squared length of the true gradient; ``noise`` estimates the
    variance of their mean. ``log_ratios`` are ``log p - log q`` at the draws where they are finite.
    """

    gradient: Element
    gap: float
    noise: float
    log_ratios: Tensor
    largest: float


class _Pairs(NamedTuple):
    """Scores of pairs of draws: values ``(2, pairs)``, gradients ``(2, pairs, dim)``, and which pairs are finite."""

    value: Tensor
    gradient: Tensor
    finite: Tensor

    @classmethod
    def of(cls, scores: Scores) -> _Pairs:
        value, gradient, finite = (part.unflatten(0, (2, -1)) for part in scores)
        return cls(value, gradient, finite.all(0))


class Estimator:
    """Estimates from draws of q; every half has draws, and a batch of data if there is some, of its own."""

    def __init__(self, target: Target, draws: int, generator: torch.Generator, price: bool = False) -> None:
        self.target, self.draws, self.generator, self.price = target, draws, generator, price

    @torch.no_grad()
    def estimate(self, q: Gaussian) -> Estimate | None:
        """Estimate the gradient from pairs of draws; return None where no pair of a half has finite densities."""
        z = torch.stack([self._noise(q) for _ in range(2)])
        shift = push(q, z.flatten(0, 1)).view_as(z)
        mean = mean_of(q)
        x = torch.stack([mean + shift, mean - shift], 1)  # (half, sign, pair, dim)
        batches = self.target.two_batches()
        scores = self._scores(x, batches)
        if not all(bool(score.finite.any()) for score in scores):
            return None
        halves = [self._half(q, z[i], x[i], scores[i], batches[i]) for i in range(2)]
        mean_gradient = tuple(one.lerp(other, 0.5) for one, other in zip(*halves, strict=True))
        noise = squared_norm(add(halves[0], halves[1], -1)) / 4
        log_q = log_prob_of_noise(q, z)
        ratios = [(score.value - log_q[i])[:, score.finite].flatten() for i, score in enumerate(scores)]
        return Estimate(
            mean_gradient,
            squared_norm(mean_gradient) - noise,  # the inner product of the halves
            noise,
            torch.cat(ratios),
            float(torch.maximum(x.amax(), -x.amin())),
        )

    def _noise(self, q: Gaussian) -> Tensor:
        """Return one of each pair of draws."""
        return standard_draws(self.draws // 4, q.d, generator=self.generator, dtype=q.dtype, device=q.device)

    def _scores(self, x: Tensor, batches: tuple[tuple[Any, ...], tuple[Any, ...]]) -> list[_Pairs]:
        if batches[0]:
            found = [self.target.scores(rows.flatten(0, 1), *batch) for rows, batch in zip(x, batches, strict=True)]
            return [_Pairs.of(scores) for scores in found]
        together = self.target.scores(x.flatten(0, 2))  # one call of the density, not two
        halves = zip(*(part.chunk(2) for part in together), strict=True)
        return [_Pairs.of(Scores(*half)) for half in halves]

    def _half(self, q: Gaussian, z: Tensor, x: Tensor, scores: _Pairs, batch: tuple[Any, ...]) -> Element:
        finite = scores.finite
        z, (plus, minus) = (z, scores.gradient) if bool(finite.all()) else (z[finite], scores.gradient[:, finite])
        odd, even = (plus - minus) / 2, (plus.sum(0) + minus.sum(0)) / (2 * len(z))
        if not self.price:
            return path_gradient(q, z, odd, even)
        return price_gradient(q, self._mean_hessian(q, x[:, finite].flatten(0, 1), batch), even)

    def _mean_hessian(self, q: Gaussian, x: Tensor, batch: tuple[Any, ...]) -> SymmetricOperator:
        rule = Exact() if q.d <= EXACT_DIAGONAL else Hutchinson(generator=self.generator)
        return SymmetricOperator(q.d, self.target.mean_hessian(x, *batch), lambda h: rule(h, x[0]))
