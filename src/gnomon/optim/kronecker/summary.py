"""What each parameter of a model gets, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ...groups import Diagonal
from ...linalg import promoted
from ...manifolds import point_of
from .config import StepConfig
from .cost_model import turn_work
from .factor_forms import FactorForm
from .factor_rule import FactorRule
from .layers.base import FactoredLayer, Settings, State, alike, as_whole
from .preconditioner import Preconditioner
from .registry import LayerRegistry
from .strategy import Alone
from .structured_factor import StructuredFactor

FROZEN = "frozen"
NO_GROUP = "in no group"
A_POINT = "left to moving_frame"


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
    entries: int = 0
    """The numbers that the parameters have."""
    parameter_bytes: int = 0
    """The bytes of the parameters."""
    spared_bytes: int = 0
    """The bytes that dense factors would take in the place of diagonal ones."""

    @property
    def is_trained(self) -> bool:
        return self.treatment not in (FROZEN, NO_GROUP, A_POINT)


HEADER = ("parameter", "shape", "treatment", "K", "C", "state (B)", "update (mul)", "step (mul)")


@dataclass(frozen=True, repr=False)
class Summary:
    """Rows for programs (``rows``), and a table for people (``str``, and HTML in notebooks).

    The table has one line for layers that are equal but for numbers in their names, with sums of what they take.
    """

    rows: list[Row]

    @property
    def bytes(self) -> int:
        """The bytes of the state."""
        return sum(row.bytes for row in self.rows)

    @property
    def share(self) -> float:
        """The share of the trained parameters' numbers that belong to layers with factors."""
        trained = sum(row.entries for row in self.rows if row.is_trained)
        return sum(row.entries for row in self.rows if row.k) / max(trained, 1)

    @property
    def multiple(self) -> float:
        """The bytes of the state over those of the trained parameters."""
        return self.bytes / max(sum(row.parameter_bytes for row in self.rows if row.is_trained), 1)

    def __str__(self) -> str:
        return "\n".join([table(HEADER, self._lines(), self._total()), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html  # for notebooks alone: it takes as long to import as a tenth of this library

        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(cells, "td") for cells in self._lines())
        notes = "<br>".join(map(html.escape, self._notes()))
        return (
            f"<table><thead>{line(HEADER, 'th')}</thead><tbody>{body}</tbody><tfoot>{line(self._total(), 'th')}</tfoot>"
            f"</table><p>{notes}</p>"
        )

    # ------------------------------------------------------------------ lines
    def _lines(self) -> list[tuple[str, ...]]:
        frozen = [row for row in self.rows if row.treatment == FROZEN]
        apart = frozen if len(frozen) > 1 else []
        shown = [row for row in self.rows if not (apart and row.treatment == FROZEN)]
        lines = [_cells(name, rows) for name, rows in collapsed(shown)]
        if apart:
            entries = scaled(sum(row.entries for row in apart)).strip()
            lines.append((f"{len(apart)} parameters", f"{entries} numbers", FROZEN, "", "", *_costs(apart)))
        return lines

    def _total(self) -> tuple[str, ...]:
        return ("total", "", "", "", "", *_costs(self.rows))

    def _notes(self) -> list[str]:
        trained = scaled(sum(row.entries for row in self.rows if row.is_trained)).strip()
        skinny = [row for row in self.rows if row.spared_bytes]
        spared = scaled(sum(row.spared_bytes for row in skinny))
        some = [f"{len(skinny)} layers have a diagonal factor, where a dense one would take {spared}B more in all"]
        return [
            f"{self.share:.1%} of {trained} trained numbers belong to layers with factors; the state takes "
            f"{self.bytes / 1e6:.3g} MB, {self.multiple:.3g} times the trained parameters",
            *(some if skinny else []),
            "B: bytes; mul: multiplications, of an update without the statistics of a batch",
        ]


def _cells(name: str, rows: list[Row]) -> tuple[str, ...]:
    """Return the line of rows that are equal but for their names."""
    first = rows[0]
    shape = " x ".join(map(str, first.shape)) or "scalar"
    if len(rows) > 1:
        shape = f"{len(rows)} x ({shape})"
    return (name, shape, first.treatment, first.k, first.c, *_costs(rows))


def _costs(rows: list[Row]) -> tuple[str, str, str]:
    return (
        scaled(sum(row.bytes for row in rows)),
        scaled(sum(row.update for row in rows)),
        scaled(sum(row.step for row in rows)),
    )


# ---------------------------------------------------------------------- equal layers as one line
def collapsed(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Merge rows that differ in one number of their names alone, or in two numbers in all combinations, and so on."""
    found: list[Line] = [(tuple(short_name(row.name).split(".")), [row]) for row in rows]
    for place in range(max((len(name) for name, _ in found), default=0)):
        found = [_merged(same, place) for same in alike(found, partial(_kind, place))]
    return [(".".join(name), rows) for name, rows in found]


def short_name(name: str) -> str:
    """Return ``a.weight + bias`` for a weight and a bias of one module."""
    first, *others = name.split(" + ")
    module = first.rpartition(".")[0]
    rest = [other.rpartition(".")[2] if other.rpartition(".")[0] == module else other for other in others]
    return " + ".join([first, *rest])


Line = tuple[tuple[str, ...], list[Row]]
"""The parts of a name, where a range may stand for a number, and the rows of a line."""


def _kind(place: int, line: Line) -> tuple[object, ...]:
    """Return a key that is equal for lines that differ at most in the number at a place of their names."""
    name, rows = line
    has_number = place < len(name) and name[place].isdigit()
    parts = (*name[:place], "", *name[place + 1 :]) if has_number else name
    return parts, len(rows), replace(rows[0], name="")


def _merged(lines: list[Line], place: int) -> Line:
    if len(lines) == 1:
        return lines[0]
    name = lines[0][0]
    numbers = ranges([int(other[place]) for other, _ in lines])
    return (*name[:place], numbers, *name[place + 1 :]), [row for _, rows in lines for row in rows]


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers in short, as in ``0-3,7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...]) -> str:
    """Write columns of text, with a rule below the header and one above the total."""
    cells = [header, *rows, total]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def scaled(count: float) -> str:
    """Write a number with three digits and a unit, as in ``1.23 M``; ``B`` may follow."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit else f"{count:.0f} "
        count /= 1000
    return f"{count:.3g} T"


# ---------------------------------------------------------------------- rows of an optimizer
def state_bytes(rule: FactorRule, layer: FactoredLayer) -> int:
    """Return the bytes of a layer's factors in the state."""
    dtypes = rule.dtypes(layer)
    return sum(math.prod(shape) * dtypes[key].itemsize for key, shape in rule.shapes(layer).items())


def momentum_bytes(layer: FactoredLayer, config: StepConfig) -> int:
    """Return the bytes of the momenta of a layer's parameters."""
    return 0 if config.precondition_only else _bytes(layer.layer.parameters)


def fallback_bytes(p: torch.Tensor, config: StepConfig) -> int:
    """Return the bytes of the state of a parameter without factors."""
    if config.precondition_only:
        return 0
    wide = promoted(p.dtype, torch.float32)  # the type of AdamW's two moments; that of SGD has p's type
    return p.numel() * (2 * wide.itemsize if config.fallback == "adamw" else p.element_size())


def work(rule: FactorRule, layer: FactoredLayer) -> tuple[int, int]:
    """Return the multiplications of an update of a layer's factors, and of the direction of a step from a gradient."""
    update, step = rule.work(layer)
    return update, step + turn_work(layer.turn, layer.layer.blocks, layer.layer.d, layer.layer.p)


def layer_row(rule: FactorRule, layer: FactoredLayer, name: str, config: StepConfig, uses: int) -> Row:
    """Return the row of a layer with factors, which are used so many times between updates."""
    blocks = f"{layer.layer.blocks} of " if layer.layer.blocks > 1 else ""
    update, step = work(rule, layer)
    return Row(
        name,
        tuple(layer.layer.shape),
        f"{rule.name}, {'kfac' if layer.views else 'gradient'} curvature",
        f"{blocks}{layer.pair.left}",
        f"{blocks}{layer.pair.right}",
        state_bytes(rule, layer) + rule.product_bytes(layer, uses) + momentum_bytes(layer, config),
        update,
        step,
        sum(as_whole(p).numel() for p in layer.layer.parameters),
        _bytes(layer.layer.parameters),
        sum(dense_bytes(layer, form) for form in layer.pair if is_diagonal(form)),
    )


def is_diagonal(form: FactorForm) -> bool:
    return isinstance(form, StructuredFactor) and isinstance(form.group, Diagonal)


def dense_bytes(layer: FactoredLayer, form: FactorForm) -> int:
    """Return the bytes of a dense factor of the size of another one, less those of a diagonal."""
    return layer.layer.blocks * form.size * (form.size - 1) * layer.computing_dtype.itemsize


def summary_rows(
    model: nn.Module, registry: LayerRegistry, rule: FactorRule, config: StepConfig, groups: list[Settings]
) -> Iterator[Row]:
    """Yield the rows of all parameters of a model, layers with factors first."""
    names, uses = registry.names(), groups[0]["update_every"]
    shown: set[nn.Parameter] = set()
    for layer in registry.layers.values():
        parts = layer.layer.parameters
        shown |= set(parts)
        yield layer_row(rule, layer, " + ".join(names[p] for p in parts if p in names), config, uses)
    for p in (p for group in groups for p in group["params"] if p not in shown):
        treated = "left alone" if config.precondition_only else config.fallback
        stored = fallback_bytes(p, config)
        yield Row(
            names[p],
            tuple(p.shape),
            treated,
            bytes=stored,
            step=p.numel(),
            entries=p.numel(),
            parameter_bytes=_bytes([p]),
        )
        shown.add(p)
    for name, p in model.named_parameters():
        if p not in shown:
            why = FROZEN if not p.requires_grad else NO_GROUP if point_of(p) is None else A_POINT
            yield Row(name, tuple(p.shape), why, entries=p.numel(), parameter_bytes=_bytes([p]))


def _bytes(parameters: Sequence[torch.Tensor]) -> int:
    return sum(as_whole(p).numel() * p.element_size() for p in parameters)


def expected_bytes(
    registry: LayerRegistry, preconditioner: Preconditioner, strategy: Alone, config: StepConfig, groups: list[Settings]
) -> int:
    """Return the bytes of the state that this rank will store, cached products included."""
    rule, uses, found = preconditioner.rule, groups[0]["update_every"], 0
    for layer in registry.layers.values():
        shapes, dtypes, mine = rule.shapes(layer), rule.dtypes(layer), strategy.is_mine(layer)
        found += sum(math.prod(shapes[key]) * dtypes[key].itemsize for key in preconditioner.stored_keys(layer))
        if mine or not strategy.stores_apart:
            found += rule.product_bytes(layer, uses)
        if (mine or not strategy.moves_apart) and not config.precondition_only:
            parameters = layer.layer.parameters
            found += _bytes(strategy.local(parameters) if strategy.moves_shares else parameters)
    others = [p for group in groups if group["role"] == "fallback" for p in group["params"]]
    return found + sum(fallback_bytes(p, config) for p in strategy.local(others))


def stored_bytes(states: Sequence[State], strategy: Alone, rule: FactorRule) -> int:
    """Return the bytes of the state that this rank stores, cached products included."""
    stored = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return _bytes([*strategy.local(stored), *rule.cached_tensors])
