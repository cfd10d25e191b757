"""Any torch optimizer converges on the manifold."""

import pytest
import torch
from torch import optim

import gnomon
from gnomon import groups as g
from gnomon.problems import LogDet, MetricNearness
from gnomon.testing import random_element
from support.framed import OPTIMIZERS, descend, generator
from support.marks import slow_where


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "group",
    slow_where([g.Dense(6), g.Triangular(6), g.Heisenberg(6, 1, 1)], lambda group: group != g.Dense(6)),
    ids=repr,
)
def test_every_optimizer_converges(name, group):
    target = group.to_dense(random_element(group))
    problem = LogDet(torch.linalg.inv(target @ target.mT))
    point = gnomon.SPD(group, dtype=torch.float64)
    start = problem(point).item() - problem.minimum
    optimizer = gnomon.moving_frame(OPTIMIZERS[name](point.parameters()))
    gap = descend(optimizer, lambda: problem(point), 150) - problem.minimum
    assert gap < 2e-3 * start
    assert optimizer.skipped_steps == 0
    assert not bool(point.eta.any())


@pytest.mark.parametrize("problem", [LogDet, MetricNearness])
def test_lbfgs_solves_condition_10(problem):
    problem = problem.random(100, 10.0, generator=generator())
    point = gnomon.SPD(100, dtype=torch.float64)
    optimizer = gnomon.moving_frame(
        optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe", tolerance_grad=1e-10, tolerance_change=1e-14)
    )
    assert descend(optimizer, lambda: problem(point), 10) - problem.minimum < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_lbfgs_solves_nearness_of_condition_1000(seed):
    problem = MetricNearness.random(20, 1000.0, generator=generator(seed))
    point = gnomon.SPD(20, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe"))
    gap = descend(optimizer, lambda: problem(point), 40)
    assert optimizer.state[point.eta]["n_iter"] <= 1000
    assert gap < 1e-6

    fixed = gnomon.SPD(20, dtype=torch.float64)
    sgd = gnomon.moving_frame(optim.SGD(fixed.parameters(), lr=1e-2, momentum=0.9), max_step=1.0)
    assert descend(sgd, lambda: problem(fixed), 1000) > 1e-6  # a fixed step stalls


@pytest.mark.slow
@pytest.mark.parametrize("max_step", [None, 1.0])
@pytest.mark.parametrize("group", [g.Dense(20), g.Triangular(20), g.Arrow(20, rank=3)], ids=repr)
def test_lbfgs_far_from_the_optimum(group, max_step):
    target = group.to_dense(
        group.exp(group.scale(tuple(1.5 * torch.randn(s, dtype=torch.float64) for s in group.shapes)))
    )
    problem = LogDet(torch.linalg.inv(target @ target.mT))
    point = gnomon.SPD(group, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe"), max_step=max_step)
    start = problem(point).item() - problem.minimum
    assert descend(optimizer, lambda: problem(point), 60) - problem.minimum < 1e-6 * start
    assert optimizer.skipped_steps == 0
