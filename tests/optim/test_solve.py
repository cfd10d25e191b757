"""solve() and the L-BFGS that moves the frame."""

import copy
import io
import math

import pytest
import torch

import gnomon
from gnomon import groups, riemannian
from gnomon.optim import LBFGS
from gnomon.problems import LogDet, MetricNearness, Rosenbrock, random_spd, solve
from support.marks import slow_where


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("problem", [LogDet, MetricNearness])
@pytest.mark.parametrize(("k", "condition"), [(100, 10.0), (40, 1000.0)])
def test_deterministic_problems_are_solved(problem, k, condition):
    problem = problem.random(k, condition, generator=generator())
    solution = solve(problem)
    assert solution.converged
    assert solution.gap < 1e-8
    assert solution.evaluations < 1.3 * solution.iterations + 5  # a unit step costs one evaluation
    torch.testing.assert_close(solution.point.matrix().detach(), problem.minimizer, rtol=1e-3, atol=1e-3)
    assert not bool(solution.point.eta.any())


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure",
    [
        groups.Triangular(12),
        groups.Arrow(12, 2),
        groups.Heisenberg(12, 2, 2),
        groups.BlockDiagonal(12, 5),
        groups.Diagonal(12),
        groups.Toeplitz(12),
        groups.Kronecker(groups.Triangular(3), groups.Dense(4)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("factor", ["outer", "inner", "inverse"])
def test_every_structure_reaches_a_stationary_point(structure, factor):
    problem = LogDet.random(12, 100.0, generator=generator())
    point = gnomon.SPD(structure, factor=factor, dtype=torch.float64)
    solution = solve(problem, point)
    assert solution.converged
    reference = gnomon.SPD(structure, factor=factor, dtype=torch.float64)
    optimizer = gnomon.moving_frame(torch.optim.LBFGS(reference.parameters(), line_search_fn="strong_wolfe"))

    def closure():
        optimizer.zero_grad()
        loss = problem(reference)
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)
    assert solution.loss <= problem(reference).item() + 1e-6


def test_batches_and_ordinary_parameters_together():
    targets = torch.stack([random_spd(3, 5.0, generator=generator(i)) for i in range(4)])
    points = gnomon.SPD(3, batch_shape=(4,), dtype=torch.float64)
    shift = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model = torch.nn.ParameterList([shift])
    model.points = points

    def loss(model):
        fit = (torch.linalg.inv(targets) * points.matrix()).sum() - points.logdet().sum()
        return fit + (shift - 3).square().sum() + (shift[0] - shift[1]).square()

    solution = solve(loss, model)
    assert solution.converged
    assert solution.gap is None
    torch.testing.assert_close(points.matrix().detach(), targets, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shift.detach(), torch.full((2,), 3.0, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_other_optimizers_and_callbacks():
    problem = LogDet.random(5, generator=generator())
    seen = []
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.3),
        lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
        lambda p: LBFGS(p, history_size=3),
    ):
        seen.clear()
        solution = solve(problem, optimizer=make, callback=lambda i, loss: seen.append((i, loss)))
        assert solution.gap < 1e-8
        assert [i for i, _ in seen] == list(range(solution.iterations + 1))
        assert seen[-1][1] == solution.loss
    limited = solve(problem, max_iterations=2)
    assert (limited.iterations, limited.converged) == (2, False)
    assert "stopped after 2 iterations" in limited.message
    tight = solve(problem, tolerance=1e-30)
    assert not tight.converged
    assert "precision is exhausted" in tight.message
    assert abs(tight.gap) < 1e-12
    done = solve(problem, gnomon.SPD(5, init=problem.minimizer))
    assert (done.iterations, done.converged) == (0, True)


def test_rosenbrock_as_an_ordinary_function():
    solution = solve(Rosenbrock(20, "chained"))
    assert solution.gap < 1e-10


def test_state_is_saved_and_resumed():
    problem = MetricNearness.random(6, 100.0, generator=generator())

    def build():
        point = problem.start()
        return point, LBFGS(point.parameters())

    def closure(point):
        def evaluate():
            point.eta.grad = None
            loss = problem(point)
            loss.backward()
            return loss

        return evaluate

    point, optimizer = build()
    for _ in range(10):
        optimizer.step(closure(point))
    file = io.BytesIO()
    torch.save((point.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    twin, twin_optimizer = build()
    saved_point, saved_optimizer = torch.load(file)
    twin.load_state_dict(saved_point)
    twin_optimizer.load_state_dict(saved_optimizer)
    copied, copied_optimizer = copy.deepcopy((point, optimizer))
    for _ in range(10):
        losses = [
            o.step(closure(p)) for p, o in ((point, optimizer), (twin, twin_optimizer), (copied, copied_optimizer))
        ]
        assert losses[0] == losses[1] == losses[2]
    assert torch.equal(point.frame, twin.frame)


def test_a_point_that_was_moved_by_others_starts_a_new_memory():
    problem = LogDet.random(4, generator=generator())
    point = problem.start()
    optimizer = LBFGS(point.parameters())

    def closure():
        optimizer.zero_grad()
        loss = problem(point)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    with torch.no_grad():
        point.frame.mul_(3.0)
    before = problem(point).item()
    assert optimizer.step(closure).item() < before
    for _ in range(20):
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(problem.minimum)


def test_a_wall_of_nan_is_walked_around():
    """Trial steps beyond the domain are shortened, and the point is never left there."""
    x = torch.nn.Parameter(torch.tensor([5.0], dtype=torch.float64))

    def loss(x):
        return torch.where(x > 0.5, x - x.log(), torch.tensor(math.nan, dtype=torch.float64)).sum()

    solution = solve(loss, x)
    assert solution.converged
    assert x.item() == pytest.approx(1.0, abs=1e-4)


def test_bad_input():
    problem = LogDet.random(3, generator=generator())
    with pytest.raises(ValueError, match="point is None, but the problem is a function"):
        solve(lambda point: point.matrix().sum())
    with pytest.raises(ValueError, match="tolerance must be positive, got 0"):
        solve(problem, tolerance=0)
    with pytest.raises(ValueError, match="history_size must be a positive integer, got 0"):
        LBFGS(problem.start().parameters(), history_size=0)
    with pytest.raises(ValueError, match="closure is None"):
        LBFGS(problem.start().parameters()).step()
    point = problem.start()
    frame = point.frame.clone()
    with pytest.raises(ValueError, match="the loss is nan"):
        solve(lambda point: point.matrix().sum() * math.nan, point)
    assert torch.equal(point.frame, frame)


def test_a_closure_that_fails_in_a_line_search_changes_nothing():
    problem = LogDet.random(4, generator=generator())
    point = problem.start()
    optimizer = LBFGS(point.parameters())
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")
        optimizer.zero_grad()
        loss = problem(point)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    frame = point.frame.clone()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert torch.equal(point.frame, frame)
    assert not bool(point.eta.any())
    for _ in range(20):
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(problem.minimum)


@pytest.mark.parametrize("form", slow_where(["covariance", "precision"], lambda form: form == "precision"))
@pytest.mark.parametrize("structure", [4, groups.Diagonal(4), groups.Triangular(4), groups.Arrow(4)], ids=repr)
@pytest.mark.parametrize("offset", slow_where([3.0, 30.0, 300.0], lambda offset: offset < 300))
def test_gaussians_are_fitted_from_far_away(form, structure, offset):
    x = torch.randn(200, 4, dtype=torch.float64, generator=generator()) + offset
    point = gnomon.Gaussian(structure, form=form, dtype=torch.float64)
    solution = solve(lambda q: -q.log_prob(x).mean(), point)
    assert solution.converged
    assert solution.evaluations < 3 * solution.iterations + 30
    torch.testing.assert_close(point.loc.detach(), x.mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [2, None])
@pytest.mark.parametrize("form", ["covariance", "precision"])
def test_the_slope_along_the_curve(form, order):
    """What the Wolfe condition asks: the gradient in the new frame times the velocity there."""
    x = torch.randn(50, 3, dtype=torch.float64, generator=generator()) + 1
    point = gnomon.Gaussian(3, form=form, order=order, dtype=torch.float64)
    direction = torch.randn(point.eta.shape, dtype=torch.float64, generator=generator(1))
    group = point.group
    direction = group.pack(group.unscale(group.scale(group.unpack(direction))))  # symmetric blocks
    direction /= direction.norm()

    def moved(t):
        twin = copy.deepcopy(point)
        with torch.no_grad():
            twin.eta.copy_(t * direction)
        twin.fold()
        return twin

    def loss(q):
        return -q.log_prob(x).mean()

    t, h = 0.3, 1e-5
    there = moved(t)
    loss(there).backward()
    slope = (there.eta.grad * group.pack(there.chart.velocity(group.unpack(direction), t))).sum().item()
    numeric = (loss(moved(t + h)) - loss(moved(t - h))).item() / (2 * h)
    assert slope == pytest.approx(numeric, rel=1e-6 if order is None else 0.05)


def test_optimizers_that_are_framed_keep_their_settings():
    problem = LogDet.random(4, generator=generator())
    made = []

    def make(parameters):
        made.append(gnomon.moving_frame(torch.optim.SGD(parameters, lr=0.5), max_step=0.01))
        return made[0]

    assert solve(problem, optimizer=make, max_iterations=3).gap > 0.1
    assert made[0]._max_step == 0.01
    newton = solve(Rosenbrock(6, "mild"), optimizer=lambda p: gnomon.optim.StructuredNewton(p, precond_lr=0.5, lr=0.5))
    assert newton.gap < 1e-8


def test_one_optimizer_in_pieces():
    problem = MetricNearness.random(6, 100.0, generator=generator())
    whole = solve(problem)
    point = problem.start()
    optimizer = LBFGS(point.parameters())
    evaluations = iterations = 0
    while True:
        part = solve(problem, point, optimizer=lambda p: optimizer, max_iterations=7)
        evaluations, iterations = evaluations + part.evaluations, iterations + part.iterations
        if part.converged:
            break
    assert iterations == whole.iterations
    assert evaluations == whole.evaluations
    assert part.loss == whole.loss
    with pytest.raises(ValueError, match="LBFGS moves points by itself"):
        gnomon.moving_frame(optimizer)
    with pytest.raises(ValueError, match="max_iterations must be an integer of at least 0, got -1"):
        solve(problem, max_iterations=-1)
    with pytest.raises(ValueError, match="point holds no parameter that requires a gradient"):
        solve(Rosenbrock(5), torch.zeros(5))


def test_a_gradient_that_is_not_finite_is_a_wall():
    x = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    solution = solve(lambda x: (torch.where(x > 0, x * x.log(), 0 * x) + 0.5 * x**2 + x).sum(), x)
    assert solution.converged
    assert x.item() > 0


def test_lbfgs_reaches_a_gradient_below_the_rounding_of_the_loss():
    """The Karcher mean of five matrices: values differ by 1e-15 at the end, and gradients decide."""
    points = torch.stack([random_spd(30, 1e3, generator=torch.Generator().manual_seed(i)) for i in range(5)])
    point = gnomon.SPD(30, dtype=torch.float64)
    optimizer = gnomon.optim.LBFGS(point.parameters())
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = riemannian.distance(point.matrix(), points).square().mean()
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)
        if float(point.eta.grad.norm()) < 1e-10:
            break
    assert float(point.eta.grad.norm()) < 1e-10
    assert evaluations < 40
    assert optimizer.stalled_steps == 0
    assert riemannian.distance(point.matrix().detach(), riemannian.mean(points)).item() < 1e-9
