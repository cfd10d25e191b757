"""How a mixture is fitted: EM and natural gradients, then L-BFGS; or mini-batches."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..groups import Element
from ..groups.likelihood import has_closed_form
from ..linalg import align
from ..optim import LBFGS, moving_frame
from .objective import Objective, Statistics
from .run import fit_factors

MEMORY = 20
"""The pairs that L-BFGS remembers."""
MOMENTUM = 0.9
"""Of mini-batch steps."""
WARM_UP_GAIN = 1e-3
"""L-BFGS may take over from steps that gain less than this."""
FAST = 0.65
"""EM goes on while each gain is less than this share of the one before: few iterations are left."""
SMALL_GAIN = 1e-4
"""L-BFGS takes over from slow steps that gain less than this, however little an iteration costs."""
OVERHEAD = 5e6
"""Multiplications in a pass over the data that takes as long as all else in a step of L-BFGS."""
LONGEST = 1.0
"""A natural-gradient step changes no direction of a covariance by more than a factor e."""
ROUNDING = 1e-9
"""An increase of the loss that says nothing."""


class Optimizer(Protocol):
    settled: bool
    """Whether the last iteration has moved nothing: the point is stationary."""

    def iterate(self) -> float:
        """Do one iteration and return the loss before it."""

    def after_idle_iteration(self) -> None: ...

    def loss(self) -> float:
        """Return the loss at the current point, on all data."""


class NaturalGradient:
    """Natural-gradient descent in the metric of the completed data (samples with their components).

    In that metric component k counts with its weight, so that its natural gradient is the gradient in normal
    coordinates over ``w_k``, here at least one sample. Twice the learning rate turns the affine-invariant metric of the
    coordinates into Fisher's. A step of length 1 moves the means to the averages of their samples, as EM does, and
    the covariances to first order.
    """

    def __init__(self, objective: Objective, learning_rate: float, momentum: float = 0) -> None:
        self._objective = objective
        coordinates, logits = objective.parameters
        self._optimizer = moving_frame(
            torch.optim.SGD(
                [{"params": [coordinates], "lr": 2 * learning_rate}, {"params": [logits], "lr": learning_rate}],
                momentum=momentum,
                dampening=momentum,  # an average of gradients, no longer than a gradient is
            ),
            max_step=LONGEST,
        )

    def normalize(self, samples: int) -> None:
        """Turn the gradients that are set into natural ones."""
        weights = self._objective.logits.detach().softmax(0).clamp(min=1 / samples)
        common = [block.clone() for block in self._common()]
        for parameter in self._objective.parameters:
            assert parameter.grad is not None
            parameter.grad.div_(align(weights, parameter.grad))
        if common:
            self._shorten_together(common)

    def _common(self) -> Element:
        """Return the gradient of the factor that tied components have in common."""
        return self._objective.of_factors(self._objective.components.eta.grad) if self._objective.tied else ()

    def _shorten_together(self, common: list[Tensor]) -> None:
        """Give a tied factor the weight of all samples, and all components the shortest of their steps.

        An average of steps that are within half of the bound is surely within it, so that none is shortened alone.
        """
        for block, gradient in zip(self._common(), common, strict=True):
            block.copy_(len(gradient) * gradient)  # what is in all K components is the mean of K parts
        components = self._objective.components
        coordinates = components.eta.grad
        assert coordinates is not None
        stretch = self._optimizer.param_groups[0]["lr"] * components.group.stretch(components.group.unpack(coordinates))
        coordinates.mul_((0.5 * LONGEST / stretch.max()).clamp(max=1))

    def step(self) -> None:
        self._optimizer.step()

    def halve(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] /= 2


class FullBatch:
    """Iterations of EM (natural-gradient steps where its M-step has no closed form), then L-BFGS.

    Each evaluation is one pass over the data, for the moments of each component; the rest is done with those.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        components = objective.components
        self._by_em = objective.has_statistics and has_closed_form(components.structure, components.form)
        self._warm = self.settled = False
        self._gain = math.inf
        passing = len(objective.z) * len(objective.logits) * components.d**2
        self._patience = OVERHEAD / passing if self._by_em else 0.0  # slow steps that still are cheaper than L-BFGS
        self._here: Statistics | None = None
        self._loss: float | None = None  # at the current point

    @cached_property
    def _descent(self) -> NaturalGradient:
        return NaturalGradient(self._objective, learning_rate=1)

    @cached_property
    def _lbfgs(self) -> LBFGS:
        return LBFGS(self._objective.parameters, history_size=MEMORY)

    def iterate(self) -> float:
        """Do one iteration and return the loss before it."""
        before = self._evaluate() if self._loss is None else self._loss
        if self._warm:
            self._loss = float(self._lbfgs.step(self._closure))
            self.settled = before - self._loss <= ROUNDING
            return before
        state = [tensor.clone() for tensor in self._state()]
        self._take_step(first=True)
        after = self._evaluate()
        while not after <= before + ROUNDING:  # at times asymmetric structures need shorter steps than EM's
            for tensor, value in zip(self._state(), state, strict=True):
                tensor.copy_(value)
            self._evaluate()
            self._descent.halve()
            self._take_step(first=False)
            after = self._evaluate()
        gain = before - after
        self.settled = self._by_em and gain <= ROUNDING
        if gain < WARM_UP_GAIN and not gain < FAST * self._gain:
            self._warm = self._objective.carries_ties and (self._patience < 1 or gain < SMALL_GAIN)
            self._patience -= 1
        self._loss, self._gain = after, gain
        return before

    def _state(self) -> list[Tensor]:
        return [self._objective.components.frame, self._objective.logits.detach()]

    def _evaluate(self) -> float:
        """Return the loss at the current point, and keep what the next step needs."""
        if self._objective.has_statistics:
            self._here = self._objective.statistics()
            return self._here.loss
        return self._objective.gradient()

    def _take_step(self, first: bool) -> None:
        if self._by_em and first:
            self._maximize()
            return
        if self._here is not None:
            self._objective.gradient_from(self._here)
        self._descent.normalize(len(self._objective.z))
        self._descent.step()

    @torch.no_grad()
    def _maximize(self) -> None:
        """Take the M-step of EM."""
        assert self._here is not None
        _, shares, means, covariances = self._here
        components, logits = self._objective.components, self._objective.logits
        group, factor, _ = components._parts()
        if self._objective.tied:
            pooled = (shares[:, None, None] * covariances).sum(0)
            current = tuple(block[0] for block in factor)
            factor = tuple(
                block.expand(len(shares), *block.shape)
                for block in fit_factors(group, components.form, pooled, current)
            )
        else:
            factor = fit_factors(group, components.form, covariances, factor)
        components.frame.copy_(components.group.pack(components.affine.join(factor, means)))
        logits.copy_(shares.clamp(min=torch.finfo(shares.dtype).tiny).log())

    def _closure(self) -> float:
        if not self._objective.has_statistics:
            return self._objective.gradient()
        here = self._objective.statistics()
        self._objective.gradient_from(here)
        return here.loss

    def after_idle_iteration(self) -> None:
        """Do nothing: the line search has found its step."""

    def loss(self) -> float:
        return self._evaluate() if self._loss is None else self._loss


class MiniBatches:
    """Natural-gradient steps with momentum, an epoch an iteration."""

    settled = False

    def __init__(self, objective: Objective, batch_size: int, learning_rate: float, rng: np.random.RandomState) -> None:
        self._objective, self._batch_size, self._rng = objective, batch_size, rng
        self._descent = NaturalGradient(objective, learning_rate, MOMENTUM if objective.carries_ties else 0)

    def iterate(self) -> float:
        """Do one epoch and return the average of the losses before its steps."""
        order = torch.from_numpy(self._rng.permutation(len(self._objective.z)))
        batches = order.tensor_split(math.ceil(len(order) / self._batch_size))
        total = 0.0
        for rows in batches:
            total += len(rows) * self._objective.gradient(rows)
            self._descent.normalize(len(rows))
            self._descent.step()
        return total / len(order)

    def after_idle_iteration(self) -> None:
        """Shorten the steps, since what they see is noise."""
        self._descent.halve()

    def loss(self) -> float:
        return self._objective.value()
