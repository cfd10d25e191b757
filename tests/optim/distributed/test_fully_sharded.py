"""Fully sharded models."""

import pytest

from gnomon.optim.distributed import together
from support.mixed import CASES, alone, assert_same, fully_sharded, model_and, train, whole_weights
from support.ranks import on_ranks

SHARDED = ["none", "update", "full", "full, accumulated", "none, paper", "full, arrow", "full, gradient", "kfac"]


def _train_sharded(rank, count):
    together.PORTION = 200  # some layers of this small model at a time
    found = {}
    copied = [(name, (2, count // 2)) for name in ("none", "full", "full, kl_clip")]
    for name, shape in [*((name, (count,)) for name in SHARDED), *copied]:
        kind, options, accumulate = CASES[name]
        model, build = model_and(kind, **options)
        fully_sharded(model, shape)
        optimizer = build(model)
        train(model, optimizer, rank, count, accumulate)
        found[name, shape] = whole_weights(model)
    return found


@pytest.mark.spawns
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_sharded_models_equal_one_process():
    for found in on_ranks(4, _train_sharded):
        for (name, shape), weights in found.items():
            assert_same((weights, {}), alone(name)[0], {}, f"{name} {shape}")
