"""Natural gradients of the bound against automatic differentiation, for every structure and form."""

import pytest
import torch

import gnomon
from gnomon.groups import Arrow, BlockDiagonal, BlockTriangular, Dense, Diagonal, LowRank, Toeplitz, Triangular
from gnomon.vi.estimate import Estimator
from gnomon.vi.gradients import log_prob_of_noise, mean_of, path_gradient, price_gradient, pull, push, squared_length
from gnomon.vi.parameters import Parameters
from gnomon.vi.start import fit_quadratic
from gnomon.vi.steps import LONGEST_FACTOR_STEP, LONGEST_MEAN_STEP, NaturalSteps, squared_norm
from gnomon.vi.target import Target

D = 6
STRUCTURES = [
    Dense(D),
    Triangular(D),
    Diagonal(D),
    BlockDiagonal(D, 4),
    Arrow(D, 2),
    BlockTriangular((Dense(2), BlockDiagonal(4, 2))),
    Toeplitz(D),
    LowRank(D, 2),
]
CASES = [(group, form) for group in STRUCTURES for form in ("covariance", "precision")]


def some_gaussian(group, form, seed=0):
    torch.manual_seed(seed)
    q = gnomon.Gaussian(group, form=form, loc=torch.randn(D).double(), dtype=torch.float64)
    q.eta.data.normal_(std=0.5)
    q.fold()
    return q


def quadratic():
    a = torch.randn(D, D, dtype=torch.float64)
    precision = a @ a.mT / D + torch.eye(D, dtype=torch.float64)
    mean = torch.randn(D, dtype=torch.float64)
    return precision, mean


def bound(q, precision, mean):
    """The evidence lower bound of a Gaussian target in closed form, differentiable in the coordinates of q."""
    difference = q.loc - mean
    return -0.5 * (precision * q.covariance()).sum() - 0.5 * difference @ precision @ difference + q.entropy()


def gradient_by_autograd(q, precision, mean):
    q.zero_grad()
    bound(q, precision, mean).backward()
    return q.eta.grad.clone()


@pytest.mark.parametrize(("group", "form"), CASES, ids=str)
def test_price_gradient_is_the_gradient_of_the_bound(group, form):
    q = some_gaussian(group, form)
    precision, mean = quadratic()
    operator = gnomon.groups.SymmetricOperator(
        D, lambda rows: -rows @ precision, lambda h: -precision.diagonal()[h.where]
    )
    score = -precision @ (mean_of(q) - mean)
    found = q.group.pack(price_gradient(q, operator, score))
    torch.testing.assert_close(found, gradient_by_autograd(q, precision, mean))


@pytest.mark.parametrize(("group", "form"), CASES, ids=str)
def test_path_gradient_of_a_full_set_of_pairs_is_exact_for_a_gaussian_target(group, form):
    q = some_gaussian(group, form)
    precision, mean = quadratic()
    # Orthogonal pairs whose second moment is the identity: the expectation of a quadratic function has no error.
    z = D**0.5 * torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0]
    shift = push(q, z)
    plus, minus = (-(mean_of(q) + sign * shift - mean) @ precision for sign in (1, -1))
    found = path_gradient(q, z, (plus - minus) / 2, (plus + minus).mean(0) / 2)
    torch.testing.assert_close(q.group.pack(found), gradient_by_autograd(q, precision, mean))


@pytest.mark.parametrize(("group", "form"), CASES, ids=str)
def test_push_and_pull_are_adjoint_and_match_the_covariance(group, form):
    q = some_gaussian(group, form)
    x, y = torch.randn(2, 3, D, dtype=torch.float64)
    torch.testing.assert_close((push(q, x) * y).sum(), (x * pull(q, y)).sum())
    factor = push(q, torch.eye(D, dtype=torch.float64)).mT
    torch.testing.assert_close(factor @ factor.mT, q.covariance().detach())
    point = mean_of(q) + push(q, x)
    torch.testing.assert_close(log_prob_of_noise(q, x), q.log_prob(point).detach())
    assert squared_length(q, point[0]) == pytest.approx(float(x[0].square().sum()))


@pytest.mark.parametrize("price", [False, True])
@pytest.mark.parametrize("group", [Dense(D), Arrow(D, 2), LowRank(D, 2)], ids=str)
def test_estimates_average_to_the_gradient_and_to_the_gap(group, price):
    q = some_gaussian(group, "covariance")
    precision, mean = quadratic()
    target = Target(lambda x: -0.5 * ((x - mean) @ precision * (x - mean)).sum(-1), Parameters({"x": D}))
    estimator = Estimator(target, 8, torch.Generator().manual_seed(0), price)
    estimates = [estimator.estimate(q) for _ in range(50 if price else 600)]
    gradient = torch.stack([q.group.pack(e.gradient) for e in estimates]).mean(0)
    exact = gradient_by_autograd(q, precision, mean)
    scale = float(exact.norm())
    assert float((gradient - exact).norm()) < (1e-9 if price else 0.1) * scale
    gaps = torch.tensor([e.gap for e in estimates], dtype=torch.float64)
    error = float(gaps.std()) / len(gaps) ** 0.5
    assert abs(float(gaps.mean()) - scale**2) < 4 * error + 1e-9 * scale**2
    # The bound of each estimate is unbiased as well.
    elbos = torch.stack([e.log_ratios.mean() for e in estimates])
    exact = float(bound(q, precision, mean).detach())
    assert abs(float(elbos.mean()) - exact) < 4 * float(elbos.std()) / len(elbos) ** 0.5


