"""Forecasts as tables, for terminals and for Markdown pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.table import Table

from ...optim.kronecker.summary import scaled
from ..common.tables import markdown_table, titled_table
from .forecast import Forecast
from .models import PLANNED
from .rates import Rates

SIZES, PARTS = ("state", "mean", "an update", "a step"), ("stats", "factors", "directions", "messages")
HEADER = ("ranks", "shard", *SIZES, "time", *PARTS)
NARROW = 90
"""A terminal with fewer columns does not show the mean."""
LEGEND = (
    "state: bytes of the optimizer's state at the rank that has the most, and the mean over all ranks. an update, a "
    "step: bytes of INGD's messages at each update and at each step, without the gradients. time: the mean time of a "
    "step, and which part of it is for statistics, updates of factors, directions and INGD's messages. The passes and "
    "the all_reduce of the gradients take the other part."
)


def cells(forecast: Forecast) -> tuple[str, ...]:
    """Return the cells of a row."""
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
    """Return the forecasts as a table that fits the width of a terminal."""
    gap = 0 if width < NARROW else 1  # in addition to the gap between columns
    table = titled_table(PLANNED[name].spec.title, padding=(0, gap, 0, 0))
    shown = [i for i, column in enumerate(HEADER) if column != "mean" or width >= NARROW]
    for i in shown:
        justify: Literal["left", "right"] = "left" if HEADER[i] == "shard" else "right"
        table.add_column(HEADER[i].replace(" ", "\n"), justify=justify, no_wrap=True)
    for forecast in found:
        line = cells(forecast)
        table.add_row(*(line[i] for i in shown))
    return table


def markdown(found: Sequence[Forecast]) -> str:
    """Return the forecasts as a Markdown table."""
    return markdown_table(HEADER, map(cells, found), left=("shard",))


def explanation(name: str, found: Sequence[Forecast], rates: Rates, batch: int | None, every: int) -> str:
    """Describe how the forecasts were computed."""
    model, layers = PLANNED[name], len(found[0].plan.layers)
    unit = "sequences" if model.spec.size is None else "images"
    return (
        f"Computed from shapes; nothing was run. The model has {layers} layers with factors and weights in float32. "
        f"There are {batch or model.batch} {unit} a rank, and an update every {every} steps, with "
        f"DistributedDataParallel. Nothing overlaps. Rates: {rates.note}.{_with_fully_shard(found)}"
    )


def _with_fully_shard(found: Sequence[Forecast]) -> str:
    """Say what a rank receives where parameters are sharded too, if there are several ranks."""
    plans = [forecast.plan for forecast in found if forecast.plan.ranks > 1]
    sizes = ", ".join(f"{scaled(max(p.received_if_sharded))}B ({p.ranks} ranks, shard={p.shard})" for p in plans)
    return f" With fully_shard() a rank receives at most this at each step: {sizes}." if plans else ""
