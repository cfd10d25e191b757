"""Coordinates and transport against the formulas of the paper."""

import math

import pytest
import torch

from gnomon import groups as g
from gnomon.frames import Chart
from gnomon.testing import random_element


def _slope(error, large=0.1, small=0.01):
    return math.log(error(large) / error(small)) / math.log(large / small)


def test_paper_formulas_of_triangular_momentum():
    """w = m + 1/2 D.[(-D.m)^T, m/D] (chain rule) + D.[D.m, (D.m)^T] (Eq. chris_error), for s = -m."""
    k = 4
    group = g.Triangular(k)
    m = torch.tril(torch.randn(k, k, dtype=torch.float64)) * 1e-4
    D = torch.full((k, k), math.sqrt(0.5), dtype=torch.float64).fill_diagonal_(0.5).tril()
    over_d = torch.where(D > 0, m / torch.where(D > 0, D, 1), 0)
    N = D * m

    def bracket(x, y):
        return x @ y - y @ x

    wanted = (m + 0.5 * D * bracket(-N.mT, over_d) + D * bracket(N, N.mT)).tril()
    packed = group.from_dense(m)
    carried = Chart(group).carry(tuple(-b for b in packed), packed)
    correction = group.to_dense(carried) - m
    # The library also restores the length, a change of third order.
    torch.testing.assert_close(correction, wanted - m, rtol=1e-3, atol=1e-13)
    assert correction.norm() > 1e-9


def test_paper_gradient_of_the_arrow():
    """Sec. low_rank_spd, from a dense gradient in tau."""
    d = 4
    group = g.Arrow(d + 1)
    a = random_element(group)
    A = group.to_dense(a)
    a0, b, c = A[0, 0], A[1:, 0], A[1:, 1:].diagonal()
    G = torch.randn(d + 1, d + 1, dtype=torch.float64)
    G = G + G.mT
    g1, g2, G3 = G[0, 0], G[1:, 0], G[1:, 1:]
    f = G3 @ b
    wanted_a = a0 * (a0 * g1 + 2 * g2 @ b) + b @ f
    wanted_b = math.sqrt(2) * c * (a0 * g2 + f)
    wanted_c = c**2 * G3.diagonal()
    grad_A = group.from_dense(2 * G @ A)
    head, tail, coupling = Chart(group).pullback(a, grad_A)
    torch.testing.assert_close(head, wanted_a.reshape(1, 1))
    torch.testing.assert_close(coupling.squeeze(-1), wanted_b)
    torch.testing.assert_close(tail, wanted_c)


def test_gradient_of_the_full_manifold_is_congruence():
    k = 5
    A, G = torch.randn(2, k, k, dtype=torch.float64).unbind()
    G = G + G.mT
    for form, wanted, grad in (
        ("outer", A.mT @ G @ A, 2 * G @ A),
        ("inner", A @ G @ A.mT, 2 * A @ G),
    ):
        (coordinates,) = Chart(g.Dense(k), form).pullback((A,), (grad,))
        torch.testing.assert_close(coordinates, wanted)


def _tau(form, A):
    if form == "outer":
        return A @ A.mT
    return A.mT @ A if form == "inner" else torch.linalg.inv(A @ A.mT)


def test_three_factorizations_agree_to_first_order():
    """The same Riemannian gradient step in A, B and C: equal tau up to the second order in the step.

    With the exact exponential they are one and the same geodesic.
    """
    k = 5
    group = g.Dense(k)
    tau = _tau("outer", torch.randn(k, k, dtype=torch.float64) + 2 * torch.eye(k, dtype=torch.float64))
    G = torch.randn(k, k, dtype=torch.float64)
    G = G + G.mT
    L = torch.linalg.cholesky(tau)
    frames = {"outer": L, "inner": L.mT, "inverse": torch.linalg.inv(L).mT}

    def step(form, size, order):
        A = frames[form].clone().requires_grad_()
        (grad,) = torch.autograd.grad((G * _tau(form, A)).sum(), A)
        chart = Chart(group, form, order)
        eta = chart.pullback((frames[form],), (grad,))
        (moved,) = chart.retract((frames[form],), tuple(-size * e for e in eta))
        return _tau(form, moved)

    assert _slope(lambda t: float((step("outer", t, 1) - step("inverse", t, 1)).norm()), 1e-3, 1e-4) > 1.9
    torch.testing.assert_close(step("inner", 0.1, 1), step("outer", 0.1, 1))  # C = A^T: the same numbers
    for other in ("inner", "inverse"):
        torch.testing.assert_close(step("outer", 0.1, None), step(other, 0.1, None), rtol=1e-10, atol=1e-10)


