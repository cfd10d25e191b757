"""How far a step goes: any learning rate, max_step, clipping."""

import math

import pytest
import torch
from torch import optim

import gnomon
from gnomon import groups as g
from gnomon import riemannian
from gnomon.problems import MetricNearness, random_spd
from gnomon.testing import random_element
from support.framed import Velocity, descend, generator
from support.marks import slow_where
from support.structures import STRUCTURES


@pytest.mark.slow
@pytest.mark.parametrize("form", slow_where(["outer", "inner", "inverse"], lambda form: form != "outer"))
@pytest.mark.parametrize("lr", slow_where([1e-3, 1e-1, 1.0, 1e1, 1e3], lambda lr: lr < 1e3))
@pytest.mark.parametrize(
    "group", slow_where(STRUCTURES, lambda group: not isinstance(group, (g.Dense, g.Triangular, g.Arrow))), ids=repr
)
def test_no_learning_rate_leaves_the_manifold(group, lr, form):
    """float32, max_step=1: 200 steps stay finite and positive definite."""
    problem = MetricNearness.random(group.k, 100.0, dtype=torch.float32, generator=generator())
    point = gnomon.SPD(group, factor=form, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=lr, momentum=0.9), max_step=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        problem(point).backward()
        optimizer.step()
        factor = point.factor_matrix().detach().double()
        assert bool(factor.isfinite().all())
        assert float(torch.linalg.svdvals(factor).min()) > 0
    assert optimizer.skipped_steps == 0
    torch.linalg.cholesky(factor @ factor.mT)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("lr", [1e-3, 1.0, 1e3])
def test_no_learning_rate_spoils_a_gaussian(form, lr):
    x = torch.randn(50, 4, generator=generator()) @ torch.randn(4, 4, generator=generator(1)) + 3
    q = gnomon.Gaussian(g.Arrow(4), form=form, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(q.parameters(), lr=lr, momentum=0.9), max_step=1.0)
    assert math.isfinite(descend(optimizer, lambda: -q.log_prob(x).mean(), 200))
    assert optimizer.skipped_steps == 0
    torch.linalg.cholesky(q.covariance().detach().double())


ANY_RATE = {
    "sgd": lambda p, lr: optim.SGD(p, lr=lr),
    "nesterov": lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "adam": lambda p, lr: optim.Adam(p, lr=lr),
    "amsgrad": lambda p, lr: optim.AdamW(p, lr=lr, amsgrad=True),
    "rmsprop": lambda p, lr: optim.RMSprop(p, lr=lr, momentum=0.5, centered=True),
    "adagrad": lambda p, lr: optim.Adagrad(p, lr=lr),
    "nadam": lambda p, lr: optim.NAdam(p, lr=lr),
    "rprop": lambda p, lr: optim.Rprop(p, lr=lr),
    "lbfgs": lambda p, lr: optim.LBFGS(p, lr=lr, max_iter=3, line_search_fn="strong_wolfe"),
    "third party": lambda p, lr: Velocity(p, lr),
}


def likelihood(point, samples):
    """Minus the log-likelihood; with fewer samples than dimensions it has no minimum."""
    if isinstance(point, gnomon.Gaussian):
        return -point.log_prob(samples).mean()
    return point.inv_quad(samples).mean() + point.logdet()


