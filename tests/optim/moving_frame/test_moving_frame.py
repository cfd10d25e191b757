"""Any torch optimizer, on the manifold."""

import copy
import io
import math
import os
import warnings

import pytest
import torch
from torch import optim

import gnomon
from gnomon import groups as g
from gnomon import riemannian
from gnomon.problems import LogDet, MetricNearness, random_spd
from gnomon.testing import random_element
from support.structures import STRUCTURES


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Velocity(optim.Optimizer):
    """A third-party optimizer of the older sort: writes through .data and names its state in its own way."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(0.5).add_(p.grad)
                p.data.add_(velocity, alpha=-group["lr"])
        return loss


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.2),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.8),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.02, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.5),
    "nadam": lambda p: optim.NAdam(p, lr=0.05),
    "rprop": lambda p: optim.Rprop(p, lr=0.05),
    "lbfgs": lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "lbfgs, one iteration": lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe", max_iter=1, max_eval=30),
    "third party": lambda p: Velocity(p),
}


def descend(optimizer, loss, steps):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(closure)
    return loss().item()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("group", [g.Dense(6), g.Triangular(6), g.Heisenberg(6, 1, 1)], ids=repr)
def test_every_optimizer_converges(name, group):
    target = group.to_dense(random_element(group))
    problem = LogDet(torch.linalg.inv(target @ target.mT))
    point = gnomon.SPD(group, dtype=torch.float64)
    start = problem(point).item() - problem.minimum
    optimizer = gnomon.moving_frame(OPTIMIZERS[name](point.parameters()))
    gap = descend(optimizer, lambda: problem(point), 150) - problem.minimum
    assert gap < 2e-3 * start
    assert optimizer.skipped_steps == 0
    assert not bool(point.eta.any())


def test_momentum_is_exact_riemannian_heavy_ball():
    """Trajectory against the exact maps (Eq. rgd_mom) to 1e-10 over 60 steps."""
    for problem in (LogDet.random(6, generator=generator()), MetricNearness.random(6, generator=generator(1))):
        for form in ("outer", "inner", "inverse"):
            alpha, beta = 0.9, 0.05
            tau = 0.1 * random_spd(6, 3.0, generator=generator(2))
            point = gnomon.SPD(6, order=None, factor=form, init=tau)
            optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=beta, momentum=alpha))
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
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=beta, momentum=alpha, nesterov=True))
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


# ---------------------------------------------------------------------- what must hold: convergence
@pytest.mark.parametrize("problem", [LogDet, MetricNearness])
def test_lbfgs_solves_condition_10(problem):
    problem = problem.random(100, 10.0, generator=generator())
    point = gnomon.SPD(100, dtype=torch.float64)
    optimizer = gnomon.moving_frame(
        optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe", tolerance_grad=1e-10, tolerance_change=1e-14)
    )
    assert descend(optimizer, lambda: problem(point), 10) - problem.minimum < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_lbfgs_solves_nearness_of_condition_1000(seed):
    problem = MetricNearness.random(20, 1000.0, generator=generator(seed))
    point = gnomon.SPD(20, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe"))
    gap = descend(optimizer, lambda: problem(point), 40)
    assert optimizer.state[point.eta]["n_iter"] <= 1000
    assert gap < 1e-6

    fixed = gnomon.SPD(20, dtype=torch.float64)
    sgd = gnomon.moving_frame(optim.SGD(fixed.parameters(), lr=1e-2, momentum=0.9), max_step=1.0)
    assert descend(sgd, lambda: problem(fixed), 1000) > 1e-6  # a fixed step stalls


@pytest.mark.parametrize("form", ["outer", "inner", "inverse"])
@pytest.mark.parametrize("lr", [1e-3, 1e-1, 1.0, 1e1, 1e3])
@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
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


@pytest.mark.parametrize("form", ["covariance", "precision"])
@pytest.mark.parametrize("lr", [1e-3, 1.0, 1e3])
def test_no_learning_rate_spoils_a_gaussian(form, lr):
    x = torch.randn(50, 4, generator=generator()) @ torch.randn(4, 4, generator=generator(1)) + 3
    q = gnomon.Gaussian(g.Arrow(4), form=form, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(q.parameters(), lr=lr, momentum=0.9), max_step=1.0)
    assert math.isfinite(descend(optimizer, lambda: -q.log_prob(x).mean(), 200))
    assert optimizer.skipped_steps == 0
    torch.linalg.cholesky(q.covariance().detach().double())


@pytest.mark.parametrize("group", STRUCTURES, ids=repr)
def test_bfloat16_closes_the_gap(group):
    """100 steps on a well-conditioned log-det problem close at least 95% of the initial gap."""
    target = group.to_dense(random_element(group))
    problem = LogDet(torch.linalg.inv(target @ target.mT))
    point = gnomon.SPD(group, dtype=torch.bfloat16)
    half = LogDet(problem.C.bfloat16())
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=0.1, momentum=0.5))

    def gap():
        exact = gnomon.SPD(group, dtype=torch.float64)
        exact.frame.copy_(point.frame)
        return problem(exact).item() - problem.minimum

    start = gap()
    for _ in range(100):
        optimizer.zero_grad()
        half(point).backward()
        optimizer.step()
    assert point.frame.dtype == torch.bfloat16
    assert gap() < 0.05 * start


# ---------------------------------------------------------------------- transport
def test_the_correction_helps_momentum_on_triangular_factors():
    """Small steps, strong momentum: the corrected path stays closer to exact heavy ball than the plain one."""
    problem = MetricNearness.random(6, 10.0, generator=generator())
    alpha, beta = 0.9, 0.002

    def path(group, **options):
        point = gnomon.SPD(group, order=None, dtype=torch.float64)
        optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=beta, momentum=alpha), **options)
        points = []
        for _ in range(100):
            optimizer.zero_grad()
            problem(point).backward()
            optimizer.step()
            points.append(point.matrix().detach())
        return torch.stack(points)

    exact = path(g.Dense(6))
    plain = (path(g.Triangular(6), transport="none") - exact).norm()
    corrected = (path(g.Triangular(6), transport="auto") - exact).norm()
    assert corrected < 0.5 * plain


@pytest.mark.parametrize("transport", ["auto", "corrected", "none"])
@pytest.mark.parametrize("group", [g.Triangular(6), g.Heisenberg(6, 1, 1)], ids=repr)
def test_corrected_transport_comes_with_a_bound(group, transport):
    """With the correction no direction of tau changes by more than a factor e (and a little, at order 2)."""
    point = gnomon.SPD(group, order=None, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=100.0), transport=transport)
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


@pytest.mark.parametrize("max_step", [None, 1.0])
@pytest.mark.parametrize("group", [g.Dense(20), g.Triangular(20), g.Arrow(20, rank=3)], ids=repr)
def test_lbfgs_far_from_the_optimum(group, max_step):
    target = group.to_dense(
        group.exp(group.scale(tuple(1.5 * torch.randn(s, dtype=torch.float64) for s in group.shapes)))
    )
    problem = LogDet(torch.linalg.inv(target @ target.mT))
    point = gnomon.SPD(group, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe"), max_step=max_step)
    start = problem(point).item() - problem.minimum
    assert descend(optimizer, lambda: problem(point), 60) - problem.minimum < 1e-6 * start
    assert optimizer.skipped_steps == 0


def test_kronecker_steps_respect_the_radius():
    group = g.Kronecker(g.Dense(2), g.Dense(3))
    point = gnomon.SPD(group, order=None, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=100.0), max_step=1.0)
    point.logdet().backward()  # the common scale, which both factors move
    optimizer.step()
    assert point.distance(torch.eye(6, dtype=torch.float64)).item() <= 1 + 1e-9


def test_a_cut_step_takes_its_momentum_along_and_spares_the_rest_of_the_batch():
    point = gnomon.SPD(3, batch_shape=(2,), dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=1.0, momentum=0.9), max_step=0.5)
    scale = torch.tensor([10.0, 0.01], dtype=torch.float64)
    (scale * point.logdet()).sum().backward()
    grad = point.eta.grad.clone()
    optimizer.step()
    buffer = optimizer.state[point.eta]["momentum_buffer"]
    torch.testing.assert_close(buffer[0].norm(), torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(buffer[1], grad[1])


def test_adam_keeps_both_moments_in_one_frame_unless_told_otherwise():
    """Elementwise second moments do not turn with the frame; turning the first ones alone costs convergence."""
    group = g.Heisenberg(60, 3, 3)
    blocks = [torch.randn(shape, dtype=torch.float64) for shape in group.shapes]
    n = tuple(b / max(b.shape) ** 0.5 if b.ndim == 2 else 0.5 * b for b in blocks)
    factor = group.to_dense(group.exp(n))
    problem = LogDet(torch.linalg.inv(factor @ factor.mT))

    def gap(transport):
        point = gnomon.SPD(group, dtype=torch.float64)
        optimizer = gnomon.moving_frame(optim.Adam(point.parameters(), lr=0.1), transport=transport)
        return descend(optimizer, lambda: problem(point), 150) - problem.minimum

    assert gap("auto") == gap("none") < 0.1 * gap("corrected")


def test_vector_state_of_users_is_carried():
    group = g.Triangular(4)
    problem = MetricNearness.random(4, generator=generator())

    def carried():
        point = gnomon.SPD(group, dtype=torch.float64)
        optimizer = gnomon.moving_frame(Velocity(point.parameters(), lr=0.02))
        for _ in range(3):
            optimizer.zero_grad()
            problem(point).backward()
            optimizer.step()
        return optimizer.state[point.eta]["velocity"]

    plain = carried()
    gnomon.optim.vector_state[Velocity] = ("velocity",)
    try:
        corrected = carried()
    finally:
        del gnomon.optim.vector_state[Velocity]
    assert not torch.allclose(plain, corrected)


def test_lbfgs_vectors_of_mixed_parameters_are_found_by_their_place():
    from gnomon.optim.state import carried_vectors

    bias = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    point = gnomon.SPD(g.Triangular(3), dtype=torch.float64)
    tail = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = gnomon.moving_frame(optim.LBFGS([bias, point.eta, tail], line_search_fn="strong_wolfe", max_iter=3))
    target = torch.arange(5, dtype=torch.float64)

    def loss():
        return (bias - target).pow(4).sum() + (point.matrix() - 2).square().sum() + (tail - 1).square().sum()

    descend(optimizer, loss, 2)
    state = optimizer.state[bias]
    vectors = list(carried_vectors(optimizer, point.eta))
    assert len(vectors) == 2 + len(state["old_dirs"]) + len(state["old_stps"])
    assert all(v.shape == point.eta.shape for v in vectors)
    assert vectors[0].data_ptr() == state["d"][5:].data_ptr()


# ---------------------------------------------------------------------- a good citizen
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.cov = gnomon.SPD(g.Triangular(4))
        self.q = gnomon.Gaussian(g.Arrow(4), form="precision")

    def loss(self, x):
        y = self.linear(x)
        return self.cov.quad(y).mean() - self.cov.logdet() - self.q.log_prob(y).mean() + y.square().mean()


def train(model, optimizer, steps, seed, scheduler=None):
    data = generator(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=data)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model.loss(x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            return loss

        optimizer.step(closure)
        if scheduler:
            scheduler.step()


def optimizers(model):
    groups = [
        {"params": model.linear.parameters(), "lr": 0.05},
        {"params": [*model.cov.parameters(), *model.q.parameters()]},
    ]
    return {
        "sgd": lambda: optim.SGD(groups, lr=0.02, momentum=0.9),
        "adamw": lambda: optim.AdamW(groups, lr=0.02),
        "rmsprop": lambda: optim.RMSprop(groups, lr=0.01, momentum=0.9),
        "lbfgs": lambda: optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
    }


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop", "lbfgs"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name):
    def fresh():
        torch.manual_seed(0)
        model = Model()
        optimizer = gnomon.moving_frame(optimizers(model)[name]())
        return model, optimizer, optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    model, optimizer, scheduler = fresh()
    train(model, optimizer, 5, seed=1, scheduler=scheduler)
    checkpoint = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], checkpoint)
    train(model, optimizer, 5, seed=2, scheduler=scheduler)

    resumed, other, schedule = fresh()
    checkpoint.seek(0)
    for target, state in zip((resumed, other, schedule), torch.load(checkpoint), strict=True):
        target.load_state_dict(state)
    train(resumed, other, 5, seed=2, scheduler=schedule)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_copies_and_pickles_go_on_alone():
    model = Model()
    optimizer = gnomon.moving_frame(optimizers(model)["adamw"](), transport="corrected", max_step=0.3)
    train(model, optimizer, 3, seed=0)
    pair = copy.deepcopy((model, optimizer))
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    unpickled = torch.load(buffer, weights_only=False)
    train(model, optimizer, 3, seed=1)
    for twin, other in (pair, unpickled):
        assert type(other) is type(optimizer)
        assert isinstance(other, optim.AdamW)
        train(twin, other, 3, seed=1)
        for key, value in model.state_dict().items():
            assert torch.equal(value, twin.state_dict()[key]), key

    orphan = copy.deepcopy(optimizer)
    for p in orphan.param_groups[1]["params"]:
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="copy the model and the optimizer together"):
        orphan.step()


def test_state_follows_the_dtype():
    model = Model()
    optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    train(model, optimizer, 2, seed=0)
    model.double()
    saved = optimizer.state_dict()
    optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    optimizer.load_state_dict(saved)
    model.loss(torch.ones(2, 4, dtype=torch.float64)).backward()
    optimizer.step()
    assert optimizer.state[model.cov.eta]["momentum_buffer"].dtype == torch.float64


def test_ordinary_parameters_are_left_to_their_optimizer():
    torch.manual_seed(0)
    model, plain = Model(), torch.nn.Linear(4, 4)
    plain.load_state_dict(model.linear.state_dict())
    optimizer = gnomon.moving_frame(optim.Adam(model.parameters(), lr=0.1))
    reference = optim.Adam(plain.parameters(), lr=0.1)
    for seed in range(3):
        x = torch.randn(8, 4, generator=generator(seed))
        optimizer.zero_grad()
        model.loss(x).backward()
        for a, b in zip(plain.parameters(), model.linear.parameters(), strict=True):
            a.grad = b.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(plain.parameters(), model.linear.parameters(), strict=True):
        assert torch.equal(a, b)


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


def test_weight_decay_does_nothing_to_a_point():
    def run(decay):
        point = gnomon.SPD(4, init=3.0, dtype=torch.float64)
        optimizer = gnomon.moving_frame(optim.AdamW(point.parameters(), lr=0.05, weight_decay=decay))
        return descend(optimizer, lambda: LogDet(random_spd(4, generator=generator()))(point), 5)

    assert run(0.0) == run(0.5)


def test_parameter_groups_may_come_later():
    first, second = gnomon.SPD(3, dtype=torch.float64), gnomon.SPD(3, dtype=torch.float64)
    optimizer = gnomon.moving_frame(optim.SGD(first.parameters(), lr=0.1))
    first.matrix().sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
    (first.matrix().sum() + second.matrix().sum()).backward()
    optimizer.step()
    assert not bool(second.eta.any())
    assert not torch.allclose(second.frame, torch.eye(3, dtype=torch.float64))


def test_hooks_schedulers_and_scalers_work_once_each():
    point = gnomon.SPD(3)
    optimizer = optim.SGD(point.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    assert gnomon.moving_frame(optimizer) is optimizer
    assert repr(optimizer).startswith("SGD (")
    scaler = torch.amp.GradScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        scaler.scale(point.matrix().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert calls == ["post"]
    assert not torch.allclose(point.frame, torch.eye(3))
    _twin, copied = copy.deepcopy((point, optimizer))
    copied.register_step_post_hook(lambda *_: calls.append("copy"))
    copied.step()
    assert calls == ["post", "copy"]


def test_closures_by_keyword_and_schedulers_from_before():
    point = gnomon.SPD(3, dtype=torch.float64)
    plain = optim.SGD(point.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = gnomon.moving_frame(plain)

    def closure():
        optimizer.zero_grad()
        loss = point.matrix().sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimizer.step(closure=closure).item() == 3.0
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not bool(point.eta.any())
    assert not torch.allclose(point.frame, torch.eye(3, dtype=torch.float64))
    optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert "step" not in vars(optimizer)

    replaced = optim.SGD(point.parameters(), lr=0.1)
    replaced.step = print
    with pytest.raises(ValueError, match="call moving_frame before whatever replaces it"):
        gnomon.moving_frame(replaced)


def test_a_hook_that_clears_gradients_does_not_stop_the_fold():
    point = gnomon.SPD(3)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=0.1))
    optimizer.register_step_post_hook(lambda o, *_: o.zero_grad())
    point.matrix().sum().backward()
    optimizer.step()
    assert not bool(point.eta.any())
    assert not torch.allclose(point.frame, torch.eye(3))


def test_double_in_mid_training():
    model = Model()
    optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    train(model, optimizer, 2, seed=0)
    model.double()
    optimizer.zero_grad()
    model.loss(torch.ones(2, 4, dtype=torch.float64)).backward()
    optimizer.step()
    assert not bool(model.cov.eta.any())
    assert model.cov.frame.dtype == torch.float64


def test_lbfgs_copies_go_on_alone():
    point = gnomon.SPD(g.Triangular(4), dtype=torch.float64)
    problem = LogDet.random(4, generator=generator())
    optimizer = gnomon.moving_frame(optim.LBFGS(point.parameters(), line_search_fn="strong_wolfe", max_iter=2))
    descend(optimizer, lambda: problem(point), 2)
    twin, other = copy.deepcopy((point, optimizer))
    descend(optimizer, lambda: problem(point), 2)
    descend(other, lambda: problem(twin), 2)
    assert torch.equal(point.frame, twin.frame)


def test_an_unused_point_stays():
    used, unused = gnomon.SPD(3), gnomon.SPD(3)
    optimizer = gnomon.moving_frame(optim.Adam([*used.parameters(), *unused.parameters()], lr=0.1))
    used.matrix().sum().backward()
    optimizer.step()
    torch.testing.assert_close(unused.matrix(), torch.eye(3))


def test_installing_again_changes_the_settings():
    point = gnomon.SPD(3, dtype=torch.float64)
    optimizer = gnomon.moving_frame(gnomon.moving_frame(optim.SGD(point.parameters(), lr=10.0)), max_step=0.5)
    point.logdet().backward()
    optimizer.step()
    assert point.distance(torch.eye(3, dtype=torch.float64)).item() == pytest.approx(0.5, rel=0.02)


def _distributed_worker(rank, world_size, path, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)

    class Wrapped(Model):
        forward = Model.loss

    model = torch.nn.parallel.DistributedDataParallel(Wrapped())
    optimizer = gnomon.moving_frame(optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    for step in range(3):
        x = torch.randn(8, 4, generator=generator(step))[rank::world_size]
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    results[rank] = {k: v.clone() for k, v in model.module.state_dict().items()}
    torch.distributed.destroy_process_group()


def test_data_parallel_ranks_stay_together(tmp_path):
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_distributed_worker, (2, str(tmp_path / "store"), results), nprocs=2)
        first, second = results[0], results[1]
    torch.manual_seed(0)
    alone = Model()
    optimizer = gnomon.moving_frame(optim.SGD(alone.parameters(), lr=0.02, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        alone.loss(torch.randn(8, 4, generator=generator(step))).backward()
        optimizer.step()
    for key, value in alone.state_dict().items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-5)


class _Likelihood(torch.nn.Module):
    """A point beside an ordinary layer; the frames are compared as they are computed, not as they are sent."""

    def __init__(self, point):
        super().__init__()
        self.point, self.features = point, torch.nn.Linear(5, 5)

    def forward(self, x):
        z = x + 0.1 * self.features(x)
        if isinstance(self.point, gnomon.Gaussian):
            return -self.point.log_prob(z).mean()
        return self.point.inv_quad(z).mean() + self.point.logdet()


POINTS_OF_RANKS = {
    "dense": lambda: gnomon.SPD(5),
    "triangular": lambda: gnomon.SPD(g.Triangular(5)),
    "arrow": lambda: gnomon.SPD(g.Arrow(5, rank=2)),
    "Gaussian": lambda: gnomon.Gaussian(5),
    "Gaussian, triangular precision": lambda: gnomon.Gaussian(g.Triangular(5), form="precision"),
}
OPTIMIZERS_OF_RANKS = {
    "SGD": lambda p: gnomon.moving_frame(optim.SGD(p, lr=0.05, momentum=0.9)),
    "SGD, max_step": lambda p: gnomon.moving_frame(optim.SGD(p, lr=0.5, momentum=0.9), max_step=0.1),
    "Adam": lambda p: gnomon.moving_frame(optim.Adam(p, lr=0.05)),
    "torch's LBFGS": lambda p: gnomon.moving_frame(
        optim.LBFGS(p, max_iter=1, max_eval=5, line_search_fn="strong_wolfe")
    ),
    "LBFGS": lambda p: gnomon.optim.LBFGS(p, max_eval=5),
}
LINE_SEARCHES = {"torch's LBFGS": ("dense", "arrow"), "LBFGS": ("triangular", "Gaussian")}
"""Which evaluate the loss several times a step, and the points that are enough to see it."""


def _numbers(value):
    """All tensors of a state, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)


