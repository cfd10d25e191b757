"""The paper's coordinates against automatic differentiation: metric at the origin, maps of a Gaussian, gradients."""

import math

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

import gnomon
from gnomon import groups as g
from gnomon import riemannian
from gnomon.baselines import RGD
from gnomon.frames import FORMS, Chart
from gnomon.problems import MetricNearness, random_spd
from gnomon.testing import random_element
from support.coordinates import projector, tau_of
from support.exact_maps import power

F64 = torch.float64


def symmetric(k):
    v = torch.randn(k, k, dtype=F64)
    return v + v.mT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "group",
    [
        g.Dense(3),
        g.Triangular(3),
        g.Arrow(4),
        g.Heisenberg(4, 1, 1),
        g.Affine(g.Dense(2)),
        g.BlockTriangular((g.Dense(2), g.Fixed(1)), upper=True),
    ],
    ids=repr,
)
def test_the_fisher_metric_at_the_origin_is_the_identity(group, form):
    """Eq. metric_simple: ``-2 E[Hessian of log N(x | 0, tau(eta))] = I`` at eta = 0, with a Gaussian's cross terms."""
    chart = Chart(group, form)
    a = random_element(group)
    tau = tau_of(chart, a)
    here = chart.matrix(a)

    def expected(eta):
        t = tau(eta).unflatten(-1, (group.k, group.k))
        return torch.logdet(t) + torch.linalg.solve(t, here).trace()  # -2 E[log N], without its constant

    metric = hessian(expected, torch.zeros(group.numel, dtype=F64))
    torch.testing.assert_close(metric, projector(group), rtol=1e-8, atol=1e-8)


def test_symmetric_coordinates_are_standard_normal_coordinates():
    """Eqs. standard_normal_coord and orth_exp: with A = tau^(1/2) the chart is the Riemannian exponential itself.

    Another factor of the same tau turns the coordinates, and the length of eta is the distance in both.
    """
    k = 4
    tau, eta = random_spd(k, 10.0), 0.3 * symmetric(k)
    root = power(tau, 0.5)
    chart = Chart(g.Dense(k), order=None)
    moved = chart.matrix(chart.retract((root,), (eta,)))
    torch.testing.assert_close(moved, root @ torch.linalg.matrix_exp(eta) @ root)
    torch.testing.assert_close(moved, riemannian.exp(tau, root @ eta @ root))
    other = chart.matrix(chart.retract((torch.linalg.cholesky(tau),), (eta,)))
    for point in (moved, other):
        torch.testing.assert_close(riemannian.distance(tau, point), eta.norm())


def test_a_step_without_momentum_is_riemannian_gradient_descent():
    """Eq. rgd_standard_norm: gradient descent in the coordinates is Eq. rgd in tau."""
    problem = MetricNearness.random(4, 5.0, generator=torch.Generator().manual_seed(0))
    start = 0.3 * random_spd(4, 3.0)
    tau = torch.nn.Parameter(start.clone())
    exact = RGD([tau], lr=0.03)
    point = gnomon.SPD(4, order=None, init=start)
    ours = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=0.03))
    for _ in range(10):
        ours.zero_grad()
        problem(point).backward()
        ours.step()
        tau.grad = problem.gradient(tau.detach())
        exact.step()
        torch.testing.assert_close(point.matrix().detach(), tau.detach(), rtol=1e-10, atol=1e-10)


def christoffel_symbols(group):
    """Those of the first kind at the origin, by automatic differentiation of the metric (Eq. chris_1st)."""
    chart = Chart(group)
    tau = tau_of(chart, random_element(group))

    def metric(eta):
        k = group.k
        d_tau = jacobian(tau, eta, create_graph=True).movedim(-1, 0).unflatten(-1, (k, k))
        whitened = torch.linalg.solve(tau(eta).unflatten(-1, (k, k)), d_tau)
        return torch.einsum("aij,bji->ab", whitened, whitened)

    change = jacobian(metric, torch.zeros(group.numel, dtype=F64))  # [b, d, c] = d_c F_bd
    return 0.5 * (change.permute(1, 2, 0) + change.permute(1, 0, 2) - change.permute(2, 0, 1))


def test_christoffel_symbols_vanish_for_symmetric_coordinates_alone():
    """Table normal_coord, last row. For symmetric eta the chart is a standard one, so that they are zero."""
    assert float(christoffel_symbols(g.Dense(3)).norm()) < 1e-9
    assert float(christoffel_symbols(g.Triangular(3)).norm()) > 0.1


@pytest.mark.parametrize("group", [g.Triangular(4), g.Arrow(4)], ids=repr)
def test_the_second_term_of_the_transport(group):
    """Eq. chris_error: ``-1/2 sum_bd d_c F_bd m_b m_d = (D.[D.m, (D.m)^T])_c``, from the symbols at the origin."""
    m = torch.randn(group.numel, dtype=F64)
    change = torch.einsum("dcb,d,b->c", christoffel_symbols(group), m, -m)
    n = group.to_dense(group.scale(group.unflatten(m)))
    wanted = group.scale(group.from_dense(n @ n.mT - n.mT @ n))
    torch.testing.assert_close(change, group.flatten(wanted), rtol=1e-8, atol=1e-8)


