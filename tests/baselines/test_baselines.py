"""The paper's baselines: their Euclidean limits, their exactness, and their manners."""

import copy
import io

import pytest
import torch
from torch.optim import SGD

import gnomon
from gnomon.baselines import RGD, AhnSra2020, Alimisis2020, Alimisis2021, StructuredNGD
from gnomon.problems import LogDet, MetricNearness, random_spd

MOMENTUM = [Alimisis2020, Alimisis2021, AhnSra2020]
ALL = [RGD, StructuredNGD, *MOMENTUM]


def build(method, parameters, lr, momentum=0.9):
    return method(parameters, lr=lr, momentum=momentum) if method in MOMENTUM else method(parameters, lr=lr)


def problem_loss(problem, tau):
    if isinstance(problem, LogDet):
        return (problem.C * tau).sum() - torch.logdet(tau)
    x = problem.X
    return 0.5 * (x @ problem.Q @ tau - x).square().sum(-1).mean()


def run(method, problem, steps, lr, start=None):
    k = len(problem.minimizer)
    tau = torch.nn.Parameter(torch.eye(k, dtype=torch.float64) if start is None else start.clone())
    optimizer = build(method, [tau], lr)
    path = []
    for _ in range(steps):
        optimizer.zero_grad()
        problem_loss(problem, tau).backward()
        optimizer.step()
        path.append(tau.detach().clone())
    return torch.stack(path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ALL)
def test_the_euclidean_limit(method):
    """Tiny steps at the identity: gradient descent, heavy ball, and one and the same Nesterov method."""
    k, alpha, steps = 4, 0.8, 12
    weight, center = random_spd(k, generator=torch.Generator().manual_seed(0)), random_spd(k)

    def moves(optimizer_of, size):
        x = torch.nn.Parameter(torch.eye(k, dtype=torch.float64))
        optimizer = optimizer_of([x], size)
        for _ in range(steps):
            optimizer.zero_grad()
            # The distance is measured in units of the step, so that the gradient changes along the way.
            offset = (x - torch.eye(k, dtype=torch.float64)) / size - center
            (0.01 * size * (weight * offset * offset).sum()).backward()
            optimizer.step()
        return (x.detach() - torch.eye(k, dtype=torch.float64)) / size

    def euclidean(parameters, lr):
        momentum = alpha if method in MOMENTUM else 0.0
        return SGD(parameters, lr=lr, momentum=momentum, nesterov=method in (Alimisis2021, AhnSra2020))

    errors = []
    for size in (1e-5, 1e-6):
        riemannian = moves(lambda p, lr: build(method, p, lr, alpha), size)
        wanted = moves(euclidean, size)
        errors.append(float((riemannian - wanted).norm() / wanted.norm()))
    assert errors[1] < 1e-4
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("problem", [LogDet, MetricNearness])
def test_converges(method, problem):
    problem = problem.random(6, 5.0, generator=torch.Generator().manual_seed(0))
    lr = 0.05 if method in (RGD, StructuredNGD) else 0.02
    path = run(method, problem, 400, lr, start=0.3 * torch.eye(6, dtype=torch.float64))
    torch.linalg.cholesky(path)
    assert problem_loss(problem, path[-1]).item() - problem.minimum < 1e-4


def test_the_library_with_and_without_momentum():
    """Structured NGD is SPD(factor='inner') under plain SGD; Alimisis 2020 is its exact form under momentum."""
    problem = MetricNearness.random(5, 5.0, generator=torch.Generator().manual_seed(0))
    for method, order, momentum in ((StructuredNGD, 2, 0.0), (Alimisis2020, None, 0.9)):
        start = 0.2 * random_spd(5, 2.0, generator=torch.Generator().manual_seed(1))
        wanted = run(method, problem, 40, 0.02, start)
        point = gnomon.SPD(5, factor="inner", order=order, init=start)
        optimizer = gnomon.moving_frame(SGD(point.parameters(), lr=0.02, momentum=momentum))
        for tau in wanted:
            optimizer.zero_grad()
            problem(point).backward()
            optimizer.step()
            torch.testing.assert_close(point.matrix().detach(), tau, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ALL)
def test_batches_checkpoints_and_closures(method):
    problem = LogDet.random(3, generator=torch.Generator().manual_seed(0))
    tau = torch.nn.Parameter(torch.eye(3, dtype=torch.float64).repeat(2, 1, 1))
    optimizer = build(method, [tau], 0.05)

    def closure(p=tau, o=optimizer):
        o.zero_grad()
        loss = (problem.C * p).sum() - torch.logdet(p).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    torch.testing.assert_close(tau[0], run(method, problem, 3, 0.05)[-1])
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    twin = torch.nn.Parameter(tau.detach().clone())
    other = build(method, [twin], 0.05)
    other.load_state_dict(torch.load(buffer))
    optimizer.step(closure)
    other.step(lambda: closure(twin, other))
    assert torch.equal(tau, twin)
    copy.deepcopy((tau, optimizer))


def test_bad_input():
    with pytest.raises(ValueError, match=r"symmetric positive-definite matrices, got one of shape \(2, 2\)"):
        RGD([torch.nn.Parameter(-torch.eye(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"got one of shape \(3,\)"):
        RGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match="lr must be positive, got -1"):
        RGD([torch.nn.Parameter(torch.eye(2))], lr=-1)
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1, got 1"):
        AhnSra2020([torch.nn.Parameter(torch.eye(2))], lr=0.1, momentum=1)
