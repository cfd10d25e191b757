"""Problems: closed-form gradients, known optima, mini-batches."""

import pytest
import torch

import gnomon
from gnomon.problems import LogDet, MetricNearness, random_spd


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("problem", [LogDet, MetricNearness])
def test_gradient_and_optimum(problem):
    problem = problem.random(5, 20.0, generator=generator())
    start = random_spd(5, 3.0, generator=generator(1))
    point = gnomon.SPD(5, init=start)
    problem(point).backward()
    A = point.factor_matrix().detach()
    torch.testing.assert_close(point.eta.grad, A.mT @ problem.gradient(start) @ A)

    best = gnomon.SPD(5, init=problem.minimizer)
    assert problem(best).item() == pytest.approx(problem.minimum, abs=1e-9)
    torch.testing.assert_close(problem.gradient(problem.minimizer), torch.zeros(5, 5, dtype=torch.float64))
    assert problem(point).item() > problem.minimum


def test_mini_batches_average_to_the_whole():
    problem = MetricNearness.random(4, samples=60, generator=generator())
    point = gnomon.SPD(4, init=random_spd(4, 3.0, generator=generator(1)))
    batches = torch.randperm(60, generator=generator(2)).split(20)
    parts = torch.stack([problem(point, rows) for rows in batches])
    torch.testing.assert_close(parts.mean(), problem(point))


def test_random_spd_has_the_condition():
    for condition in (1.0, 100.0):
        matrix = random_spd(7, condition, generator=generator())
        assert torch.linalg.cond(matrix).item() == pytest.approx(condition)
        assert torch.equal(matrix, matrix.mT)
    with pytest.raises(ValueError, match=r"condition must be at least 1, got 0\.5"):
        random_spd(3, 0.5)
