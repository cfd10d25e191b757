"""The objective of a fit, its gradient and its stationary points."""

import numpy as np
import pytest
import torch

import gnomon
from gnomon import groups as g
from gnomon.mixture import GaussianMixture
from gnomon.mixture.objective import Objective
from gnomon.testing import random_element
from support.mixtures import FORMS, STRUCTURES, blobs, blocks, heisenberg


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_objective_and_its_gradient(structure, form, monkeypatch):
    """Against the formula with dense matrices, in several parts, and against differences along a random direction."""
    group, k = structure(4), 3
    z = torch.randn(50, 4, dtype=torch.float64)
    factor = group.to_dense(random_element(group, (k,)))
    square = factor @ factor.mT
    covariance = square if form == "covariance" else torch.linalg.inv(square)
    loc = torch.randn(k, 4, dtype=torch.float64)
    components = gnomon.Gaussian(group, form=form, loc=loc, init=covariance, batch_shape=(k,))
    logits = torch.nn.Parameter(torch.randn(k, dtype=torch.float64))
    weights = torch.rand(50, dtype=torch.float64)
    weights /= weights.sum()
    objective = Objective(z, weights, components, logits, floor=0.1, log_volume=2.0)

    dense = torch.distributions.MultivariateNormal(loc, covariance)
    trace = torch.linalg.inv(covariance).diagonal(dim1=-2, dim2=-1).sum(-1)
    joint = dense.log_prob(z.unsqueeze(1)) - 0.05 * trace + logits.detach().log_softmax(0)
    assert objective.value() == pytest.approx(2.0 - float(weights @ joint.logsumexp(1)))

    whole = objective.gradient()
    gradients = [parameter.grad for parameter in objective.parameters]
    monkeypatch.setattr("gnomon.mixture.objective.CHUNK", 7 * k * 4)
    assert objective.gradient() == pytest.approx(whole)
    for parameter, gradient in zip(objective.parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for features in (100, 1):  # densities by dense inverses, and by the structure
        monkeypatch.setattr("gnomon.mixture.objective.DENSE_FEATURES", features)
        statistics = objective.statistics()
        assert statistics.loss == pytest.approx(whole)
        objective.gradient_from(statistics)
        for parameter, gradient in zip(objective.parameters, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)

    direction = [torch.randn_like(parameter) for parameter in objective.parameters]
    slope = sum((d * gradient).sum().item() for d, gradient in zip(direction, gradients, strict=True))
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, d in zip(objective.parameters, direction, strict=True):
                parameter.add_(d, alpha=step)
        values.append(objective.value())
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_statistics_do_not_depend_on_a_rotation_of_the_factor(form):
    """EM leaves triangular factors, and steps of L-BFGS others."""
    z, rotations = torch.randn(50, 4, dtype=torch.float64), torch.linalg.qr(torch.randn(3, 4, 4, dtype=torch.float64)).Q
    root = torch.randn(3, 4, 4, dtype=torch.float64).tril()
    weights, logits = torch.full((50,), 0.02, dtype=torch.float64), torch.nn.Parameter(torch.zeros(3).double())
    components = gnomon.Gaussian(4, form=form, batch_shape=(3,), dtype=torch.float64)
    found = []
    for factor in (root, root @ rotations) if form == "covariance" else (root.mT, root.mT @ rotations):
        components.frame.copy_(components.group.pack(components.affine.join((factor,), torch.ones(3, 4).double())))
        found.append(Objective(z, weights, components, logits, floor=0.1, log_volume=0.0).statistics())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_component_reaches_the_stationary_point(structure, form):
    """For one component the optimum is known: the sample mean, and on the full manifold the sample covariance."""
    X, _ = blobs(k=1)
    model = GaussianMixture(structure=structure, form=form, tol=1e-10, random_state=0).fit(X)
    assert model.converged_
    np.testing.assert_allclose(model.means_[0], X.mean(0), atol=1e-3)
    if structure in (g.Dense, g.Triangular):
        expected = np.cov(X.T, bias=True)
        np.testing.assert_allclose(model.covariances_[0], expected + 1e-6 * np.diag(X.var(0)), rtol=1e-3, atol=1e-3)
    if structure is g.Diagonal:
        np.testing.assert_allclose(np.diag(model.covariances_[0]), X.var(0), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", [g.Dense, g.Arrow, heisenberg, blocks, g.Diagonal])
def test_units_of_features_do_not_matter(structure, form):
    X, _ = blobs()
    units, shift = np.array([1e-6, 1.0, 1e6, 30.0, 1e-2]), np.array([0.0, 1e3, -1e6, 0.0, 1.0])
    plain = GaussianMixture(3, structure=structure, form=form, random_state=0).fit(X)
    other = GaussianMixture(3, structure=structure, form=form, random_state=0).fit(units * X + shift)
    np.testing.assert_array_equal(plain.predict(X), other.predict(units * X + shift))
    scale = np.outer(units, units)
    np.testing.assert_allclose(other.covariances_ / scale, plain.covariances_, rtol=1e-3, atol=1e-4)
    assert other.score(units * X + shift) == pytest.approx(plain.score(X) - np.log(units).sum(), abs=1e-5)
