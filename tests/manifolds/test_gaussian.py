"""Gaussians against torch.distributions and the structured natural-gradient formulas."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

import gnomon
from gnomon import groups as g
from gnomon.testing import random_element
from support.marks import slow_where

LINEAR = [
    g.Dense(4),
    g.Triangular(4),
    g.Diagonal(4),
    g.Arrow(4),
    g.Heisenberg(4, 1, 1),
    g.Toeplitz(4),
    g.BlockDiagonal(4, 3),
]
FORMS = ("covariance", "precision")


def symmetric_exp(matrix: torch.Tensor) -> torch.Tensor:
    """The exponential of a symmetric matrix to full precision (torch.linalg.matrix_exp is off by 2e-12 at times)."""
    w, v = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (v * w.exp().unsqueeze(-2)) @ v.mT


def random_gaussian(group, form, batch=()):
    factor = group.to_dense(random_element(group, batch))
    square = factor @ factor.mT
    cov = square if form == "covariance" else torch.linalg.inv(square)
    loc = torch.randn(*batch, group.k, dtype=torch.float64)
    return gnomon.Gaussian(group, form=form, loc=loc, init=cov, batch_shape=batch), MultivariateNormal(loc, cov)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", LINEAR, ids=repr)
def test_equals_multivariate_normal(group, form, batch):
    q, wanted = random_gaussian(group, form, batch)
    p, other = random_gaussian(group, form, batch)
    x = torch.randn(5, *batch, 4, dtype=torch.float64)
    torch.testing.assert_close(q.loc, wanted.loc)
    torch.testing.assert_close(q.covariance(), wanted.covariance_matrix)
    torch.testing.assert_close(q.precision(), wanted.precision_matrix)
    torch.testing.assert_close(q.log_prob(x), wanted.log_prob(x))
    torch.testing.assert_close(q(x), wanted.log_prob(x))
    torch.testing.assert_close(q.entropy(), wanted.entropy())
    torch.testing.assert_close(q.logdet(), torch.logdet(wanted.covariance_matrix))
    torch.testing.assert_close(q.kl_divergence(p), kl_divergence(wanted, other))
    torch.testing.assert_close(q.kl_divergence(other), kl_divergence(wanted, other))
    torch.testing.assert_close(q.to_distribution().log_prob(x), wanted.log_prob(x))
    assert q.rsample((2, 6)).shape == (2, 6, *batch, 4)
    assert not q.sample(2).requires_grad


def test_kl_between_different_forms_and_structures():
    a, a_dist = random_gaussian(g.Dense(4), "covariance")
    b, b_dist = random_gaussian(g.Arrow(4), "precision")
    torch.testing.assert_close(a.kl_divergence(b), kl_divergence(a_dist, b_dist))
    torch.testing.assert_close(b.kl_divergence(a), kl_divergence(b_dist, a_dist))
    assert a.kl_divergence(a).abs().item() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_kl_broadcasts_over_batches_as_large_as_the_dimension(form):
    many, many_dist = random_gaussian(g.Dense(3), form, (3,))
    one, one_dist = random_gaussian(g.Dense(3), form)
    torch.testing.assert_close(one.kl_divergence(many), kl_divergence(one_dist, many_dist))
    torch.testing.assert_close(many.kl_divergence(one), kl_divergence(many_dist, one_dist))


@pytest.mark.parametrize("form", FORMS)
def test_samples_have_the_moments(form):
    q, wanted = random_gaussian(g.Triangular(4), form)
    draws = q.sample(200_000)
    torch.testing.assert_close(draws.mean(0), wanted.loc, rtol=0.03, atol=0.03)
    torch.testing.assert_close(draws.T.cov(), wanted.covariance_matrix, rtol=0.05, atol=0.03)


def test_large_structured_gaussian_costs_its_structure():
    d = 100_000
    q = gnomon.Gaussian(g.Arrow(d), form="precision")
    p = gnomon.Gaussian(g.Arrow(d), form="precision", loc=torch.ones(d))
    torch.testing.assert_close(q.kl_divergence(p).detach(), torch.tensor(d / 2.0), rtol=1e-4, atol=0.0)
    q.log_prob(torch.ones(2, d)).sum().backward()
    assert q.rsample(3).shape == (3, d)


def target_loss(form, d=3):
    """A smooth function of mean and covariance that is not quadratic."""
    weight, direction = torch.randn(d, d, dtype=torch.float64), torch.randn(d, dtype=torch.float64)

    def loss(mean, cov):
        return ((cov @ weight).square().sum() + (cov @ direction) @ mean + mean.pow(4).sum() - torch.logdet(cov)) / 10

    return loss


def euclidean_gradients(loss, mean, cov):
    mean, cov = mean.clone().requires_grad_(), cov.clone().requires_grad_()
    g_mean, g_cov = torch.autograd.grad(loss(mean, cov), (mean, cov))
    return g_mean, 0.5 * (g_cov + g_cov.mT)


def test_without_momentum_it_is_structured_natural_gradient_descent():
    """Eq. sngd: mu <- mu - gamma Sigma g_mu, L <- L Exp(-gamma L^T g_Sigma L), with beta = 2 gamma, to 1e-12."""
    gamma, loss = 0.03, target_loss("covariance")
    q = gnomon.Gaussian(3, order=None, loc=torch.randn(3, dtype=torch.float64), dtype=torch.float64)
    mean, L = q.loc.detach().clone(), q.factor_matrix().detach().clone()
    optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=2 * gamma))
    for _ in range(20):
        optimizer.zero_grad()
        loss(q.loc, q.covariance()).backward()
        optimizer.step()
        g_mean, g_cov = euclidean_gradients(loss, mean, L @ L.mT)
        mean = mean - gamma * L @ (L.mT @ g_mean)
        L = L @ symmetric_exp(-gamma * L.mT @ g_cov @ L)
        torch.testing.assert_close(q.loc, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(q.covariance(), L @ L.mT, rtol=1e-12, atol=1e-12)


def test_without_momentum_the_precision_form_is_natural_gradient_descent_too():
    """Eq. sngd_dl's B form: P <- P Exp(gamma P^-1 g_Sigma P^-T), to first order the same steps in (mu, Sigma)."""
    loss = target_loss("precision")

    def one_step(form, gamma):
        torch.manual_seed(1)
        q = gnomon.Gaussian(3, form=form, order=None, loc=torch.randn(3, dtype=torch.float64), dtype=torch.float64)
        optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=2 * gamma))
        loss(q.loc, q.covariance()).backward()
        optimizer.step()
        return torch.cat([q.loc.detach(), q.covariance().detach().flatten()])

    gaps = [float((one_step("covariance", s) - one_step("precision", s)).norm()) for s in (1e-2, 1e-3)]
    assert math.log10(gaps[0] / gaps[1]) > 1.9

    gamma, q = 0.02, random_gaussian(g.Dense(3), "precision")[0]
    q = gnomon.Gaussian(3, form="precision", order=None, loc=q.loc.detach(), init=q.covariance().detach())
    P, c = q.factor_matrix().detach(), q.element()[-1].detach().clone()
    mean, cov = q.loc.detach(), q.covariance().detach()
    g_mean, g_cov = euclidean_gradients(loss, mean, cov)
    optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=2 * gamma))
    loss(q.loc, q.covariance()).backward()
    optimizer.step()
    # Natural parameters: g_1 = g_Sigma, g_2 = (g_mu - 2 g_Sigma mu) / 2; the row moves with both.
    inv = torch.linalg.inv(P)
    wanted_P = P @ symmetric_exp(gamma * inv @ g_cov @ inv.mT)
    torch.testing.assert_close(q.factor_matrix(), wanted_P, rtol=1e-12, atol=1e-12)
    step = gamma * (inv @ g_mean)
    wanted_c = c @ symmetric_exp(gamma * inv @ g_cov @ inv.mT) + step
    torch.testing.assert_close(q.element()[-1], wanted_c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_with_momentum_it_equals_an_independent_reference(form):
    """Heavy ball in the coordinates of Eq. gnormal_coord2 with the chain rule between frames, written densely."""
    loss, beta, alpha, d = target_loss(form), 0.05, 0.8, 3
    loc = torch.randn(d, dtype=torch.float64)
    q = gnomon.Gaussian(d, form=form, order=None, loc=loc, dtype=torch.float64)
    optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=beta, momentum=alpha))

    F, u = torch.eye(d, dtype=torch.float64), loc if form == "covariance" else -loc
    w_F, w_u = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)

    def moments(F, u):
        if form == "covariance":
            return u, F @ F.mT
        return -torch.linalg.solve(F.mT, u), torch.linalg.inv(F @ F.mT)

    sign = 1 if form == "covariance" else -1
    for _ in range(30):
        optimizer.zero_grad()
        loss(q.loc, q.covariance()).backward()
        optimizer.step()

        F_var, u_var = F.clone().requires_grad_(), u.clone().requires_grad_()
        g_F, g_u = torch.autograd.grad(loss(*moments(F_var, u_var)), (F_var, u_var))
        if form == "covariance":  # A = [[L, mu], [0, 1]]
            eta_F, eta_u = F.mT @ g_F, F.mT @ g_u / math.sqrt(2)
        else:  # B = [[P, 0], [c, 1]]
            eta_F, eta_u = -(F.mT @ g_F + torch.outer(u, g_u)), -g_u / math.sqrt(2)
        eta_F = 0.25 * (eta_F + eta_F.mT)
        m_F, m_u = alpha * w_F + beta * eta_F, alpha * w_u + beta * eta_u
        E = symmetric_exp(-sign * m_F / 2)
        if form == "covariance":
            u = u - F @ m_u / math.sqrt(2)
            w_F, w_u = m_F, E.mT @ m_u
        else:
            u = E.mT @ u + m_u / math.sqrt(2)
            w_F, w_u = m_F + 0.5 * torch.outer(m_u, m_u), m_u
        F = F @ E
        mean, cov = moments(F, u)
        torch.testing.assert_close(q.loc, mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(q.covariance(), cov, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("form", slow_where(FORMS, lambda form: form == "precision"))
@pytest.mark.parametrize("group", LINEAR, ids=repr)
def test_maximum_likelihood_recovers_the_moments(group, form):
    """On the submanifold the known optimum of the cross-entropy is the target itself."""
    _, target = random_gaussian(group, form)
    q = gnomon.Gaussian(group, form=form, dtype=torch.float64)
    optimizer = gnomon.moving_frame(torch.optim.LBFGS(q.parameters(), line_search_fn="strong_wolfe"))

    def closure():
        optimizer.zero_grad()
        loss = kl_divergence(target, q.to_distribution())
        loss.backward()
        return loss

    for _ in range(15):
        optimizer.step(closure)
    assert kl_divergence(target, q.to_distribution()).item() < 1e-9


@pytest.mark.parametrize("group", [g.Arrow(5), g.LowRank(5, 2)], ids=repr)
def test_repr_has_the_arguments(group):
    q = gnomon.Gaussian(group, form="precision", dtype=torch.float32)
    assert repr(q) == f"Gaussian({group!r}, precision, order=2, torch.float32)"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gnomon.Gaussian(3, form="natural"), "form must be 'covariance' or 'precision', got 'natural'"),
        (lambda: gnomon.Gaussian(3, loc=torch.zeros(4)), r"loc has shape \(4,\), expected \(3,\)"),
        (lambda: gnomon.Gaussian(1, loc=torch.tensor([math.nan])), "loc holds nan; give finite values"),
        (lambda: gnomon.Gaussian(2, init=-torch.eye(2)), "init is not positive definite"),
        (lambda: gnomon.Gaussian(g.Kronecker(g.Dense(2), g.Dense(2))), "needs a matrix algebra"),
        (lambda: gnomon.Gaussian(2).kl_divergence(gnomon.SPD(2)), "q must be a gnomon.Gaussian"),
        (lambda: gnomon.Gaussian(2).log_prob(torch.zeros(3)), "vectors of length 2"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()
