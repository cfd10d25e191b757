"""What each parameter of a model gets, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...linalg import promoted
from .config import StepConfig
from .factor_rule import FactorRule
from .layers.base import FactoredLayer, Settings
from .registry import LayerRegistry


@dataclass(frozen=True)
class Row:
    """One parameter, or a weight with its bias."""

    name: str
    shape: tuple[int, ...]
    treatment: str
    k: str = ""
    """The structure of the input factor."""
    c: str = ""
    """The structure of the output factor."""
    bytes: int = 0
    """The bytes of the state, momentum included."""
    update: int = 0
    """The multiplications of an update of the factors, without the statistics of a batch."""
    step: int = 0
    """The multiplications of a step."""


HEADER = ("parameter", "shape", "treatment", "K", "C", "state", "update", "step")


@dataclass(frozen=True)
class Summary:
    """Rows for people (``str``) and for programs (``rows``)."""

    rows: list[Row]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        total = ("total", "", "", "", "", *self._costs(self.rows))
        return table(HEADER, [self._cells(row) for row in self.rows], total)

    def _cells(self, row: Row) -> tuple[str, ...]:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        return (row.name, shape, row.treatment, row.k, row.c, *self._costs([row]))

    @staticmethod
    def _costs(rows: list[Row]) -> tuple[str, str, str]:
        return (
            f"{scaled(sum(row.bytes for row in rows))}B",
            scaled(sum(row.update for row in rows)),
            scaled(sum(row.step for row in rows)),
        )


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...]) -> str:
    """Columns of text, with a rule below the header and one above the total."""
    cells = [header, *rows, total]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def scaled(count: float) -> str:
    """A number with three digits and a unit, as in ``1.23 M``; ``B`` may follow."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit else f"{count:.0f} "
        count /= 1000
    return f"{count:.3g} T"


# ---------------------------------------------------------------------- rows of an optimizer
def state_bytes(rule: FactorRule, layer: FactoredLayer) -> int:
    """The bytes of a layer's factors in the state."""
    dtypes = rule.dtypes(layer)
    return sum(math.prod(shape) * dtypes[key].itemsize for key, shape in rule.shapes(layer).items())


def momentum_bytes(layer: FactoredLayer, config: StepConfig) -> int:
    """The bytes of the momenta of a layer's parameters."""
    return 0 if config.precondition_only else sum(p.numel() * p.element_size() for p in layer.layer.parameters)


def layer_row(rule: FactorRule, layer: FactoredLayer, name: str, config: StepConfig, uses: int) -> Row:
    """The row of a layer with factors, which are used so many times between updates."""
    blocks = f"{layer.layer.blocks} of " if layer.layer.blocks > 1 else ""
    update, step = rule.work(layer)
    return Row(
        name,
        tuple(layer.layer.weight.shape),
        f"{rule.name}, {'kfac' if layer.views else 'gradient'} curvature",
        f"{blocks}{layer.pair.left}",
        f"{blocks}{layer.pair.right}",
        state_bytes(rule, layer) + rule.product_bytes(layer, uses) + momentum_bytes(layer, config),
        update,
        step,
    )


def summary_rows(
    model: nn.Module, registry: LayerRegistry, rule: FactorRule, config: StepConfig, groups: list[Settings]
) -> Iterator[Row]:
    """The rows of all parameters of a model, layers with factors first."""
    names, uses = registry.names(), groups[0]["update_every"]
    shown: set[nn.Parameter] = set()
    for layer in registry.layers.values():
        parts = layer.layer.parameters
        shown |= set(parts)
        yield layer_row(rule, layer, " + ".join(names[p] for p in parts), config, uses)
    for p in (p for group in groups for p in group["params"] if p not in shown):
        wide = promoted(p.dtype, torch.float32)  # the type of AdamW's two moments; that of SGD has p's type
        width = 2 * wide.itemsize if config.fallback == "adamw" else p.element_size()
        treated = "left alone" if config.precondition_only else config.fallback
        stored = 0 if config.precondition_only else p.numel() * width
        yield Row(names[p], tuple(p.shape), treated, bytes=stored, step=p.numel())
        shown.add(p)
    for name, p in model.named_parameters():
        if p not in shown:
            yield Row(name, tuple(p.shape), "frozen" if not p.requires_grad else "in no group")
