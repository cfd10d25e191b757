"""Batch and match: the closed-form step, Gaussian targets, scores that are not finite."""

import pytest
import torch

from gnomon.baselines import BatchAndMatch
from gnomon.baselines.batch_and_match import solve_quadratic
from gnomon.problems import random_spd


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(dim, condition):
    covariance = random_spd(dim, condition, generator=generator(1))
    loc = torch.randn(dim, dtype=torch.float64, generator=generator(2))
    precision = torch.linalg.inv(covariance)
    return loc, covariance, lambda x: -0.5 * ((x - loc) @ precision * (x - loc)).sum(-1)


@pytest.mark.parametrize("rank", [0, 2, 6])
def test_the_quadratic_equation_is_solved(rank):
    V = random_spd(6, 1e4, generator=generator())
    root = torch.randn(6, rank, dtype=torch.float64, generator=generator())
    U = root @ root.mT
    S = solve_quadratic(U, V)
    assert torch.allclose(S @ U @ S + S, V, rtol=1e-9, atol=1e-12)
    assert bool((torch.linalg.eigvalsh(S) > 0).all())


def test_a_step_minimizes_the_penalized_divergence_of_scores():
    """The objective of the paper, by automatic differentiation at the new Gaussian: its gradient vanishes."""
    _, _, log_density = gaussian(3, 5.0)

    def target(x):
        return log_density(x) - 0.1 * x.pow(4).sum(-1)

    old_loc, old_covariance = torch.ones(3, dtype=torch.float64), random_spd(3, 3.0, generator=generator(3))
    fit = BatchAndMatch(target, 3, batch=4, loc=old_loc, covariance=old_covariance, generator=generator(4))
    z = fit.draws(4).requires_grad_()
    (g,) = torch.autograd.grad(target(z).sum(), z)
    z = z.detach()
    fit.generator = generator(4)
    fit.step()
    loc = fit.loc.clone().requires_grad_()
    covariance = fit.covariance.clone().requires_grad_()
    off = torch.linalg.solve(covariance, (loc - z).mT).mT - g
    divergence = (off @ covariance * off).sum(-1).mean()
    old = torch.distributions.MultivariateNormal(old_loc, old_covariance)
    penalty = torch.distributions.kl_divergence(old, torch.distributions.MultivariateNormal(loc, covariance))
    (divergence + 2 / (4 * 3) * penalty).backward()
    assert float(loc.grad.abs().max()) < 1e-8
    assert float((covariance.grad + covariance.grad.mT).abs().max()) < 1e-8


@pytest.mark.parametrize("decay", [False, True])
def test_a_gaussian_target_is_found(decay):
    loc, covariance, log_density = gaussian(8, 100.0)
    fit = BatchAndMatch(log_density, 8, batch=32, decay=decay, generator=generator())
    for _ in range(30 if decay else 10):
        fit.step()
    assert fit.evaluations == 32 * fit.steps
    scale = covariance.diagonal().sqrt()
    tolerance = 1e-3 if decay else 1e-6
    assert float(((fit.loc - loc) / scale).abs().max()) < tolerance
    assert float((fit.covariance / covariance - 1).diagonal().abs().max()) < 10 * tolerance


def test_scores_that_are_not_finite_are_skipped_and_counted():
    fit = BatchAndMatch(lambda x: x.sum(-1).sqrt(), 3, generator=generator())
    fit.step()
    assert (fit.steps, fit.skipped) == (1, 1)
    assert torch.equal(fit.covariance, torch.eye(3, dtype=torch.float64))


def test_a_batch_of_one_draw_is_refused():
    with pytest.raises(ValueError, match="batch must be at least 2, got 1"):
        BatchAndMatch(lambda x: x.sum(-1), 3, batch=1)
