"""Problems: closed-form gradients, known optima, mini-batches, generators."""

import pytest
import torch

import gnomon
from gnomon.baselines import Ambient
from gnomon.problems import (
    DictionaryLearning,
    GraphicalModel,
    LogDet,
    MetricLearning,
    MetricNearness,
    MixtureLikelihood,
    Rosenbrock,
    TraceRegression,
    random_spd,
    solve,
)
from gnomon.problems.mixture_likelihood import embed


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


SPD_PROBLEMS = {
    "log-det": lambda: LogDet.random(5, 20.0, generator=generator()),
    "nearness": lambda: MetricNearness.random(5, 20.0, generator=generator()),
    "metric learning": lambda: MetricLearning.random(5, generator=generator()),
    "trace regression": lambda: TraceRegression.random(5, generator=generator()),
    "trace regression, rank 2": lambda: TraceRegression.random(5, rank=2, noise=0.1, generator=generator()),
    "graphical model": lambda: GraphicalModel.random(5, generator=generator()),
}


@pytest.mark.parametrize("name", SPD_PROBLEMS)
def test_gradient_and_optimum(name):
    problem = SPD_PROBLEMS[name]()
    start = random_spd(5, 3.0, generator=generator(1))
    point = gnomon.SPD(5, init=start)
    problem(point).backward()
    A = point.factor_matrix().detach()
    torch.testing.assert_close(point.eta.grad, A.mT @ problem.gradient(start) @ A)

    ambient = Ambient(start)  # the same loss in global coordinates
    value = problem(ambient)
    torch.testing.assert_close(value, problem(point))
    value.backward()
    symmetric = 0.5 * (ambient.tau.grad + ambient.tau.grad.mT)
    torch.testing.assert_close(symmetric, problem.gradient(start))

    if problem.minimum is not None:
        best = gnomon.SPD(5, init=problem.minimizer)
        assert problem(best).item() == pytest.approx(problem.minimum, abs=1e-9)
        torch.testing.assert_close(problem.gradient(problem.minimizer), torch.zeros(5, 5, dtype=torch.float64))
        assert problem(point).item() > problem.minimum


@pytest.mark.parametrize("name", SPD_PROBLEMS)
def test_a_structured_start_lies_on_the_structure(name):
    problem = SPD_PROBLEMS[name]()
    point = problem.start(gnomon.groups.Arrow(5))
    before = problem(point).item()
    solution = solve(problem, point)
    assert solution.converged
    assert solution.loss < before
    factor = point.factor_matrix()
    assert torch.equal(factor, gnomon.groups.Arrow(5).to_dense(gnomon.groups.Arrow(5).from_dense(factor)))


