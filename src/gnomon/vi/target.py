"""The log density that is approximated: batched, counted, and with non-finite values set apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .density import DensityError, Minibatches, batch_size
from .parameters import Parameters

DIFFERENCE = 1e-4
"""The step of differences of gradients, where a density cannot be differentiated twice."""
ROWS = 2**22
"""How many numbers a batch of points may have where there is no need for one batch."""


MANY = 1024
"""From this dimension on products of Hessians share the evaluation of their points."""


class Scores(NamedTuple):
    """Log densities ``(draws,)`` and their gradients ``(draws, dim)``; which are ``finite``. Others are zero."""

    value: Tensor
    gradient: Tensor
    finite: Tensor


class Target:
    """A log density over R^d, ``(draws, d) -> (draws,)``, with what inference asks of it.

    Args:
        function: the density of vectors, or of a dictionary of parameters.
        parameters: how the vectors are read.
        named: whether the function takes the dictionary.
        temperature: the density is raised to the power ``1 / temperature``.
        batches: of data, which the function takes after the parameters.

    ``gradient_evaluations`` counts one for each draw, and two for each product of a Hessian and a vector;
    ``density_evaluations`` counts the draws whose density alone was asked for.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        parameters: Parameters,
        *,
        named: bool = False,
        temperature: float = 1.0,
        batches: Minibatches | None = None,
    ) -> None:
        self.parameters, self.dim = parameters, parameters.dim
        self.temperature, self.batches = temperature, batches
        self._function, self.named = function, named
        self.order: Tensor | None = None
        self._inverse_order: Tensor | None = None
        self.gradient_evaluations = self.density_evaluations = 0
        self.nonfinite_draws = self.violating_draws = 0

    # ------------------------------------------------------------------ the order of coordinates
    def reorder(self, order: Tensor) -> None:
        """Make coordinate ``i`` of the vectors coordinate ``order[i]`` of the parameters, from now on."""
        self.order, self._inverse_order = order, torch.argsort(order)

    def in_parameter_order(self, x: Tensor) -> Tensor:
        """Return vectors in the order of the parameters."""
        return x if self._inverse_order is None else x[..., self._inverse_order]

    def in_fitted_order(self, x: Tensor) -> Tensor:
        """Return a vector of the parameters in the order of the fit."""
        return x if self.order is None else x[..., self.order]

    # ------------------------------------------------------------------ data
    def two_batches(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return a batch for each half of the draws; without data, two empty ones."""
        return ((), ()) if self.batches is None else (self.batches.next(), self.batches.next())

    @property
    def remedy(self) -> str:
        """What helps where the noise of the gradients was too large for the steps to converge."""
        return "raise max_steps or draws" if self.batches is None else "raise max_steps, or take larger batches"

    # ------------------------------------------------------------------ values
    def __call__(self, x: Tensor, *batch: Any) -> Tensor:
        """Return the log density at each row; where parameters leave their constraints it is not a number.

        With data, it is estimated from a batch: without one, always from the same.
        """
        if self.batches is not None and not batch:
            batch = self.batches.first
        x = self.in_parameter_order(x)
        if not self.named:
            return self._function(x, *batch) / self.temperature
        values, logdet = self.parameters.constrain_with_logdet(x)
        density = (self._function(values, *batch) + logdet) / self.temperature
        outside = self.parameters.violations({name: value.detach() for name, value in values.items()})
        if bool(outside.any()):
            self.violating_draws += int(outside.sum())
            density = density.masked_fill(outside, torch.nan)
        return density

    @torch.no_grad()
    def log_density(self, x: Tensor) -> Tensor:
        """Return the values alone, computed for a bounded number of rows at a time.

        They are those of all data, if there are batches of it.
        """
        values = [self._of_all_data(rows) for rows in x.split(max(1, ROWS // self.dim))]
        self.density_evaluations += len(x)
        return torch.cat(values)

    def _of_all_data(self, x: Tensor) -> Tensor:
        if self.batches is None:
            return self(x)
        # Each batch estimates the log density of all data; by their sizes the estimates average to it.
        total, count = x.new_zeros(len(x)), 0
        for batch in self.batches:
            size = batch_size(batch)
            total, count = total + size * self(x, *batch), count + size
        return total / count

    def scores(self, x: Tensor, *batch: Any) -> Scores:
        """Return values and gradients at each row."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = self(leaf, *batch)
            if not value.requires_grad:
                raise DensityError(
                    "log_density has no gradient: its value does not depend on the unknowns, or is computed from them "
                    "by something that torch does not differentiate, such as detach(), item() or NumPy"
                )
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        self.gradient_evaluations += len(x)
        value = value.detach()
        total = value.sum() + gradient.sum()
        if bool(total.isfinite()):
            return Scores(value, gradient, torch.ones_like(value, dtype=torch.bool))
        finite = value.isfinite() & gradient.isfinite().all(-1)
        self.nonfinite_draws += int((~finite).sum())
        return Scores(value.where(finite, 0), gradient.where(finite.unsqueeze(-1), 0), finite)

    # ------------------------------------------------------------------ second derivatives
    def hessian_products(self, x: Tensor, vectors: Tensor, *batch: Any) -> Tensor:
        """Return ``H(x) v`` for each row of ``vectors``, at the point x or at as many points."""
        parts = [
            self._products(x.expand_as(vectors)[rows], vectors[rows], *batch)
            for rows in torch.arange(len(vectors)).split(max(1, ROWS // self.dim))
        ]
        return torch.cat(parts)

    def mean_hessian(self, x: Tensor, *batch: Any) -> Callable[[Tensor], Tensor]:
        """Return a function from vectors to the means of ``H(x) v`` over the points x.

        With many unknowns the points are evaluated once for all vectors, one vector after the other. With few, all
        pairs of points and vectors are one batch.
        """
        n = len(x)

        def all_pairs(vectors: Tensor) -> Tensor:
            points, each = x.repeat(len(vectors), 1), vectors.repeat_interleave(n, 0)
            return self.hessian_products(points, each, *batch).unflatten(0, (-1, n)).mean(1)

        if self.dim < MANY:
            return all_pairs
        leaf = x.detach().clone().requires_grad_()
        try:
            gradient = self._differentiable_gradient(leaf, *batch)
        except RuntimeError:  # an operation of the density has no second derivative
            return all_pairs

        def one_by_one(vectors: Tensor) -> Tensor:
            self.gradient_evaluations += 2 * n * len(vectors)
            products = [_derivative(gradient, leaf, v.expand_as(leaf), retain_graph=True).mean(0) for v in vectors]
            return torch.stack(products)

        return one_by_one

    def _differentiable_gradient(self, leaf: Tensor, *batch: Any) -> Tensor:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self(leaf, *batch).sum(), leaf, create_graph=True)
        return gradient

    def _products(self, x: Tensor, vectors: Tensor, *batch: Any) -> Tensor:
        self.gradient_evaluations += 2 * len(vectors)
        leaf = x.detach().clone().requires_grad_()
        try:
            return _derivative(self._differentiable_gradient(leaf, *batch), leaf, vectors)
        except RuntimeError:  # an operation of the density has no second derivative
            pass
        gradients = []
        for sign in (1, -1):
            with torch.enable_grad():
                leaf = (x + sign * DIFFERENCE * vectors).detach().requires_grad_()
                gradients.append(torch.autograd.grad(self(leaf, *batch).sum(), leaf)[0])
        return (gradients[0] - gradients[1]) / (2 * DIFFERENCE)

    def hessian(self, x: Tensor, *batch: Any) -> Tensor:
        """Return the Hessian at one point, dense and symmetric, by one product for each coordinate."""
        products = self.hessian_products(x, torch.eye(self.dim, dtype=x.dtype, device=x.device), *batch)
        return (products + products.mT) / 2


def _derivative(gradient: Tensor, leaf: Tensor, vectors: Tensor, retain_graph: bool = False) -> Tensor:
    """Return ``H v`` from a gradient that can be differentiated; zero where the density is linear."""
    if not gradient.requires_grad:
        return torch.zeros_like(vectors)
    (products,) = torch.autograd.grad(gradient, leaf, vectors, retain_graph=retain_graph)
    return products
