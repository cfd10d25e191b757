"""The exact maps against the paper's definitions: its Table spd_table, its metric, its differential equations."""

import torch
from torch.func import hessian, jvp

from gnomon import riemannian as r
from gnomon.problems import random_spd
from support import exact_maps as literal

F64 = torch.float64


def symmetric(*batch, k=4):
    v = torch.randn(*batch, k, k, dtype=F64)
    return v + v.mT


def test_the_maps_are_those_of_the_table():
    a, b = (random_spd(4, 20.0) for _ in range(2))
    v = symmetric()
    torch.testing.assert_close(r.exp(a, v), literal.exponential(a, v))
    torch.testing.assert_close(r.log(a, b), literal.logarithm(a, b))
    torch.testing.assert_close(r.transport(a, b, v), literal.riemannian_transport(a, b, v))
    torch.testing.assert_close(r.euclidean_transport(a, b, v), literal.euclidean_transport(a, b, v))


def test_the_metric_is_twice_the_fisher_rao_metric():
    """Eq. affinemetric: F = -2 E[Hessian of log N(x | 0, tau)], where E[x x^T] = tau is held fixed."""
    tau, u, v = random_spd(4, 20.0), symmetric(), symmetric()

    def expected(t):
        return torch.logdet(t) + torch.linalg.solve(t, tau).trace()  # -2 E[log N], without its constant

    second = hessian(expected)(tau)
    torch.testing.assert_close(torch.einsum("ij,ijkl,kl->", u, second, v), r.inner(tau, u, v))


def test_the_christoffel_symbols_of_the_metric():
    """Eq. chris_1st from automatic differentiation, against -(u tau^-1 v + v tau^-1 u) / 2 of the second kind."""
    tau, u, v, w = random_spd(4, 20.0), *symmetric(3)

    def change(along, x, y):
        """The derivative of F(x, y) along a tangent vector."""
        return jvp(lambda t: torch.linalg.solve(t, x).mul(torch.linalg.solve(t, y).mT).sum(), (tau,), (along,))[1]

    first_kind = 0.5 * (change(u, v, w) + change(v, u, w) - change(w, u, v))
    half = u @ torch.linalg.solve(tau, v)
    torch.testing.assert_close(first_kind, r.inner(tau, -0.5 * (half + half.mT), w))


def test_geodesics_and_transports_solve_their_equations():
    """The geodesic ODE, Eq. parallel_trans_riem and Eq. parallel_trans_eucl, by central differences."""
    a, b = (random_spd(4, 10.0) for _ in range(2))
    v, t, h = symmetric(), 0.4, 1e-3

    def along(curve):
        before, here, after = (curve(t + step) for step in (-h, 0.0, h))
        return here, (after - before) / (2 * h), (after - 2 * here + before) / h**2

    point, velocity, acceleration = along(lambda t: r.geodesic(a, b, t))
    turn = torch.linalg.solve(point, velocity)  # gamma^-1 gamma'
    torch.testing.assert_close(acceleration, velocity @ turn, rtol=1e-4, atol=1e-5)
    carried, change, _ = along(lambda t: r.transport(a, r.geodesic(a, b, t), v))
    torch.testing.assert_close(change, 0.5 * (turn.mT @ carried + carried @ turn), rtol=1e-4, atol=1e-5)
    carried, change, _ = along(lambda t: r.euclidean_transport(a, r.geodesic(a, b, t), v))
    torch.testing.assert_close(change, -0.5 * (turn @ carried + carried @ turn.mT), rtol=1e-4, atol=1e-5)
