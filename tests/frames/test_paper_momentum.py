"""The update with momentum (Eqs. local_rgd_mom to jacobian_transform) against its literal form."""

import math

import pytest
import torch

import gnomon
from gnomon import groups as g
from gnomon.frames import Chart
from gnomon.groups.base import times
from gnomon.problems import MetricNearness, random_spd
from gnomon.testing import random_element
from support.coordinates import chain_rule, projector

F64 = torch.float64
EYE = torch.eye(4, dtype=F64)


def momentum_of(group, size):
    """A random vector of the coordinates that count."""
    flat = projector(group) @ torch.randn(group.numel, dtype=F64)
    return group.unflatten(size * flat / flat.norm())


def slope(error, large=0.1, small=0.02):
    return math.log(error(large) / error(small)) / math.log(large / small)


@pytest.mark.parametrize(
    ("group", "form"),
    [
        (g.Dense(3), "outer"),
        (g.Dense(3), "inner"),
        (g.Dense(3), "inverse"),
        (g.BlockDiagonal(3, 2), "outer"),
        (g.Diagonal(3), "inverse"),
        (g.Toeplitz(3), "outer"),
        (g.Affine(g.Dense(3)), "outer"),
        (g.Affine(g.Dense(3), upper=False), "inverse"),
    ],
    ids=repr,
)
def test_the_chain_rule_between_frames_is_exact(group, form):
    """Eqs. transport_approx and jacobian_transform for the momentum itself, along its own step.

    On symmetric and abelian structures the product is the momentum (Eq. jacob_vec_sym). On a Gaussian it is not.
    """
    chart = Chart(group, form, order=None)
    a, m = random_element(group), momentum_of(group, 0.7)
    step = times(-1, m)
    carried = group.flatten(chart.carry(step, m))
    torch.testing.assert_close(carried, chain_rule(chart, a, step, m), rtol=1e-8, atol=1e-8)
    unchanged = torch.allclose(carried, group.flatten(m), rtol=1e-6)
    assert unchanged != isinstance(group, g.Affine)


@pytest.mark.parametrize("group", [g.Triangular(3), g.Arrow(4), g.Heisenberg(4, 1, 1)], ids=repr)
def test_asymmetric_structures_add_the_second_term_to_the_chain_rule(group):
    """``carry`` is Eq. jacobian_transform with the transport of Eq. chris_error, up to the third order in m."""
    chart = Chart(group, order=None)
    a, unit = random_element(group), momentum_of(group, 1.0)

    def error(size, with_second_term):
        m = times(size, unit)
        wanted = chain_rule(chart, a, times(-1, m), m)
        if with_second_term:
            n = group.to_dense(group.scale(m))
            wanted = wanted + group.flatten(group.scale(group.from_dense(n @ n.mT - n.mT @ n)))
        return float((group.flatten(chart.carry(times(-1, m), m)) - wanted).norm())

    assert slope(lambda size: error(size, True)) > 2.8
    assert slope(lambda size: error(size, False)) < 2.2


def triangular_constants():
    return torch.full((4, 4), math.sqrt(0.5), dtype=F64).fill_diagonal_(0.5).tril()


def bracket(x, y):
    return x @ y - y @ x


def test_the_triangular_chain_rule():
    """The last equation of App. jac_vec_prod: ``m + 1/2 D.[(-D.m)^T, m/D]``, up to the third order in m."""
    group = g.Triangular(4)
    chart, D = Chart(group, order=None), triangular_constants()
    a, unit = random_element(group), momentum_of(group, 1.0)

    def error(size):
        packed = times(size, unit)
        m = group.to_dense(packed)
        divided = torch.where(D > 0, m / torch.where(D > 0, D, 1), 0)
        wanted = group.from_dense((m + 0.5 * D * bracket(-(D * m).mT, divided)).tril())
        return float((group.flatten(wanted) - chain_rule(chart, a, times(-1, packed), packed)).norm())

    assert slope(error) > 2.8


def problem_and_start():
    generator = torch.Generator().manual_seed(0)
    return MetricNearness.random(4, 5.0, generator=generator), 0.3 * random_spd(4, 3.0, generator=generator)


def run(point, problem, alpha, beta, steps=25):
    optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=beta, momentum=alpha))
    for _ in range(steps):
        optimizer.zero_grad()
        problem(point).backward()
        optimizer.step()
        yield point.matrix().detach()


def quadratic(n):
    """``I + N + N^2/2``, as the paper writes it."""
    return 0.5 * (EYE + (EYE + n) @ (EYE + n))


def test_momentum_on_a_triangular_factor():
    """Eq. local_rgd_mom with both terms between the frames; the library also keeps the length of the momentum."""
    alpha, beta = 0.8, 0.002
    problem, start = problem_and_start()
    A, D, w = torch.linalg.cholesky(start), triangular_constants(), torch.zeros(4, 4, dtype=F64)
    for tau in run(gnomon.SPD(g.Triangular(4), init=start), problem, alpha, beta):
        gradient = 2 * D * (A.mT @ problem.gradient(A @ A.mT) @ A)
        m = alpha * w + beta * gradient
        n, divided = D * m, torch.where(D > 0, m / torch.where(D > 0, D, 1), 0)
        A = A @ quadratic(-n)
        w = (m + 0.5 * D * bracket(-n.mT, divided) + D * bracket(n, n.mT)).tril()
        w = w * m.norm() / w.norm()
        torch.testing.assert_close(tau, A @ A.mT, rtol=1e-10, atol=1e-10)
    assert float((tau - start).norm()) > 0.05


def test_the_update_of_the_papers_experiments():
    """Eq. our_update_sgd_full: momentum in ``tau = C^T C`` with the quadratic exponential."""
    alpha, beta = 0.8, 0.02
    problem, start = problem_and_start()
    C, m = torch.linalg.cholesky(start).mT, torch.zeros(4, 4, dtype=F64)
    for tau in run(gnomon.SPD(4, factor="inner", init=start), problem, alpha, beta):
        m = alpha * m + beta * C @ problem.gradient(C.mT @ C) @ C.mT
        C = quadratic(-m / 2) @ C
        torch.testing.assert_close(tau, C.mT @ C, rtol=1e-10, atol=1e-10)
    assert float((tau - start).norm()) > 0.05