def _ranks_worker(rank, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    torch.set_num_threads(1)
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    for ranks in (pairs[rank // 2], torch.distributed.group.WORLD):
        for optimizer in OPTIMIZERS_OF_RANKS:
            for point in LINE_SEARCHES.get(optimizer, POINTS_OF_RANKS):
                _check_that_ranks_agree(rank, ranks, point, optimizer)
    torch.distributed.destroy_process_group()


def _check_that_ranks_agree(rank, ranks, name, rule):
    torch.manual_seed(rank)  # the first rank's weights are everybody's
    model = torch.nn.parallel.DistributedDataParallel(
        _Likelihood(POINTS_OF_RANKS[name]()), process_group=ranks, broadcast_buffers=False
    )
    optimizer = OPTIMIZERS_OF_RANKS[rule](model.parameters())
    for step in range(25):
        x = (1 + rank) * torch.randn(6, 5, generator=generator(100 * rank + step % 5))

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            mean = loss.detach() / ranks.size()  # line searches decide by it, so it must be the same everywhere
            torch.distributed.all_reduce(mean, group=ranks)
            return mean

        optimizer.step(closure)
    own = torch.cat(
        [t.detach().double().flatten() for t in _numbers([model.module.state_dict(), optimizer.state_dict()["state"]])]
    )
    gathered = [torch.empty_like(own) for _ in range(ranks.size())]
    torch.distributed.all_gather(gathered, own, group=ranks)
    assert own.isfinite().all(), (name, rule)
    assert all(torch.equal(own, other) for other in gathered), (name, rule, ranks.size())
    point = model.module.point
    matrix = point.covariance() if isinstance(point, gnomon.Gaussian) else point.matrix()
    assert (matrix - torch.eye(5)).abs().max() > 0.1, (name, rule)


def test_ranks_hold_the_same_frames_bit_for_bit(tmp_path):
    """On 2 and on 4 ranks, each with data of its own; an assertion in any of them fails the test."""
    method = "fork" if hasattr(os, "fork") else "spawn"
    torch.multiprocessing.start_processes(_ranks_worker, (str(tmp_path / "store"),), nprocs=4, start_method=method)


# ---------------------------------------------------------------------- bad input
def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing():
    model = Model()
    optimizer = gnomon.moving_frame(optim.Adam(model.parameters(), lr=0.1))
    train(model, optimizer, 2, seed=0)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    for bad in (math.nan, math.inf):
        optimizer.zero_grad()
        model.loss(torch.ones(2, 4)).backward()
        model.cov.eta.grad[0] = bad
        with (
            pytest.warns(RuntimeWarning, match="the step was skipped, and nothing changed") if bad != bad else _quiet()
        ):
            assert optimizer.step() is None
    assert optimizer.skipped_steps == 2
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key]), key
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1][index][key])
    train(model, optimizer, 1, seed=1)
    assert optimizer.skipped_steps == 2


