"""Points that are low rank plus diagonal: values, derivatives, and optimizers that move them."""

import copy
import math

import pytest
import torch
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal

import gnomon
from gnomon import groups as g
from gnomon.optim import StructuredNewton
from support.matrices import F64, close

FORMS = ("covariance", "precision")


def matrix_of(k, rank, batch=()):
    loadings, noise = torch.randn(*batch, k, rank, dtype=F64), 0.5 + torch.rand(*batch, k, dtype=F64)
    return loadings @ loadings.mT + torch.diag_embed(noise.square())


def random_gaussian(k=6, rank=2, form="covariance", batch=()):
    tau, loc = matrix_of(k, rank, batch), torch.randn(*batch, k, dtype=F64)
    covariance = tau if form == "covariance" else torch.linalg.inv(tau)
    q = gnomon.Gaussian(g.LowRank(k, rank), form=form, loc=loc, init=covariance, batch_shape=batch)
    return q, MultivariateNormal(loc, covariance)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("form", ["outer", "inverse"])
def test_methods_equal_their_dense_twins(form, batch):
    tau = matrix_of(6, 2, batch)
    tau = tau if form == "outer" else torch.linalg.inv(tau)
    point = gnomon.SPD(g.LowRank(6, 2), factor=form, init=tau, batch_shape=batch)
    x = torch.randn(4, *batch, 6, dtype=F64)
    column = x.unsqueeze(-1)
    close(point.matrix(), tau, 1e-8)
    close(point.matvec(x), (tau @ column).squeeze(-1), 1e-8)
    close(point.solve(x), torch.linalg.solve(tau, column).squeeze(-1), 1e-8)
    close(point.quad(x), (column.mT @ tau @ column).squeeze(-1, -2), 1e-8)
    close(point.inv_quad(x), (column.mT @ torch.linalg.solve(tau, column)).squeeze(-1, -2), 1e-8)
    close(point.logdet(), torch.logdet(tau), 1e-8)
    A = point.factor_matrix()
    close(A @ A.mT, tau if form == "outer" else torch.linalg.inv(tau), 1e-8)
    assert point.sample((2, 5)).shape == (2, 5, *batch, 6)
    assert point.distance(point).abs().max() < 1e-6


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("form", FORMS)
def test_equals_multivariate_normal(form, batch):
    q, wanted = random_gaussian(form=form, batch=batch)
    x = torch.randn(5, *batch, 6, dtype=F64)
    close(q.loc, wanted.loc)
    close(q.covariance(), wanted.covariance_matrix, 1e-8)
    close(q.precision(), wanted.precision_matrix, 1e-8)
    close(q.log_prob(x), wanted.log_prob(x), 1e-8)
    close(q.entropy(), wanted.entropy(), 1e-8)
    close(q.logdet(), torch.logdet(wanted.covariance_matrix), 1e-8)
    close(q.to_distribution().log_prob(x), wanted.log_prob(x), 1e-8)
    assert q.rsample((2, 6)).shape == (2, 6, *batch, 6)


def test_is_torchs_low_rank_normal():
    q, _ = random_gaussian()
    loadings, noise = q.structure.covariance_factors(q.affine.split(q.element())[0])
    other = LowRankMultivariateNormal(q.loc, loadings, noise.square())
    x = torch.randn(4, 6, dtype=F64)
    close(q.log_prob(x), other.log_prob(x))


@pytest.mark.parametrize("form", FORMS)
def test_samples_have_the_moments(form):
    q, wanted = random_gaussian(4, 1, form)
    draws = q.sample(200_000)
    torch.testing.assert_close(draws.mean(0), wanted.loc, rtol=0.03, atol=0.03)
    torch.testing.assert_close(draws.T.cov(), wanted.covariance_matrix, rtol=0.05, atol=0.05)


