"""Paths against the exact Riemannian methods."""

import torch
from torch import optim

import gnomon
from gnomon import riemannian
from gnomon.problems import LogDet, MetricNearness, random_spd
from support.framed import generator


def test_momentum_is_exact_riemannian_heavy_ball():
    """Trajectory against the exact maps (Eq. rgd_mom) to 1e-10 over 60 steps."""
    for problem in (LogDet.random(6, generator=generator()), MetricNearness.random(6, generator=generator(1))):
        for form in ("outer", "inner", "inverse"):
            alpha, beta = 0.9, 0.05
            tau = 0.1 * random_spd(6, 3.0, generator=generator(2))
            point = gnomon.SPD(6, order=None, factor=form, init=tau)
            optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=beta, momentum=alpha), max_step=None)
            z = torch.zeros_like(tau)
            for _ in range(60):
                optimizer.zero_grad()
                problem(point).backward()
                optimizer.step()
                nu = alpha * z + beta * tau @ problem.gradient(tau) @ tau
                moved = riemannian.exp(tau, -nu)
                z = riemannian.transport(tau, moved, nu)
                tau = moved
                assert float((point.matrix().detach() - tau).norm() / tau.norm()) < 1e-10


def test_nesterov_and_adam_moments_need_no_transport():
    """Nesterov's look-ahead and Adam's first moment are the transported tangent vectors of the exact method."""
    problem = MetricNearness.random(5, generator=generator())
    alpha, beta = 0.8, 0.01
    point = gnomon.SPD(5, order=None, dtype=torch.float64)
    optimizer = gnomon.moving_frame(
        optim.SGD(point.parameters(), lr=beta, momentum=alpha, nesterov=True), max_step=None
    )
    tau, buffer = torch.eye(5, dtype=torch.float64), torch.zeros(5, 5, dtype=torch.float64)
    for _ in range(40):
        optimizer.zero_grad()
        problem(point).backward()
        optimizer.step()
        gradient = tau @ problem.gradient(tau) @ tau
        buffer = alpha * buffer + gradient
        moved = riemannian.exp(tau, -beta * (gradient + alpha * buffer))
        buffer = riemannian.transport(tau, moved, buffer)
        tau = moved
    assert float((point.matrix().detach() - tau).norm() / tau.norm()) < 1e-10
