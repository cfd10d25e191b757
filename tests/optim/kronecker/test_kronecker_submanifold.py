"""INGD's own Kronecker code against ``groups.Kronecker`` (Eqs. mat_sub_manifold and mat_gauss_norm_coord).

INGD keeps K and C apart and has code of its own for them. It is the same geometry as the group's.
"""

import math

import torch

from gnomon import groups
from gnomon.frames import Chart
from gnomon.groups.base import times
from gnomon.optim.kronecker.reference import update_factors

F64 = torch.float64
P, D, ROWS, DAMPING = 4, 3, 30, 0.1
GROUP = groups.Kronecker(groups.Dense(P), groups.Dense(D))


def setting():
    """Factors that are not symmetric, and the rows of a batch."""
    K, C = (torch.eye(k, dtype=F64) + 0.2 * torch.randn(k, k, dtype=F64) for k in (P, D))
    return K, C, torch.randn(ROWS, P, dtype=F64), torch.randn(ROWS, D, dtype=F64) / ROWS


def moments(x, g):
    return x.mT @ x / ROWS, ROWS * g.mT @ g


def loss(K, C, mu_aa, mu_gg):
    """The function of Sigma whose gradient is ``(mu_AA x mu_GG + damping I - Sigma^-1) / 2``."""
    A = torch.kron(K, C)
    covariance = A @ A.mT
    hessian = torch.kron(mu_aa, mu_gg) + DAMPING * torch.eye(P * D, dtype=F64)
    return 0.5 * ((hessian * covariance).sum() - torch.logdet(covariance))


def coordinates(K, C, mu_aa, mu_gg):
    """The gradient in eta_K and eta_C, from automatic differentiation in K and C."""
    leaves = K.clone().requires_grad_(), C.clone().requires_grad_()
    return Chart(GROUP).pullback((K, C), torch.autograd.grad(loss(*leaves, mu_aa, mu_gg), leaves))


def test_the_gradients_of_the_appendix():
    """App. mat_gauss_dl: ``1/(2 sqrt d) ( tr(H_C) H_K + damping tr(C^T C) K^T K - d I )``, and its twin."""
    K, C, x, g = setting()
    mu_aa, mu_gg = moments(x, g)
    H_K, H_C = K.mT @ mu_aa @ K, C.mT @ mu_gg @ C
    wanted_K = H_C.trace() * H_K + DAMPING * (C.mT @ C).trace() * K.mT @ K - D * torch.eye(P, dtype=F64)
    wanted_C = H_K.trace() * H_C + DAMPING * (K.mT @ K).trace() * C.mT @ C - P * torch.eye(D, dtype=F64)
    found_K, found_C = coordinates(K, C, mu_aa, mu_gg)
    torch.testing.assert_close(found_K, wanted_K / (2 * math.sqrt(D)))
    torch.testing.assert_close(found_C, wanted_C / (2 * math.sqrt(P)))


def test_an_update_of_the_figure_is_a_step_in_the_groups_coordinates():
    """Eq. matgauss_just: K and C of Fig. matDL_opt with b1 move as the group's chart does with a step of 2 b1."""
    K, C, x, g = setting()
    m_K, m_C = torch.zeros_like(K), torch.zeros_like(C)
    w = (m_K, m_C)
    a = (K, C)
    a1, b1 = 0.5, 0.02
    for _ in range(5):
        w = tuple(a1 * old + 2 * b1 * new for old, new in zip(w, coordinates(*a, *moments(x, g)), strict=True))
        a = Chart(GROUP, order=1).retract(a, times(-1, w))
        K, C, m_K, m_C = update_factors(K, C, m_K, m_C, x, g, a1, b1, DAMPING)
        torch.testing.assert_close(a, (K, C))
    assert float((K - torch.eye(P, dtype=F64)).norm()) > 0.1


def test_the_preconditioned_gradient():
    """The unlabelled equation after mat_sub_manifold: ``A A^T vec(G) = vec(C C^T G K K^T)``, vec by columns."""
    K, C, _, _ = setting()
    G = torch.randn(D, P, dtype=F64)
    A = torch.kron(K, C)
    found = GROUP.apply_squared((K, C), G.mT.reshape(1, -1)).reshape(P, D).mT
    torch.testing.assert_close(found, C @ C.mT @ G @ K @ K.mT)
    torch.testing.assert_close((A @ A.mT @ G.mT.reshape(-1)).reshape(P, D).mT, found)
    torch.testing.assert_close(GROUP.to_dense((K, C)), A)