def test_factorizations_agree_to_first_order_on_a_structure():
    """Where A and B^-T have the same structure (diagonal blocks) the forms agree to first order too."""
    group = g.BlockDiagonal(5, 2)
    a = random_element(group)
    G = torch.randn(5, 5, dtype=torch.float64)
    A = group.to_dense(a)
    tau = A @ A.mT
    factors = {"outer": a, "inverse": group.from_dense(torch.linalg.inv(A).mT)}

    def step(form, size):
        blocks = tuple(b.clone().requires_grad_() for b in factors[form])
        grads = torch.autograd.grad((G * _tau(form, group.to_dense(blocks))).sum(), blocks)
        chart = Chart(group, form, 1)
        eta = chart.pullback(factors[form], grads)
        return _tau(form, group.to_dense(chart.retract(factors[form], tuple(-size * e for e in eta))))

    torch.testing.assert_close(step("outer", 0.0), tau)
    assert _slope(lambda t: float((step("outer", t) - step("inverse", t)).norm()), 1e-3, 1e-4) > 1.9


@pytest.mark.parametrize("upper", [True, False])
def test_both_gaussian_coordinates_agree_to_first_order(upper):
    """Eq. gnormal_coord1 (the matrix exponential) and gnormal_coord2 (blockwise, the library's)."""
    group = g.Affine(g.Dense(3), upper)
    a = random_element(group)
    A = group.to_dense(a)
    eta = group.unscale(group.scale(tuple(torch.randn(b.shape, dtype=torch.float64) for b in a)))
    N = group.to_dense(group.scale(eta))

    def gap(size):
        two = group.to_dense(Chart(group, order=None).retract(a, tuple(size * e for e in eta)))
        one = A @ torch.linalg.matrix_exp(size * N)
        return float((one @ one.mT - two @ two.mT).norm())

    assert _slope(gap) > 1.9


def test_corrected_gaussian_transport_adds_the_outer_product_of_the_mean():
    """For s = -m and a dense factor: w_L = m_L + 1/2 m_mu m_mu^T, w_mu = m_mu - 1/2 m_L m_mu, to second order."""
    group = g.Affine(g.Dense(3))
    m_L = torch.randn(3, 3, dtype=torch.float64)
    m_L, m_mu = 1e-4 * (m_L + m_L.mT), 1e-4 * torch.randn(3, 1, dtype=torch.float64)
    m = (m_L, torch.zeros(1, dtype=torch.float64), m_mu)
    w_L, _, w_mu = Chart(group).carry(tuple(-x for x in m), m, corrected=True)
    torch.testing.assert_close(w_L - m_L, 0.5 * m_mu @ m_mu.mT, rtol=1e-2, atol=1e-12)
    torch.testing.assert_close(w_mu - m_mu, -0.5 * m_L @ m_mu, rtol=1e-2, atol=1e-12)


def test_transport_keeps_lengths_however_long_the_step():
    group = g.Triangular(5)
    step, vector = (50 * torch.randn(2, group.numel, dtype=torch.float64)).unbind()
    (carried,) = Chart(group).carry((step,), (vector,))
    torch.testing.assert_close(carried.norm(), vector.norm())
    (carried,) = Chart(group).carry((step,), (torch.zeros_like(vector),))
    assert bool((carried == 0).all())


def test_bad_charts():
    with pytest.raises(ValueError, match="factor must be one of 'outer', 'inner', 'inverse', got 'cholesky'"):
        Chart(g.Dense(2), "cholesky")
    with pytest.raises(ValueError, match="order must be 1, 2 or None"):
        Chart(g.Dense(2), order=3)
