"""The transport of momenta, and of whatever an optimizer keeps."""

import pytest
import torch
from torch import optim

import gnomon
from gnomon import groups as g
from gnomon.problems import LogDet, MetricNearness
from support.framed import Velocity, descend, generator


@pytest.mark.slow
def test_the_correction_helps_momentum_on_triangular_factors():
    """Small steps, strong momentum: the corrected path stays closer to exact heavy ball than the plain one."""
    problem = MetricNearness.random(6, 10.0, generator=generator())
    alpha, beta = 0.9, 0.002

    def path(group, **options):
        point = gnomon.SPD(group, order=None, dtype=torch.float64)
        optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=beta, momentum=alpha), **options)
        points = []
        for _ in range(100):
            optimizer.zero_grad()
            problem(point).backward()
            optimizer.step()
            points.append(point.matrix().detach())
        return torch.stack(points)

    exact = path(g.Dense(6))
    plain = (path(g.Triangular(6), transport="none") - exact).norm()
    corrected = (path(g.Triangular(6), transport="auto") - exact).norm()
    assert corrected < 0.5 * plain


@pytest.mark.slow
def test_adam_keeps_both_moments_in_one_frame_unless_told_otherwise():
    """Elementwise second moments do not turn with the frame; turning the first ones alone costs convergence."""
    group = g.Heisenberg(60, 3, 3)
    blocks = [torch.randn(shape, dtype=torch.float64) for shape in group.shapes]
    n = tuple(b / max(b.shape) ** 0.5 if b.ndim == 2 else 0.5 * b for b in blocks)
    factor = group.to_dense(group.exp(n))
    problem = LogDet(torch.linalg.inv(factor @ factor.mT))

    def gap(transport):
        point = gnomon.SPD(group, dtype=torch.float64)
        optimizer = gnomon.moving_frame(optim.Adam(point.parameters(), lr=0.1), transport=transport)
        return descend(optimizer, lambda: problem(point), 150) - problem.minimum

    assert gap("auto") == gap("none") < 0.1 * gap("corrected")


def test_vector_state_of_users_is_carried():
    group = g.Triangular(4)
    problem = MetricNearness.random(4, generator=generator())

    def carried():
        point = gnomon.SPD(group, dtype=torch.float64)
        optimizer = gnomon.moving_frame(Velocity(point.parameters(), lr=0.02))
        for _ in range(3):
            optimizer.zero_grad()
            problem(point).backward()
            optimizer.step()
        return optimizer.state[point.eta]["velocity"]

    plain = carried()
    gnomon.optim.vector_state[Velocity] = ("velocity",)
    try:
        corrected = carried()
    finally:
        del gnomon.optim.vector_state[Velocity]
    assert not torch.allclose(plain, corrected)


def test_lbfgs_vectors_of_mixed_parameters_are_found_by_their_place():
    from gnomon.optim.state import carried_vectors

    bias = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    point = gnomon.SPD(g.Triangular(3), dtype=torch.float64)
    tail = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = gnomon.moving_frame(optim.LBFGS([bias, point.eta, tail], line_search_fn="strong_wolfe", max_iter=3))
    target = torch.arange(5, dtype=torch.float64)

    def loss():
        return (bias - target).pow(4).sum() + (point.matrix() - 2).square().sum() + (tail - 1).square().sum()

    descend(optimizer, loss, 2)
    state = optimizer.state[bias]
    vectors = list(carried_vectors(optimizer, point.eta))
    assert len(vectors) == 2 + len(state["old_dirs"]) + len(state["old_stps"])
    assert all(v.shape == point.eta.shape for v in vectors)
    assert vectors[0].data_ptr() == state["d"][5:].data_ptr()


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("group", [g.Dense(6), g.Diagonal(6), g.Arrow(6)], ids=repr)
def test_adam_follows_the_units_of_a_mean(group, form):
    """A posterior a hundred times narrower than the start: second moments in old units would let steps vanish."""
    target = torch.linspace(-1, 1, 6)
    q = gnomon.Gaussian(group, form=form)
    optimizer = gnomon.moving_frame(optim.Adam(q.parameters(), lr=0.1))

    def loss():  # KL(q || N(target, 1e-4 I)), but for a constant
        deviation = (q.loc - target).square().sum() + q.covariance().diagonal().sum()
        return 0.5 * (1e4 * deviation - q.logdet())

    descend(optimizer, loss, 300)
    assert float(((q.loc - target) / 1e-2).abs().max()) < 0.1
