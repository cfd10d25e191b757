"""Several ranks take the steps of one process with the whole batch."""

import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from support.mixed import CASES, alone, assert_same, model_and, outcome, train
from support.ranks import on_ranks


def _train_cases(rank, count, names):
    found = {}
    for name in names:
        kind, options, accumulate = CASES[name]
        model, build = model_and(kind, **options)
        wrapped = DistributedDataParallel(model)
        optimizer = build(wrapped)
        train(wrapped, optimizer, rank, count, accumulate)
        found[name] = outcome(model, optimizer)
    return found


@pytest.mark.spawns
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_equal_one_process_with_the_whole_batch(count):
    found = on_ranks(count, _train_cases, list(CASES))
    for name in CASES:
        weights, state = alone(name)
        for theirs in (ranks[name] for ranks in found):
            assert_same(theirs, weights, state, name)
            for key, value in theirs[0].items():
                assert torch.equal(value, found[0][name][0][key]), f"{name}: ranks differ in {key}"
        # All that one process keeps is kept somewhere.
        for number, entries in state.items():
            there = set(itertools.chain(*(ranks[name][1].get(number, {}) for ranks in found)))
            assert there == set(entries), name