def test_a_huge_but_finite_gradient_is_not_refused():
    point = gnomon.SPD(2, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=1e-37), max_step=1.0)
    point.logdet().backward()
    point.eta.grad.fill_(2e38)  # whose sum overflows
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert point.distance(torch.eye(2)).item() == pytest.approx(1, rel=0.1)


class _quiet(warnings.catch_warnings):  # noqa: N801
    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("error")


@pytest.mark.parametrize("name", ["adam", "lbfgs"])
def test_a_closure_with_a_bad_gradient_skips_the_step(name):
    point = gnomon.SPD(3)
    optimizer = gnomon.moving_frame(OPTIMIZERS[name](point.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = point.matrix().sum() * math.nan
        loss.backward()
        return loss

    with pytest.warns(RuntimeWarning, match="gradient or step of a manifold parameter is not finite"):
        assert math.isnan(optimizer.step(closure))
    assert optimizer.skipped_steps == 1
    torch.testing.assert_close(point.matrix(), torch.eye(3))
    problem = LogDet(torch.eye(3) * 2)
    assert descend(optimizer, lambda: problem(point), 60) - problem.minimum < 0.05


@pytest.mark.parametrize("failure", ["interrupt", "nan"])
def test_a_closure_that_fails_late_leaves_everything_where_it_was(failure):
    point, weight = gnomon.SPD(3), torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        point.eta.add_(0.1 * torch.eye(3))  # moved by hand, not yet folded
    tau = point.matrix().detach()
    optimizer = gnomon.moving_frame(optim.LBFGS([point.eta, weight], line_search_fn="strong_wolfe"))
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        if evaluations == 3 and failure == "interrupt":
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = LogDet(torch.eye(3) * 5)(point) + weight.square().sum()
        if evaluations >= 2 and failure == "nan":
            loss = loss * math.nan
        loss.backward()
        return loss

    expected = pytest.raises(KeyboardInterrupt) if failure == "interrupt" else pytest.warns(RuntimeWarning)
    with expected:
        optimizer.step(closure)
    assert not bool(point.eta.any())
    torch.testing.assert_close(point.matrix(), tau)
    torch.testing.assert_close(weight.detach(), torch.ones(2))


def test_a_step_that_overflows_is_given_up_with_its_momentum():
    point = gnomon.SPD(3, dtype=torch.float32)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=1e30, momentum=0.9))
    point.matrix().sum().backward()
    with pytest.warns(RuntimeWarning, match="a point would have overflowed: it stays where it is"):
        optimizer.step()
    torch.testing.assert_close(point.matrix(), torch.eye(3))
    assert not bool(optimizer.state[point.eta]["momentum_buffer"].any())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: gnomon.moving_frame(optim.SGD([torch.nn.Parameter(torch.ones(2))])),
            "holds no coordinates of a living",
        ),
        (lambda p: gnomon.moving_frame(p), "optimizer must be a torch.optim.Optimizer, got SPD"),
        (
            lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), transport="exact"),
            "transport must be one of 'auto'",
        ),
        (
            lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), max_step=0.0),
            "positive geodesic length, .* got 0.0",
        ),
        (lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), max_step=math.nan), "max_step must be"),
        (lambda p: gnomon.moving_frame(optim.SGD(p.parameters()), max_step="1"), "max_step must be .* got '1'"),
    ],
)
def test_bad_arguments(build, message):
    point = gnomon.SPD(2)
    with pytest.raises((ValueError, TypeError), match=message):
        build(point)
