"""``gnomon plan``: memory, messages and time of INGD on many ranks, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table
from torch import nn

from ..optim import INGD, Plan
from ..optim import plan as plan_of
from ..optim.plan import statistics_work
from ..optim.sharing import Mode
from ..optim.summary import scaled
from .plan_models import PLANNED, Passes, PlannedModel, passes
from .plan_rates import Rates
from .training.config import TrainingError, check_name


@dataclass(frozen=True)
class Times:
    """Mean seconds of a step, one thing after the other: nothing is assumed to overlap."""

    passes: float
    gradients: float
    """To add them up over ranks."""
    statistics: float
    update: float
    """Of the factors, by the rank that has most to do; as are directions."""
    directions: float
    messages: float
    """Of INGD alone."""

    @property
    def step(self) -> float:
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
    """For each number of ranks and each mode; settings are those of INGD."""
    check_model(name)
    model, found = PLANNED[name], []
    network = _built(model)
    optimizer = _optimizer(network, {**settings, "update_every": update_every})
    optimizer.close()  # its hooks would work in the passes that are counted
    gradients = sum(p.numel() * p.element_size() for p in network.parameters())
    for count in ranks:
        passed = passes(model, network, batch or model.batch, count)
        work = sum(statistics_work(t, passed.rows[w]) for w, t in optimizer._tracked.items() if w in passed.rows)
        for shard in shards:
            plan = plan_of(optimizer, count, shard)
            found.append(Forecast(plan, _times(plan, passed, work, gradients, rates, update_every)))
    return found


def check_model(name: str) -> None:
    """Raise for one that is not known."""
    check_name("model", name, PLANNED)


def _built(model: PlannedModel) -> nn.Module:
    try:
        return model.build()
    except ModuleNotFoundError as error:
        raise TrainingError(str(error)) from None


def _optimizer(network: nn.Module, settings: dict[str, Any]) -> INGD:
    try:
        return INGD(network, **settings)
    except (TypeError, ValueError) as error:  # a structure that there is not, say
        raise TrainingError(f"INGD cannot be built: {error}") from None


def _times(plan: Plan, passed: Passes, statistics: int, gradients: int, rates: Rates, every: int) -> Times:
    second = rates.flops / 2  # multiplications
    around = 2 * (plan.ranks - 1) / plan.ranks
    return Times(
        passed.multiplications / second,
        around * gradients / rates.bandwidth,
        statistics / every / second,
        plan.largest_update / every / second,
        plan.largest_step / second,
        (plan.sent_per_update / every + plan.sent_per_step) / rates.bandwidth,
    )


# ---------------------------------------------------------------------- for people
SIZES, PARTS = ("state", "mean", "an update", "a step"), ("stats", "factors", "directions", "messages")
HEADER = ("ranks", "shard", *SIZES, "time", *PARTS)
NARROW = 90
"""On a terminal with fewer columns the mean is left out."""
LEGEND = (
    "state: of the optimizer, at the rank that has most, and the mean of all ranks. an update, a step: what INGD's "
    "messages hold at each update and at each step, the gradients' not counted. time: of a step, on the average, and "
    "which part of it goes to statistics, updates of factors, directions and INGD's messages; the rest are the passes "
    "and the gradients' all_reduce."
)


def cells(forecast: Forecast) -> tuple[str, ...]:
    """A line of the table."""
    plan, times = forecast.plan, forecast.times
    sizes = (plan.largest_memory, plan.mean_memory, plan.bytes_per_update, plan.bytes_per_step)
    parts = (times.statistics, times.update, times.directions, times.messages)
    return (
        str(plan.ranks),
        plan.shard,
        *(f"{scaled(size)}B" if size else "0" for size in sizes),
        _seconds(times.step),
        *(f"{100 * part / times.step:.1f}%" for part in parts),
    )


def _seconds(time: float) -> str:
    return f"{time:.0f} s" if time >= 100 else f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms"


def terminal_table(name: str, found: Sequence[Forecast], width: int) -> Table:
    title = PLANNED[name].spec.title
    gap = 0 if width < NARROW else 1  # beside the one between columns
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0))
    shown = [i for i, column in enumerate(HEADER) if column != "mean" or width >= NARROW]
    for i in shown:
        justify: Literal["left", "right"] = "left" if HEADER[i] == "shard" else "right"
        table.add_column(HEADER[i].replace(" ", "\n"), justify=justify, no_wrap=True)
    for forecast in found:
        line = cells(forecast)
        table.add_row(*(line[i] for i in shown))
    return table


def markdown(found: Sequence[Forecast]) -> str:
    """The same for a page."""
    rule = ["---" if column == "shard" else "---:" for column in HEADER]
    return "\n".join("| " + " | ".join(line) + " |" for line in (HEADER, rule, *map(cells, found)))


def explanation(name: str, found: Sequence[Forecast], rates: Rates, batch: int | None, every: int) -> str:
    """How it was computed."""
    model, layers = PLANNED[name], len(found[0].plan.layers)
    unit = "sequences" if model.spec.size is None else "images"
    return (
        f"Computed from shapes, nothing was run: {layers} layers with factors, weights in float32, "
        f"{batch or model.batch} {unit} a rank, an update each {every} steps, DistributedDataParallel, one thing after "
        f"the other; {rates.note}."
    )
