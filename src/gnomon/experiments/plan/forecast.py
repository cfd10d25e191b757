"""Forecasts of memory, messages and time of INGD on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...optim import INGD, Plan
from ...optim import plan as plan_of
from ...optim.distributed.plan import statistics_work
from ...optim.distributed.strategies import Mode
from ..training.config import TrainingError, check_name
from .models import PLANNED, Passes, PlannedModel, passes
from .rates import Rates


@dataclass(frozen=True)
class Times:
    """The mean seconds of the parts of a step. Nothing is assumed to overlap."""

    passes: float
    """The forward and the backward pass."""
    gradients: float
    """The sum of the gradients over the ranks."""
    statistics: float
    update: float
    """The update of the factors, on the rank that has the most work."""
    directions: float
    """The directions, on the rank that has the most work."""
    messages: float
    """The messages of INGD alone."""

    @property
    def step(self) -> float:
        """The seconds of the whole step."""
        return self.passes + self.gradients + self.statistics + self.update + self.directions + self.messages


@dataclass(frozen=True)
class Forecast:
    """A plan with the times of its steps."""

    plan: Plan
    times: Times


def forecasts(
    name: str,
    ranks: Sequence[int],
    shards: Sequence[Mode],
    rates: Rates,
    batch: int | None = None,
    update_every: int = 10,
    **settings: Any,
) -> list[Forecast]:
    """Return a forecast for each number of ranks and each mode. ``settings`` are those of INGD."""
    check_model(name)
    model, found = PLANNED[name], []
    network = _built(model)
    optimizer = _optimizer(network, {**settings, "update_every": update_every})
    optimizer.close()  # its hooks would run in the passes that are counted
    gradients = sum(p.numel() * p.element_size() for p in network.parameters())
    for count in ranks:
        passed = passes(model, network, batch or model.batch, count)
        work = sum(statistics_work(t, passed.rows[w]) for w, t in optimizer._layers.items() if w in passed.rows)
        for shard in shards:
            plan = plan_of(optimizer, count, shard)
            found.append(Forecast(plan, _times(plan, passed, work, gradients, rates, update_every)))
    return found


def check_model(name: str) -> None:
    """Raise an error if no model of this name is known."""
    check_name("model", name, PLANNED)


def _built(model: PlannedModel) -> nn.Module:
    try:
        return model.build()
    except ModuleNotFoundError as error:
        raise TrainingError(str(error)) from None


def _optimizer(network: nn.Module, settings: dict[str, Any]) -> INGD:
    try:
        return INGD(network, **settings)
    except (TypeError, ValueError) as error:  # for example an unknown structure
        raise TrainingError(f"INGD cannot be built: {error}") from None


def _times(plan: Plan, passed: Passes, statistics: int, gradients: int, rates: Rates, every: int) -> Times:
    multiplications_per_second = rates.flops / 2
    around = 2 * (plan.ranks - 1) / plan.ranks
    return Times(
        passed.multiplications / multiplications_per_second,
        around * gradients / rates.bandwidth,
        statistics / every / multiplications_per_second,
        plan.largest_update / every / multiplications_per_second,
        plan.largest_step / multiplications_per_second,
        (plan.sent_per_update / every + plan.sent_per_step) / rates.bandwidth,
    )
