"""Curvature from gradients and from sampled targets."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from support.marks import slow_where


@pytest.mark.slow
def test_gradient_curvature_satisfies_the_equations_of_its_fixed_point():
    """S_a = E[G S_b^-1 G^T]/p and S_b = E[G^T S_a^-1 G]/d for Gaussian gradients, to the noise of single samples."""
    torch.manual_seed(0)
    d, p = 3, 4
    left, right = torch.randn(d, d, dtype=torch.float64), torch.randn(p, p, dtype=torch.float64)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(d, p, dtype=torch.float64))
    optimizer = INGD(
        model, 0.0, curvature="gradient", damping=0.0, update_every=1, precond_lr=lambda t: max(0.003, 1 / (t + 2))
    )
    for _ in range(4000):
        model.w.grad = left @ torch.randn(d, p, dtype=torch.float64) @ right
        optimizer.step()
    K, C = optimizer.factors("w")
    S_a, S_b = torch.linalg.inv(C @ C.T), torch.linalg.inv(K @ K.T)
    fitted, wanted = torch.kron(S_a, S_b), torch.kron(left @ left.T, right.T @ right)
    shape = fitted * (wanted.trace() / fitted.trace())
    assert (shape - wanted).norm() < 0.1 * wanted.norm()
    assert fitted.trace() / wanted.trace() == pytest.approx(1, abs=0.3)


def test_fisher_of_the_model_itself():
    """Statistics of sampled targets are those of the Fisher matrix, whatever the labels are."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).double()
    x = torch.randn(1, 3, dtype=torch.float64).expand(20000, 3)
    optimizer = INGD(model, 0.0, fisher="mc", subsample=False)
    output = model(x)
    optimizer.observe(output)
    nn.functional.cross_entropy(output, torch.zeros(20000, dtype=torch.long)).backward()
    statistics = optimizer._collector.statistics(optimizer._layers[model.weight])
    probability = output[0].softmax(0).detach()
    wanted = probability.diag() - probability.outer(probability)
    found = statistics.outputs.matrix[0] * statistics.outputs.unit**2 * statistics.terms
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.01)
    assert model.weight.grad is not None
    optimizer.step()
    assert not torch.equal(optimizer.factors("")[1], torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize(
    "likelihood", slow_where(["categorical", "bernoulli", "gaussian"], lambda likelihood: likelihood != "categorical")
)
def test_training_with_sampled_targets(likelihood):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(64, 5)
    optimizer = INGD(model, 1e-2, fisher="mc", update_every=3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        output = model(x)
        optimizer.observe(output, likelihood)
        loss = (output - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_sampled_targets_that_are_forgotten():
    model = nn.Linear(3, 2)
    optimizer = INGD(model, fisher="mc")
    before = model.weight.clone()
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"fisher='mc' needs observe\(output\) before each backward pass"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="likelihood must be 'categorical', 'bernoulli' or 'gaussian', got 'poisson'"):
        optimizer.observe(model(torch.randn(4, 3)), "poisson")
    with pytest.raises(RuntimeError, match=r"observe\(\) is for fisher='mc'"):
        INGD(model).observe(model(torch.randn(4, 3)))