@pytest.mark.parametrize(
    ("problem", "count"),
    [
        (MetricNearness.random(4, samples=60, generator=generator()), 60),
        (TraceRegression.random(4, samples=60, generator=generator()), 60),
        (MetricLearning.random(4, pairs=60, generator=generator()), 60),
        (DictionaryLearning.random(3, samples=60, penalty=0.1, generator=generator()), 60),
        (MixtureLikelihood.random(3, samples=60, generator=generator()), 60),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mini_batches_average_to_the_whole(problem, count):
    point = problem.start()
    batches = torch.randperm(count, generator=generator(2)).split(20)
    parts = torch.stack([problem(point, rows) for rows in batches])
    torch.testing.assert_close(parts.mean(), problem(point))


def test_metric_learning_from_labels_separates_the_classes():
    labels = torch.arange(60) % 3
    centers = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    noise = torch.randn(60, 2, dtype=torch.float64, generator=generator()) * torch.tensor([5.0, 0.1])
    problem = MetricLearning.from_labels(centers[labels] + noise, labels, generator=generator(1))
    S = solve(problem).point.matrix()
    assert S[1, 1] > 5 * S[0, 0]  # the second feature tells the classes apart, the first does not
    torch.testing.assert_close(S.detach(), problem.minimizer, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="none has equal labels, or none different ones"):
        MetricLearning.from_labels(noise, torch.zeros(60))


def test_the_graphical_model_agrees_with_the_graphical_lasso():
    covariance = pytest.importorskip("sklearn.covariance")
    problem = GraphicalModel.random(8, samples=400, penalty=0.1, smoothing=1e-5, generator=generator())
    _, precision = covariance.graphical_lasso(problem.C.numpy(), 0.1, tol=1e-8, max_iter=500)
    solution = solve(problem, max_iterations=3000)
    S = solution.point.matrix().detach()
    torch.testing.assert_close(S, torch.from_numpy(precision), atol=2e-3, rtol=0)
    assert torch.equal(problem.edges(S), (torch.from_numpy(precision).abs() > 1e-8) & ~torch.eye(8, dtype=torch.bool))
    assert (problem.edges(S) & (problem.truth == 0)).sum() < (problem.edges(S) & (problem.truth != 0)).sum()


def test_dictionary_gradient_and_recovery():
    problem = DictionaryLearning.random(3, atoms=2, samples=20, penalty=0.2, generator=generator())
    point = problem.start()
    problem(point).backward()
    atoms, codes = point.atoms.matrix().detach(), point.codes.detach()
    in_atoms, in_codes = problem.gradient(atoms, codes)
    A = point.atoms.factor_matrix().detach()
    torch.testing.assert_close(point.atoms.eta.grad, A.mT @ in_atoms @ A)
    torch.testing.assert_close(point.logits.grad, in_codes * point.logits.detach().sigmoid())

    exact = DictionaryLearning.random(3, atoms=2, samples=20, generator=generator())
    assert solve(exact).gap < 1e-6


def test_the_mixture_loss_is_the_same_in_every_form():
    problem = MixtureLikelihood.random(3, 2, samples=50, generator=generator())
    sub, full = problem.start(), problem.ambient()
    S = problem.embedded_start()
    weights = sub.weights.detach()
    normal = torch.distributions.MultivariateNormal(sub.components.loc, sub.components.covariance())
    wanted = -(normal.log_prob(problem.X.unsqueeze(1)) + weights.log()).logsumexp(-1).mean()
    torch.testing.assert_close(problem(sub), wanted)
    torch.testing.assert_close(problem(full), wanted)

    problem(full).backward()
    in_matrices, in_logits = problem.gradient(S, full.logits.detach())
    B = full.components.factor_matrix().detach()
    root = torch.linalg.inv(B)  # S = B^-T B^-1
    torch.testing.assert_close(full.components.eta.grad, root @ in_matrices @ root.mT)
    torch.testing.assert_close(full.logits.grad, in_logits)


def test_both_forms_of_the_mixture_end_at_the_same_likelihood_and_on_the_submanifold():
    problem = MixtureLikelihood.random(2, 2, samples=200, separation=3.0, generator=generator())
    sub, full = solve(problem), solve(problem, problem.ambient())
    assert sub.loss == pytest.approx(full.loss, abs=1e-7)
    components = sub.point.components
    torch.testing.assert_close(
        full.point.components.matrix(), embed(components.loc, components.covariance()), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("form", ["mild", "chained"])
def test_rosenbrock_derivatives(form):
    problem = Rosenbrock(7, form)
    x = torch.randn(7, dtype=torch.float64, generator=generator(), requires_grad=True)
    (gradient,) = torch.autograd.grad(problem(x), x)
    torch.testing.assert_close(problem.gradient(x.detach()), gradient)
    hessian = torch.autograd.functional.hessian(problem, x.detach())
    torch.testing.assert_close(problem.hessian_diagonal(x.detach()), hessian.diagonal())
    assert torch.equal(hessian.triu(2), torch.zeros(7, 7, dtype=torch.float64))  # tridiagonal
    assert problem(problem.minimizer).item() == 0
    assert solve(problem, problem.start()).gap < 1e-8


def test_random_spd_has_the_condition():
    for condition in (1.0, 100.0):
        matrix = random_spd(7, condition, generator=generator())
        assert torch.linalg.cond(matrix).item() == pytest.approx(condition)
        assert torch.equal(matrix, matrix.mT)
    with pytest.raises(ValueError, match=r"condition must be at least 1, got 0\.5"):
        random_spd(3, 0.5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rosenbrock(5, "tame"), "form must be 'chained' or 'mild', got 'tame'"),
        (lambda: Rosenbrock(1), "d must be at least 2, got 1"),
        (lambda: GraphicalModel(torch.eye(2), penalty=-1.0), r"penalty must be at least 0, got -1\.0"),
        (lambda: GraphicalModel(torch.eye(2), smoothing=0.0), r"smoothing must be positive, got 0\.0"),
        (lambda: MixtureLikelihood(torch.zeros(3, 2), 4), "components must be between 1 and the 3 rows of X, got 4"),
        (lambda: TraceRegression(torch.zeros(3, 2), torch.zeros(2)), "y has 2 values for the 3 measurements"),
        (lambda: DictionaryLearning(torch.eye(2).expand(3, 2, 2), 2, penalty=-0.5), "penalty must be at least 0"),
        (lambda: DictionaryLearning(torch.eye(2).expand(3, 2, 2), 0), "atoms must be between 1 and the 3 matrices"),
        (lambda: LogDet(-torch.eye(2)), "C must be positive definite"),
        (lambda: MetricNearness(torch.eye(3), torch.ones(5, 4)), r"X has shape \(5, 4\), but Q is of size 3"),
        (lambda: TraceRegression(torch.ones(5), torch.ones(5)), r"U has shape \(5,\); give \(N, k\)"),
        (lambda: MetricLearning.random(3, classes=1), "classes must be at least 2"),
        (lambda: GraphicalModel.random(3, neighbours=5), "neighbours must be at least 0 and below k = 3, got 5"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