def test_gradients_vanish_for_every_draw_where_q_is_the_target():
    q = some_gaussian(Arrow(D, 2), "covariance")
    precision, mean = q.precision().detach(), q.loc.detach()
    target = Target(lambda x: -0.5 * ((x - mean) @ precision * (x - mean)).sum(-1), Parameters({"x": D}))
    estimate = Estimator(target, 4, torch.Generator().manual_seed(0)).estimate(q)
    assert squared_norm(estimate.gradient) < 1e-20
    assert float(estimate.log_ratios.std()) < 1e-9


@pytest.mark.parametrize(("group", "form"), CASES, ids=str)
def test_quadratic_fit_has_no_gradient_left(group, form):
    precision, _ = quadratic()
    q = gnomon.Gaussian(group, form=form, init=1 / precision.diagonal(), dtype=torch.float64, project=True)
    fit_quadratic(q, precision)
    left = float(gradient_by_autograd(q, precision, q.loc.detach()).norm())
    assert left < (0.05 if isinstance(group, LowRank) else 1e-3)  # low rank converges as EM does


@pytest.mark.parametrize("group", [Dense(D), Arrow(D, 2), LowRank(D, 2)], ids=str)
def test_a_newton_step_brings_the_mean_to_the_mode(group):
    precision, mean = quadratic()
    q = gnomon.Gaussian(D, loc=mean + 0.1, init=torch.linalg.inv(precision), dtype=torch.float64)
    operator = gnomon.groups.SymmetricOperator(
        D, lambda rows: -rows @ precision, lambda h: -precision.diagonal()[h.where]
    )
    score = -precision @ (mean_of(q) - mean)
    NaturalSteps(q, 0.0).take(price_gradient(q, operator, score), rate=2.0)
    torch.testing.assert_close(mean_of(q), mean)


@pytest.mark.parametrize("group", [Dense(D), Arrow(D, 2), LowRank(D, 2), Diagonal(D)], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_bounded_whatever_the_gradient(group, momentum):
    q = some_gaussian(group, "covariance")
    steps = NaturalSteps(q, momentum)
    for _ in range(5):
        gradient = q.group.unpack(1e6 * torch.randn_like(q.frame))
        if not isinstance(group, LowRank):
            gradient = q.group.scale(gradient)  # in the coordinate space
        before, covariance = mean_of(q).clone(), q.covariance().detach()
        assert steps.take(gradient, 1.0)
        whitened = torch.linalg.solve(torch.linalg.cholesky(covariance), (mean_of(q) - before).unsqueeze(-1))
        assert float(whitened.norm()) <= LONGEST_MEAN_STEP * D**0.5 * (1 + 1e-9)
        ratios = torch.linalg.eigvals(torch.linalg.solve(covariance, q.covariance().detach())).real
        assert float(ratios.max()) < 2.72 ** (3 * LONGEST_FACTOR_STEP)
        assert float(ratios.min()) > 2.72 ** (-3 * LONGEST_FACTOR_STEP)


def test_momentum_is_an_average_so_that_the_rate_keeps_its_meaning():
    results = []
    for momentum in (0.0, 0.5):
        q = gnomon.Gaussian(Diagonal(D), dtype=torch.float64)
        steps = NaturalSteps(q, momentum)
        still = q.group.unpack(torch.zeros_like(q.frame))
        constant = (*still[:-1], torch.full_like(still[-1], 0.01))
        for _ in range(5):
            steps.take(constant, 0.1)
        results.append(mean_of(q).clone())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("many", [10**9, 1], ids=["in one batch", "one by one"])
def test_mean_hessian_is_that_of_autograd(many, monkeypatch):
    monkeypatch.setattr("gnomon.vi.target.MANY", many)
    target = Target(lambda x: (x[:, 0].exp() * x[:, 1:].square().sum(-1)).sin(), Parameters({"x": 4}))
    x, vectors = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    hessians = [torch.autograd.functional.hessian(lambda row: target(row[None]).sum(), row) for row in x]
    torch.testing.assert_close(target.mean_hessian(x)(vectors), vectors @ torch.stack(hessians).mean(0))
    assert target.gradient_evaluations == 12
    linear = Target(lambda x: x.sum(-1), Parameters({"x": 4}))
    assert not bool(linear.mean_hessian(x)(vectors).any())
