"""The baselines against the recursions of App. imple_baselines, written with the literal maps of the paper's table."""

import pytest
import torch

from gnomon.baselines import RGD, AhnSra2020, Alimisis2020, Alimisis2021
from gnomon.problems import MetricNearness, random_spd
from support.exact_maps import euclidean_transport, exponential, logarithm, riemannian_transport

ALPHA, BETA = 0.7, 0.02


def riemannian_gradient(problem, tau):
    return tau @ problem.gradient(tau) @ tau


def descent(problem, tau):
    """Eq. rgd."""
    while True:
        tau = exponential(tau, -BETA * riemannian_gradient(problem, tau))
        yield tau


def heavy_ball(problem, tau):
    """Eq. rgd_mom."""
    z = torch.zeros_like(tau)
    while True:
        nu = ALPHA * z + BETA * riemannian_gradient(problem, tau)
        new = exponential(tau, -nu)
        z, tau = riemannian_transport(tau, new, nu), new
        yield tau


def euclidean_heavy_ball(problem, tau):
    """Eq. rgd_mom_eg: the momentum is a Euclidean gradient, and F^-1 m = tau m tau."""
    w = torch.zeros_like(tau)
    while True:
        m = ALPHA * w + BETA * problem.gradient(tau)
        new = exponential(tau, -tau @ m @ tau)
        w, tau = euclidean_transport(tau, new, m), new
        yield tau


def nesterov_of_alimisis(problem, tau):
    y = tau
    while True:
        gradient = riemannian_gradient(problem, tau)
        z = exponential(tau, -BETA * gradient)
        y = exponential(y, -BETA / (1 - ALPHA) * riemannian_transport(tau, y, gradient))
        tau = exponential(y, ALPHA * logarithm(y, z))
        yield tau


def nesterov_of_ahn_and_sra(problem, tau):
    z = tau
    while True:
        gradient = riemannian_gradient(problem, tau)
        y = exponential(tau, -BETA * gradient)
        z = exponential(tau, ALPHA / (1 - ALPHA) * logarithm(tau, z) - 2 * BETA * gradient)
        tau = exponential(y, ALPHA * logarithm(y, z))
        yield tau


@pytest.mark.parametrize(
    ("method", "recursion"),
    [
        (RGD, descent),
        (Alimisis2020, heavy_ball),
        (Alimisis2020, euclidean_heavy_ball),
        (Alimisis2021, nesterov_of_alimisis),
        (AhnSra2020, nesterov_of_ahn_and_sra),
    ],
)
def test_each_method_is_its_recursion(method, recursion):
    generator = torch.Generator().manual_seed(0)
    problem = MetricNearness.random(5, 5.0, generator=generator)
    start = 0.3 * random_spd(5, 3.0, generator=generator)
    tau = torch.nn.Parameter(start.clone())
    optimizer = method([tau], lr=BETA, **({} if method is RGD else {"momentum": ALPHA}))
    for _, wanted in zip(range(15), recursion(problem, start), strict=False):
        tau.grad = problem.gradient(tau.detach())
        optimizer.step()
        torch.testing.assert_close(tau.detach(), wanted, rtol=1e-9, atol=1e-9)
    assert float((tau.detach() - start).norm()) > 0.05