def points_of_every_form(group):
    for form in ("outer", "inverse") if isinstance(group, g.LowRank) else ("outer", "inner", "inverse"):
        yield gnomon.SPD(group, factor=form, dtype=torch.float32)
    if not isinstance(group, g.Kronecker):
        for form in ("covariance", "precision"):
            yield gnomon.Gaussian(group, form=form, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a point would be too near:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:a gradient or step of a manifold parameter:RuntimeWarning")
@pytest.mark.parametrize("samples", [4, 20])
@pytest.mark.parametrize("group", [*STRUCTURES, g.LowRank(8, 2)], ids=repr)
def test_no_rate_of_any_optimizer_leaves_the_manifold_at_defaults(group, samples):
    """float32: each form with another optimizer and rate; the loss falls where the rate is sensible."""
    x = torch.randn(samples, 8, generator=generator()) @ torch.randn(8, 8, generator=generator(1)) + 1
    rates = [(name, lr) for lr in (1e3, 0.03, 3.0) for name in ANY_RATE]
    first = STRUCTURES.index(group) if group in STRUCTURES else 0
    for number, point in enumerate(points_of_every_form(group)):
        name, lr = rates[(7 * first + 11 * number + samples) % len(rates)]
        start = likelihood(point, x).item()
        optimizer = gnomon.moving_frame(ANY_RATE[name](point.parameters(), lr))
        end = descend(optimizer, lambda p=point: likelihood(p, x), 60)
        factor = point.factor_matrix().detach().double()
        assert bool(factor.isfinite().all())
        torch.linalg.cholesky(factor @ factor.mT)
        assert math.isfinite(end)
        if lr == 0.03 and samples == 20:
            assert end < start, (name, lr)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a point would be too near:RuntimeWarning")
@pytest.mark.parametrize("lr", [0.01, 1e3])
@pytest.mark.parametrize("group", [g.Dense(8), g.Arrow(8, rank=2), g.LowRank(8, 2)], ids=repr)
def test_no_rate_spoils_a_variational_fit(group, lr):
    """The ELBO of a logistic regression by 64 draws; benchmarks/safety.py has all structures and optimizers."""
    x = 3 * torch.randn(20, 8, generator=generator())
    labels = (x.sum(1) > 0).float().expand(64, 20)

    def elbo(q):
        torch.manual_seed(0)
        w = q.rsample((64,))
        fit = -torch.nn.functional.binary_cross_entropy_with_logits(w @ x.T, labels, reduction="sum") / 64
        return fit - 0.5 * w.square().sum(-1).mean() + q.entropy()

    for form, name in (("covariance", "adam"), ("precision", "nesterov"), ("covariance", "lbfgs")):
        q = gnomon.Gaussian(group, form=form, dtype=torch.float32)
        start = elbo(q).item()
        end = -descend(gnomon.moving_frame(ANY_RATE[name](q.parameters(), lr)), lambda q=q: -elbo(q), 60)
        assert math.isfinite(end)
        torch.linalg.cholesky(q.covariance().detach().double())
        assert lr > 1 or end > start


@pytest.mark.parametrize("group", [g.Dense(6), g.Triangular(6), g.Arrow(6), g.LowRank(6, 2)], ids=repr)
def test_a_loss_without_a_minimum_does_not_make_a_point_singular(group):
    """Fewer samples than dimensions: the condition number grows until float32 can hold no more."""
    x = torch.randn(1, 6, generator=generator())
    point = gnomon.SPD(group, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=30.0, momentum=0.9))
    with pytest.warns(RuntimeWarning, match="a point would be too near to a singular matrix for torch.float32"):
        descend(optimizer, lambda: likelihood(point, x), 120)
    singular_values = torch.linalg.svdvals(point.factor_matrix().detach().double())
    assert 1e4 < float(singular_values.max() / singular_values.min()) < 1e8
    assert optimizer.skipped_steps > 0


@pytest.mark.parametrize("name", ["sgd", "adam", "lbfgs"])
def test_below_the_bound_nothing_changes(name):
    """Bit for bit as without a bound."""
    target = random_spd(5, 3.0, generator=generator())

    def path(group, **options):
        point = gnomon.SPD(group, dtype=torch.float64)
        optimizer = gnomon.moving_frame(ANY_RATE[name](point.parameters(), 0.1), **options)
        descend(optimizer, lambda: (target * point.matrix()).sum() - point.logdet(), 30)
        return point.frame

    for group in (g.Dense(5), g.Arrow(5), g.Kronecker(g.Dense(1), g.Toeplitz(5))):
        assert torch.equal(path(group), path(group, max_step=None))


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("group", [g.Dense(400), g.Arrow(400), g.LowRank(400, 2)], ids=repr)
def test_the_bound_does_not_hide_rates_in_high_dimension(group, form):
    """No whitened coordinate of a mean moves by more than max_step: many that move a little are not cut back."""
    moved = []
    for lr in (0.1, 0.3):
        q = gnomon.Gaussian(group, form=form)
        optimizer = gnomon.moving_frame(optim.Adam(q.parameters(), lr=lr))
        (-q.log_prob(torch.full((400,), 5.0))).backward()
        q.eta.grad[..., :-400] = 0
        optimizer.step()
        moved.append(float(q.loc.detach().mean()))
    assert moved[1] == pytest.approx(3 * moved[0], rel=0.05)


@pytest.mark.parametrize("transport", ["auto", "corrected", "none"])
@pytest.mark.parametrize("group", [g.Triangular(6), g.Heisenberg(6, 1, 1)], ids=repr)
def test_corrected_transport_comes_with_a_bound(group, transport):
    """With the correction no direction of tau changes by more than a factor e, also without ``max_step``."""
    point = gnomon.SPD(group, order=None, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=100.0), transport=transport, max_step=None)
    (random_spd(6, generator=generator()) * point.matrix()).sum().backward()
    optimizer.step()
    change = torch.linalg.eigvalsh(point.matrix().detach()).log().abs().max().item()
    assert (change <= 1.001) == (transport != "none")