# ---------------------------------------------------------------------- derivatives
@pytest.mark.parametrize("order", [1, 2, None])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_fast_path_has_right_first_and_second_derivatives(form, order, batch):
    structure = g.LowRank(5, 2)
    q = gnomon.Gaussian(structure, form=form, order=order, init=matrix_of(5, 2), project=True, batch_shape=batch)
    x, y = torch.randn(2, 3, *batch, 5, dtype=F64).unbind()

    def loss(q):
        extra = (q.covariance().sin().sum() + q.logdet().square().sum()) + (q.loc**3).sum()
        return q.log_prob(x).square().sum() + q.log_prob(y).exp().sum() + extra

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = q

        def forward(self):
            return loss(self.q)

    def at(eta):
        return torch.func.functional_call(Wrapper(), {"q.eta": eta}, ())

    assert q._at_origin()
    zero = torch.zeros_like(q.eta)
    (fast,) = torch.autograd.grad(loss(q), q.eta)
    close(fast, torch.func.grad(at)(zero), 1e-8)
    (grad,) = torch.autograd.grad(loss(q), q.eta, create_graph=True)
    v = torch.randn_like(grad)
    (product,) = torch.autograd.grad((grad * v).sum(), q.eta)
    close(product, torch.func.jvp(torch.func.grad(at), (zero,), (v,))[1], 1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_densities_by_parts_of_the_features_and_broadcast_vectors(form, monkeypatch):
    monkeypatch.setattr("gnomon.groups.low_rank.COLUMNS", 4)
    q, wanted = random_gaussian(form=form, batch=(3,))
    x = torch.randn(5, 1, 6, dtype=F64)
    close(q.log_prob(x), wanted.log_prob(x), 1e-8)
    weights = torch.randn(5, 3, dtype=F64)
    (fast,) = torch.autograd.grad((weights * q.log_prob(x)).sum(), q.eta)
    (plain,) = torch.autograd.grad((weights * q.log_prob(x.clone().requires_grad_())).sum(), q.eta)
    close(fast, plain)


def test_gradients_in_the_vectors():
    q, _ = random_gaussian()
    scores = torch.func.vmap(torch.func.grad(q.log_prob))(torch.zeros(2, 6, dtype=F64))
    close(scores, (q.precision() @ q.loc).expand(2, -1), 1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_the_step_of_the_mean_is_its_natural_gradient(form):
    """A step beta in the coordinates moves the mean by ``beta / 2 Sigma g``."""
    q, _ = random_gaussian(form=form)
    direction, start = torch.randn(6, dtype=F64), q.loc.detach()
    optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=0.02))
    (direction @ q.loc).backward()
    wanted = start - 0.01 * q.covariance().detach() @ direction
    optimizer.step()
    close(q.loc.detach(), wanted)


# ---------------------------------------------------------------------- optimizers
def factor_data(n=400, p=12, r=2, noise=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    loadings = torch.randn(p, r, dtype=F64, generator=generator)
    factors, errors = (torch.randn(n, size, dtype=F64, generator=generator) for size in (r, p))
    return factors @ loadings.mT + noise * errors


def best_loss(X, structure):
    centred = X - X.mean(0)
    S = centred.mT @ centred / len(X)
    A = structure.to_dense(structure.factor(S))
    return -MultivariateNormal(X.mean(0), A @ A.mT).log_prob(X).mean()


OPTIMIZERS = {
    "SGD": (lambda p: gnomon.moving_frame(torch.optim.SGD(p, lr=0.3)), 400),
    "momentum": (lambda p: gnomon.moving_frame(torch.optim.SGD(p, lr=0.1, momentum=0.9), max_step=1.0), 300),
    "Adam": (lambda p: gnomon.moving_frame(torch.optim.Adam(p, lr=0.03)), 600),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_find_the_maximum_likelihood(name):
    X, structure = factor_data(), g.LowRank(12, 2)
    q = gnomon.Gaussian(structure, init=X.var(0), dtype=F64)
    build, steps = OPTIMIZERS[name]
    optimizer = build(q.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -q.log_prob(X).mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach() - best_loss(X, structure)) < 1e-3


@pytest.mark.parametrize("noise", [1.0, 0.03])
def test_lbfgs_needs_few_iterations_from_a_diagonal(noise):
    X, structure = factor_data(noise=noise), g.LowRank(12, 2)
    q = gnomon.Gaussian(structure, loc=X.mean(0), init=X.var(0), dtype=F64)
    optimizer = gnomon.optim.LBFGS(q.parameters())

    def closure():
        optimizer.zero_grad()
        loss = -q.log_prob(X).mean()
        loss.backward()
        return loss

    for _ in range(60):
        optimizer.step(closure)
    assert float(closure().detach() - best_loss(X, structure)) < 1e-6


def test_torch_lbfgs_and_line_searches_work_too():
    X, structure = factor_data(), g.LowRank(12, 2)
    q = gnomon.Gaussian(structure, form="precision", init=X.var(0), dtype=F64)
    optimizer = gnomon.moving_frame(torch.optim.LBFGS(q.parameters(), line_search_fn="strong_wolfe"))

    def closure():
        optimizer.zero_grad()
        loss = -q.log_prob(X).mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(8)]
    assert losses[-1] < losses[0] - 1
    assert math.isfinite(losses[-1])


def test_a_batch_of_points_moves_as_each_alone():
    X = factor_data()
    together = gnomon.Gaussian(g.LowRank(12, 2), init=X.var(0), dtype=F64, batch_shape=(2,))
    alone = gnomon.Gaussian(g.LowRank(12, 2), init=X.var(0), dtype=F64)
    for q in (together, alone):
        optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=0.1, momentum=0.9))
        for _ in range(5):
            optimizer.zero_grad()
            x = X.unsqueeze(1) if q is together else X
            (-q.log_prob(x).mean(0)).sum().backward()
            optimizer.step()
    close(together.covariance()[1], alone.covariance())


