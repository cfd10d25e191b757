"""Which rank does the work of which layer."""

import itertools

import pytest
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.distributed.assignment import Assignment


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tasks", range(7))
def test_assignment_is_near_the_best_there_is(ranks, tasks):
    for costs in itertools.combinations_with_replacement((0, 1, 2, 3, 5, 8), tasks):
        found = Assignment.balanced(costs, ranks)
        assert len(found.owners) == tasks
        loads = [sum(c for c, owner in zip(costs, found.owners, strict=True) if owner == r) for r in range(ranks)]
        assert list(found.loads) == loads
        assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best_largest_load(costs, ranks) + 1e-9
        assert Assignment.balanced(costs, ranks) == found


def best_largest_load(costs, ranks):
    """By trying all assignments, up to the names of the ranks."""
    reached = {(0,) * ranks}
    for cost in costs:
        reached = {
            tuple(sorted((*loads[:r], loads[r] + cost, *loads[r + 1 :]))) for loads in reached for r in range(ranks)
        }
    return min(max(loads) for loads in reached)


def test_assignment_goes_on_from_loads_and_prefers_low_ranks():
    assert Assignment.balanced([1, 1, 1, 1], 4).owners == (0, 1, 2, 3)
    assert Assignment.balanced([5, 1, 1], 2, loads=[4, 0]) == Assignment((1, 0, 0), (6, 5))
    assert Assignment.balanced([], 3) == Assignment((), (0, 0, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([1], 0), "ranks must be at least 1, got 0"), (([-1], 2), "costs must be at least 0"), (([1], 2, [1]), "loads")],
)
def test_assignment_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Assignment.balanced(*arguments)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="shard must be 'auto' or 'none' or 'update' or 'full', got 'half'"):
        INGD(nn.Linear(2, 2), shard="half")