def test_the_constants_of_the_rank_one_submanifold():
    """Sec. low_rank_spd: D is 1/2 on the diagonal and 1/sqrt(2) below it, and A A^T has the paper's blocks."""
    group = g.Arrow(4)
    ones = torch.ones(group.numel, dtype=F64)
    wanted = torch.diag(torch.full((4,), 0.5, dtype=F64))
    wanted[1:, 0] = math.sqrt(0.5)
    torch.testing.assert_close(group.to_dense(group.scale(group.unflatten(ones))), wanted)
    a = random_element(group)
    factor, tau = group.to_dense(a), Chart(group).matrix(a)
    head, b, c = factor[0, 0], factor[1:, 0], factor[1:, 1:].diagonal()
    torch.testing.assert_close(tau[0, 0], head**2)
    torch.testing.assert_close(tau[1:, 0], head * b)
    torch.testing.assert_close(tau[1:, 1:], torch.outer(b, b) + torch.diag(c**2))


def gaussian_factor(d=3):
    L, mu = torch.randn(d, d, dtype=F64) + 2 * torch.eye(d, dtype=F64), torch.randn(d, dtype=F64)
    return L, mu, g.Affine(g.Dense(d)).join((L,), mu)


def test_both_maps_of_a_gaussian():
    """Eq. gnormal_coord1 is the block-triangular group with a fixed corner, Eq. gnormal_coord2 the affine one."""
    L, mu, a = gaussian_factor()
    eta_L, eta_mu = 0.3 * symmetric(3), torch.randn(3, 1, dtype=F64)
    eta = (eta_L, torch.zeros(1, dtype=F64), eta_mu)
    one = g.BlockTriangular((g.Dense(3), g.Fixed(1)), upper=True)
    two = g.Affine(g.Dense(3))
    n = torch.zeros(4, 4, dtype=F64)
    n[:3, :3], n[:3, 3:] = eta_L / 2, eta_mu / math.sqrt(2)
    A = two.to_dense(a)
    found = one.to_dense(Chart(one, order=None).retract(a, eta))
    torch.testing.assert_close(found, A @ torch.linalg.matrix_exp(n))
    wanted = A.clone()
    wanted[:3, :3] = L @ torch.linalg.matrix_exp(eta_L / 2)
    wanted[:3, 3] = mu + L @ eta_mu[:, 0] / math.sqrt(2)
    torch.testing.assert_close(two.to_dense(Chart(two, order=None).retract(a, eta)), wanted)


def test_gradients_of_a_gaussian():
    """The display before Eq. sngd, Eq. gauss_case_update and Eq. gauss_grad_eq_matrix, for a loss in tau."""
    d = 3
    L, mu, a = gaussian_factor(d)
    group = g.Affine(g.Dense(d))
    weight = torch.randn(d + 1, d + 1, dtype=F64)

    def loss(V, m):
        top = torch.cat([V, m[:, None]], 1)
        tau = torch.cat([top, torch.cat([m, m.new_ones(1)])[None]], 0)
        return (tau @ weight).square().sum() + torch.logdet(tau)

    def gradients(function, *arguments):
        at = [x.clone().requires_grad_() for x in arguments]
        return torch.autograd.grad(function(*at), at)

    covariance = L @ L.mT
    g_V, g_m = gradients(loss, covariance + torch.outer(mu, mu), mu)
    g_1, g_2 = 0.5 * (g_V + g_V.mT), g_m / 2
    g_mu, g_cov = gradients(lambda m, S: loss(S + torch.outer(m, m), m), mu, covariance)
    g_cov = 0.5 * (g_cov + g_cov.mT)
    torch.testing.assert_close(g_cov, g_1)
    torch.testing.assert_close(g_mu, 2 * g_2 + 2 * g_1 @ mu)

    g_L, g_mean = gradients(lambda F, m: loss(F @ F.mT + torch.outer(m, m), m), L, mu)
    found = Chart(group).pullback(a, (g_L, torch.zeros(1, dtype=F64), g_mean[:, None]))
    torch.testing.assert_close(found[0], L.mT @ g_1 @ L)
    torch.testing.assert_close(found[2][:, 0], math.sqrt(2) * L.mT @ (g_1 @ mu + g_2))
    torch.testing.assert_close(found[0], L.mT @ g_cov @ L)
    torch.testing.assert_close(found[2][:, 0], L.mT @ g_mu / math.sqrt(2))


def test_the_gradient_of_the_inverse_factorization():
    """Eq. egd_coordinate_b: ``B^-1 g B^-T``, which the chart computes without the inverse."""
    B = (torch.randn(4, 4, dtype=F64) + 2 * torch.eye(4, dtype=F64)).requires_grad_()
    weight = symmetric(4)
    (grad,) = torch.autograd.grad((weight * torch.linalg.inv(B @ B.mT)).sum(), B)
    (found,) = Chart(g.Dense(4), "inverse").pullback((B.detach(),), (grad,))
    inverse = torch.linalg.inv(B.detach())
    torch.testing.assert_close(found, inverse @ weight @ inverse.mT)