def test_elements_that_would_overflow_stay():
    q = gnomon.SPD(g.LowRank(4, 1), dtype=torch.float32, batch_shape=(2,))
    start = q.matrix().detach()
    with torch.no_grad():
        q.eta[0] = 1e30
        q.eta[1] = 0.1
    assert q.fold().tolist() == [False, True]
    close(q.matrix()[0].detach(), start[0], 1e-6)


def test_structured_newton_learns_a_low_rank_inverse_hessian():
    """On a quadratic with H^-1 = B B^T + D the preconditioner becomes H^-1."""
    tau = matrix_of(8, 2)
    hessian = torch.linalg.inv(tau)
    x = torch.nn.Parameter(torch.randn(8, dtype=F64))
    optimizer = StructuredNewton([x], g.LowRank(8, 2), precond_lr=0.2, hessian="exact")
    for _ in range(300):
        optimizer.step(lambda: 0.5 * x @ hessian @ x)
    structure = g.LowRank(8, 2)
    A = structure.to_dense(structure.unpack(optimizer.state[x]["frame"]))
    close(A @ A.mT, tau, 1e-3)
    assert x.detach().abs().max() < 1e-6


# ---------------------------------------------------------------------- as modules
def test_copies_and_states():
    q, _ = random_gaussian()
    twin = copy.deepcopy(q)
    other = gnomon.Gaussian(g.LowRank(6, 2), dtype=F64)
    other.load_state_dict(q.state_dict())
    x = torch.randn(3, 6, dtype=F64)
    for copied in (twin, other):
        close(copied.log_prob(x), q.log_prob(x))
    with pytest.raises(RuntimeError, match=r"LowRankAffine\(LowRank\(6, rank=2\)"):
        gnomon.Gaussian(g.LowRank(6, 1), dtype=F64).load_state_dict(q.state_dict())
    assert q.float().log_prob(x.float()).dtype == torch.float32
    assert "LowRank(6, rank=2)" in repr(q)


def test_forty_thousand_dimensions():
    """A full covariance would take 7 GB in float32."""
    d = 42_000
    q = gnomon.Gaussian(g.LowRank(d, 8), dtype=torch.float32)
    optimizer = gnomon.moving_frame(torch.optim.SGD(q.parameters(), lr=1e-4, momentum=0.9))
    X = torch.randn(16, d) + torch.randn(16, 1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = -q.log_prob(X).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))
    assert q.rsample(2).shape == (2, d)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gnomon.SPD(g.LowRank(4), factor="inner"), "factor cannot be 'inner' for LowRank"),
        (lambda: gnomon.SPD(g.LowRank(4), init=matrix_of(4, 3)), "init is not on the submanifold"),
        (lambda: gnomon.Gaussian(g.LowRank(4)).log_prob(torch.zeros(3)), "vectors of length 4"),
        (lambda: StructuredNewton([torch.nn.Parameter(torch.zeros(4))], g.LowRank, form="B"), "form must be 'A'"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_an_init_off_the_submanifold_can_be_projected():
    tau = matrix_of(6, 4)
    point = gnomon.SPD(g.LowRank(6, 2), init=tau, project=True)
    close(point.matrix().diagonal(), tau.diagonal(), 0.05)
