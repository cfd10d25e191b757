"""BlackJAX's Pathfinder and full-rank VI for benchmarks/vi.py, on the same log densities in torch.

JAX calls the densities back, one call for a batch of points. The times are without compilation. The package blackjax
is optional: ``pip install blackjax``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import blackjax
import jax
import numpy as np
import optax
import torch
from blackjax.vi import fullrank_vi, pathfinder
from torch.distributions import Distribution, MultivariateNormal
from vi_methods import FINAL_DRAWS, PARTICLES, Approximation, Hits, Record, quality, watched

from gnomon.problems.posteriors import Posterior

jax.config.update("jax_enable_x64", True)


class Bridge:
    """A log density of torch as a differentiable function of JAX, ``(dim,) -> ()``; batches stay batches."""

    def __init__(self, posterior: Posterior) -> None:
        self.posterior, self.gradients, self.values = posterior, 0, 0
        scalar, vector = (jax.ShapeDtypeStruct(shape, np.float64) for shape in ((), (posterior.dim,)))
        call = partial(jax.pure_callback, vmap_method="expand_dims")

        density = jax.custom_vjp(lambda x: call(self._value, scalar, x))
        density.defvjp(
            lambda x: call(self._value_and_gradient, (scalar, vector), x),
            lambda gradient, weight: (weight * gradient,),
        )
        self.density: Callable[[Any], Any] = density

    def _rows(self, x: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(x, dtype=np.float64)).reshape(-1, self.posterior.dim)

    @torch.no_grad()
    def _value(self, x: Any) -> Any:
        rows = self._rows(x)
        self.values += len(rows)
        return self.posterior.log_density(rows).numpy().reshape(x.shape[:-1])

    def _value_and_gradient(self, x: Any) -> Any:
        rows = self._rows(x).requires_grad_()
        self.gradients += len(rows)
        value = self.posterior.log_density(rows)
        (gradient,) = torch.autograd.grad(value.sum(), rows)
        return value.detach().numpy().reshape(x.shape[:-1]), gradient.numpy().reshape(x.shape)


def path(posterior: Posterior, seed: int) -> Record:
    """Pathfinder at its defaults, from standard normal coordinates. It ends by itself: there is one check."""
    bridge = Bridge(posterior)
    run = jax.jit(lambda key, start: pathfinder.approximate(key, bridge.density, start)[0])
    key, start, other = jax.random.split(jax.random.key(seed), 3)
    position = jax.random.normal(start, (posterior.dim,))
    jax.block_until_ready(run(key, position))
    bridge.gradients = bridge.values = 0
    began = time.process_time()
    state = jax.block_until_ready(run(key, position))
    seconds = time.process_time() - began
    draws, log_q = pathfinder.sample(other, state, FINAL_DRAWS)
    approximation = Approximation(torch.from_numpy(np.array(draws)), torch.from_numpy(np.array(log_q)))
    final = quality(posterior, approximation)
    hits = Hits()
    for _ in range(2):
        hits.add(final["error"], bridge.gradients, seconds)
    totals = {"evaluations": bridge.gradients, "values": bridge.values, "seconds": seconds, "failure": None}
    return {**hits.record(), **totals, **final}


class FullRank:
    """BlackJAX's full-rank VI with Adam."""

    def __init__(self, posterior: Posterior, rate: float, seed: int, steps: int = 50) -> None:
        self.dim, self.chunk, self.taken = posterior.dim, steps, 0
        self.key = jax.random.key(seed)
        algorithm = blackjax.fullrank_vi(Bridge(posterior).density, optax.adam(rate), num_samples=PARTICLES)
        self.state = algorithm.init(np.zeros(posterior.dim))

        def advance(key: Any, state: Any) -> Any:
            keys = jax.random.split(key, steps)
            return jax.lax.scan(lambda carry, k: (algorithm.step(k, carry)[0], None), state, keys)[0]

        self.compiled = jax.jit(advance).lower(self.key, self.state).compile()

    @property
    def evaluations(self) -> int:
        return self.taken * PARTICLES

    def advance(self) -> None:
        self.key, key = jax.random.split(self.key)
        self.state = jax.block_until_ready(self.compiled(key, self.state))
        self.taken += self.chunk

    def distribution(self) -> Distribution:
        factor = fullrank_vi._unflatten_cholesky(self.state.chol_params, self.dim)
        loc, scale = (torch.from_numpy(np.array(part)) for part in (self.state.mu, factor))
        return MultivariateNormal(loc, scale_tril=scale)


def full_rank(posterior: Posterior, rate: float, seed: int) -> Record:
    torch.manual_seed(seed)
    return watched(posterior, lambda: FullRank(posterior, rate, seed))
