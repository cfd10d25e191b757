"""What the draws of one step tell: the gradient, its noise, the gap to the optimum and the bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups import Element, SymmetricOperator
from ..groups.base import add, times
from ..manifolds import Gaussian
from ..optim.hessian import Exact, Hutchinson
from .gradients import log_prob_of_noise, mean_of, path_gradient, price_gradient, pull, push
from .sampling import standard_draws
from .steps import inner_product
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


class Estimator:
    """Estimates from draws of q; every half has draws, and a batch of data if there is some, of its own."""

    def __init__(self, target: Target, draws: int, generator: torch.Generator, price: bool = False) -> None:
        self.target, self.draws, self.generator, self.price = target, draws, generator, price

    @torch.no_grad()
    def estimate(self, q: Gaussian) -> Estimate | None:
        """None where no draw of a half has a finite density."""
        z = torch.stack([self._noise(q) for _ in range(2)])
        x = mean_of(q) + push(q, z.flatten(0, 1)).view_as(z)
        batches = self.target.two_batches()
        scores = self._scores(x, batches)
        if not all(bool(score.finite.any()) for score in scores):
            return None
        halves = [self._half(q, z[i], x[i], scores[i], batches[i]) for i in range(2)]
        difference = add(halves[0], halves[1], -1)
        ratios = [score.value - log_prob_of_noise(q, rows) for score, rows in zip(scores, z, strict=True)]
        finite = torch.cat([score.finite for score in scores])
        return Estimate(
            times(0.5, add(halves[0], halves[1])),
            float(inner_product(halves[0], halves[1])),
            float(inner_product(difference, difference)) / 4,
            torch.cat(ratios)[finite],
            float(x.abs().max()),
        )

    def _noise(self, q: Gaussian) -> Tensor:
        return standard_draws(self.draws // 2, q.d, generator=self.generator, dtype=q.dtype, device=q.device)

    def _scores(self, x: Tensor, batches: tuple[tuple[Any, ...], tuple[Any, ...]]) -> list[Scores]:
        if batches[0] or batches[1]:
            return [self.target.scores(rows, *batch) for rows, batch in zip(x, batches, strict=True)]
        together = self.target.scores(x.flatten(0, 1))  # one call of the density, not two
        n = x.shape[1]
        return [Scores(*(part[rows] for part in together)) for rows in (slice(0, n), slice(n, None))]

    def _half(self, q: Gaussian, z: Tensor, x: Tensor, scores: Scores, batch: tuple[Any, ...]) -> Element:
        weights = scores.finite.to(z.dtype) / scores.finite.sum()
        pulled = pull(q, scores.gradient)
        if not self.price:
            return path_gradient(q, z, pulled + z, weights)
        return price_gradient(q, self._mean_hessian(q, x[scores.finite], batch), weights @ (pulled + z))

    def _mean_hessian(self, q: Gaussian, x: Tensor, batch: tuple[Any, ...]) -> SymmetricOperator:
        def product(rows: Tensor) -> Tensor:
            points = x.unsqueeze(0).expand(len(rows), -1, -1)
            vectors = rows.unsqueeze(1).expand_as(points)
            products = self.target.hessian_products(points.reshape(-1, q.d), vectors.reshape(-1, q.d), *batch)
            return products.view_as(points).mean(1)

        rule = Exact() if q.d <= EXACT_DIAGONAL else Hutchinson(generator=self.generator)
        return SymmetricOperator(q.d, product, lambda h: rule(h, x[0]))
