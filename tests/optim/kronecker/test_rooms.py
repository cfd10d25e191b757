"""The memory in which directions are computed."""

import functools

import pytest
import torch

from gnomon.groups import products
from gnomon.optim import INGD, forms
from support.marks import slow_where
from support.matrices import F64
from support.runs import OPTIMIZERS, convolutions, same_run, trained, wide

MIXED = {f"{left}-{right}": (left, right) for left, right in (("dense", "block"), ("block", "dense"))}
ROOMS = {**OPTIMIZERS, **{name: functools.partial(INGD, structure=sides) for name, sides in MIXED.items()}}


@pytest.mark.parametrize(
    "kind", slow_where(["few rows", "many rows", "convolutions"], lambda kind: kind == "convolutions")
)
@pytest.mark.parametrize("name", ROOMS)
def test_gaps_between_the_rows_of_a_room_change_nothing(name, kind, monkeypatch):
    """Products write rows that begin at cache lines sooner. Each layer has its own room."""
    torch.manual_seed(0)
    model = convolutions() if kind == "convolutions" else wide()
    shape = (5, 4, 3, 3) if kind == "convolutions" else (6 if kind == "few rows" else 60, 40)
    monkeypatch.setattr(forms, "SMALL", -1)
    run = (functools.partial(ROOMS[name], update_every=2), model, [torch.randn(shape, dtype=F64) for _ in range(5)])
    plain = trained(*run)
    monkeypatch.setattr(products, "LARGE", 3)
    ours = trained(*run)
    gaps = [not t.room[0].is_contiguous() for t in ours[1]._tracked.values()]
    assert any(gaps) == (name != "block-dense")
    same_run(ours, plain)