def test_the_bound_does_not_grow_tighter_with_size():
    """Arrow to 0.1 I: as fast at k = 10,000 as at k = 10."""
    for k in (10, 10_000):
        point = gnomon.SPD(g.Arrow(k))
        optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=0.3, momentum=0.5))
        descend(optimizer, lambda p=point: p.group.squared_norm(p.element()) / 0.1 - p.logdet(), 40)
        torch.testing.assert_close(point.quad(torch.eye(1, k)), torch.tensor([0.1]), rtol=1e-3, atol=0.0)


def test_kronecker_steps_respect_the_radius():
    group = g.Kronecker(g.Dense(2), g.Dense(3))
    point = gnomon.SPD(group, order=None, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=100.0), max_step=1.0)
    point.logdet().backward()  # the common scale, which both factors move
    optimizer.step()
    change = torch.linalg.eigvalsh(point.matrix().detach()).log()
    torch.testing.assert_close(change, torch.full((6,), -1.0, dtype=torch.float64), rtol=0.3, atol=0.0)


def test_a_cut_step_takes_its_momentum_along_and_spares_the_rest_of_the_batch():
    point = gnomon.SPD(3, batch_shape=(2,), dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=1.0, momentum=0.9), max_step=0.5)
    scale = torch.tensor([10.0, 0.01], dtype=torch.float64)
    (scale * point.logdet()).sum().backward()
    grad = point.eta.grad.clone()
    optimizer.step()
    buffer = optimizer.state[point.eta]["momentum_buffer"]
    torch.testing.assert_close(
        torch.linalg.matrix_norm(buffer[0], 2), torch.tensor(0.5, dtype=torch.float64), rtol=0.1, atol=0.0
    )
    torch.testing.assert_close(buffer[1], grad[1])


def test_gradient_clipping_is_geodesic_clipping():
    point = gnomon.SPD(g.Arrow(6), dtype=torch.float64)
    point.frame.copy_(point.group.pack(random_element(point.group)))
    tau = point.matrix().detach()
    weight = random_spd(6, generator=generator())
    (weight * point.matrix()).sum().backward()
    length = torch.nn.utils.clip_grad_norm_(point.parameters(), 0.25)
    assert float(length) > 0.25
    gnomon.moving_frame(optim.SGD(point.parameters(), lr=1e-4)).step()
    assert riemannian.distance(tau, point.matrix()).item() == pytest.approx(0.25e-4, rel=1e-3)


def test_installing_again_changes_the_settings():
    point = gnomon.SPD(3, dtype=torch.float64)
    optimizer = gnomon.moving_frame(gnomon.moving_frame(optim.SGD(point.parameters(), lr=10.0)), max_step=0.5)
    point.logdet().backward()
    optimizer.step()
    change = torch.linalg.eigvalsh(point.matrix().detach()).log()
    torch.testing.assert_close(change, torch.full((3,), -0.5, dtype=torch.float64), rtol=0.1, atol=0.0)


@pytest.mark.parametrize(
    "group",
    [
        g.Dense(80),
        g.Triangular(80),
        g.Affine(g.Dense(80)),
        g.Affine(g.Triangular(80, upper=True)),
        g.Toeplitz(80),
        g.Toeplitz(3),
        g.Dense(8),
        g.Arrow(80),
    ],
    ids=repr,
)
def test_quick_bounds_are_above_the_stretch(group):
    """So that steps are cut back as if it alone were known."""
    torch.manual_seed(0)
    eta = group.unpack(torch.randn(20, *group.storage_shape, dtype=torch.float64))
    quick, stretch = group.quick_stretch(eta), group.stretch(eta)
    if group in (g.Dense(8), g.Arrow(80)):
        assert quick is None
        return
    assert quick.shape == stretch.shape
    assert bool((quick > 0.9 * stretch).all())
    assert bool((quick < 3 * stretch).all())


@pytest.mark.parametrize("form", ["outer", "inverse"])
def test_steps_that_are_surely_short_are_as_those_that_are_looked_at(form):
    """Neither a quick bound nor a fold without a look at its result changes a step."""
    torch.manual_seed(0)
    gradients = 0.02 * torch.randn(5, 80, 80, dtype=torch.float64)
    ends = []
    for max_step in ("auto", None):
        point = gnomon.SPD(80, factor=form, dtype=torch.float64)
        optimizer = gnomon.moving_frame(torch.optim.SGD(point.parameters(), lr=1.0, momentum=0.5), max_step=max_step)
        for gradient in gradients:
            point.eta.grad = gradient.clone()
            assert gradient.norm() > 1
            optimizer.step()
        ends.append(point.frame)
    assert torch.equal(*ends)
