"""The memory in which directions are computed."""

import functools

import pytest
import torch

from gnomon import linalg
from gnomon.optim import INGD
from gnomon.optim.kronecker.layers import base
from support.marks import slow_where
from support.matrices import F64
from support.runs import OPTIMIZERS, convolutions, same_run, trained, wide

MIXED = {f"{left}-{right}": (left, right) for left, right in (("dense", "block"), ("block", "dense"))}
BUILDS = {**OPTIMIZERS, **{name: functools.partial(INGD, structure=sides) for name, sides in MIXED.items()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", slow_where(["few rows", "many rows", "convolutions"], lambda kind: kind == "convolutions")
)
@pytest.mark.parametrize("name", BUILDS)
def test_gaps_between_the_rows_of_directions_change_nothing(name, kind, monkeypatch):
    """Products write rows sooner that begin at cache lines. Each layer has its own memory."""
    torch.manual_seed(0)
    model = convolutions() if kind == "convolutions" else wide()
    shape = (5, 4, 3, 3) if kind == "convolutions" else (6 if kind == "few rows" else 60, 40)
    monkeypatch.setattr(base, "SMALL", -1)
    run = (functools.partial(BUILDS[name], update_every=2), model, [torch.randn(shape, dtype=F64) for _ in range(5)])
    plain = trained(*run)
    monkeypatch.setattr(linalg, "ALIGNED_WIDTH", 3)
    ours = trained(*run)
    memory = ours[1]._preconditioner._memory
    assert len(memory) == len(ours[1]._layers)
    gaps = [not direction.is_contiguous() for direction, _ in memory.values()]
    assert any(gaps) == (name != "block-dense")
    same_run(ours, plain)
