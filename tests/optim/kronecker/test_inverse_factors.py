"""KFAC's averages and inverses, and the directions they give, against plain matrices."""

import inspect

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC

F64 = torch.float64


def rows_of(model, x, loss):
    """The inputs with a column of ones, and the output gradients, of each linear layer."""
    kept = {}

    def record(layer, inputs, output):
        kept[layer] = [torch.cat([inputs[0].detach(), torch.ones(len(x), 1, dtype=x.dtype)], 1)]
        output.register_hook(lambda g: kept[layer].append(g))

    handles = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    loss(model(x)).backward()
    for handle in handles:
        handle.remove()
    return kept


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def squares(output):
    return output.square().mean()


def relative(matrix, damping):
    """The inverse of a matrix in units of its mean diagonal, with damping."""
    return torch.linalg.inv(matrix / matrix.diagonal().mean() + damping * torch.eye(len(matrix), dtype=F64))


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("decay", [0.5, 0.95])
def test_relative_averages_and_inverses(rows, decay):
    """The first batch replaces the start; later ones are averaged in; inverses are relative to the mean diagonal."""
    model = network()
    optimizer = KFAC(model, lr=0.0, decay=decay, damping=0.3, update_every=1, subsample=False)
    averages = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(rows, 5, dtype=F64, generator=generator)
        optimizer.zero_grad()
        for layer, (a, g) in rows_of(model, x, squares).items():
            new = a.T @ a / rows, rows * g.T @ g
            old = averages.get(layer, new)
            averages[layer] = [decay * o + (1 - decay) * n for o, n in zip(old, new, strict=True)]
        optimizer.step()
    for layer, matrices in averages.items():
        state = optimizer.state[layer.weight]
        for name, matrix in zip("AS", matrices, strict=True):
            stored = state[name][0] * state[f"{name}_unit"].square()
            torch.testing.assert_close(stored, matrix, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(state[f"{name}_inverse"][0], relative(matrix, 0.3), rtol=1e-9, atol=1e-11)
            assert state[f"{name}_updates"].item() == 4


def test_a_step_goes_along_the_preconditioned_gradient():
    """``W - lr step_rms D / rms(D)`` with ``D = S^-1 G A^-1``, where momentum and decay are off."""
    model = network()
    x = torch.randn(40, 5, dtype=F64)
    optimizer = KFAC(model, lr=0.1, momentum=0.0, weight_decay=0.0, step_rms=0.5, damping=0.3, subsample=False)
    kept = rows_of(model, x, squares)
    wanted = {}
    for layer, (a, g) in kept.items():
        G = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        D = relative(g.T @ g, 0.3) @ G @ relative(a.T @ a, 0.3)
        W = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
        wanted[layer] = W - 0.1 * 0.5 * D / D.square().mean().sqrt()
    optimizer.step()
    for layer, matrix in wanted.items():
        torch.testing.assert_close(torch.cat([layer.weight, layer.bias[:, None]], 1), matrix, rtol=1e-9, atol=1e-11)


def test_diagonal_factors_of_embeddings_and_large_layers():
    """An embedding's A is the share of each index. Above ``max_dim`` a factor is the diagonal of its matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = KFAC(model, lr=0.0, damping=0.3, max_dim=5, subsample=False)
    x = torch.tensor([[0, 1], [1, 1], [5, 0]])
    kept = {}
    model[2].register_forward_pre_hook(lambda _, inputs: kept.update(x=inputs[0].detach()))
    model(x).square().mean().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    torch.testing.assert_close(
        state["A"][0] * state["A_unit"].square(), torch.tensor([2, 3, 0, 0, 0, 1], dtype=F64) / 6
    )
    linear = optimizer.state[model[2].weight]
    ones = torch.cat([kept["x"], torch.ones(3, 1, dtype=F64)], 1)
    torch.testing.assert_close(linear["A"][0] * linear["A_unit"].square(), ones.square().mean(0))
    mean = ones.square().mean(0)
    torch.testing.assert_close(linear["A_inverse"][0], 1 / (mean / mean.mean() + 0.3))


def test_gradient_curvature_is_its_own_fixed_point():
    """From gradients alone, by the inverses before an update: ``G^T S^-1 G / d`` and ``G A^-1 G^T / p``."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False).double()
    optimizer = KFAC(model, lr=0.0, damping=0.3, update_every=1, curvature="gradient")
    inverses = torch.eye(6, dtype=F64), torch.eye(4, dtype=F64)
    averages = None
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(9, 6, dtype=F64)).square().mean().backward()
        G = model.weight.grad.clone()
        new = G.T @ inverses[1] @ G / 4, G @ inverses[0] @ G.T / 6
        averages = new if averages is None else [0.95 * a + 0.05 * n for a, n in zip(averages, new, strict=True)]
        inverses = tuple(relative(matrix, 0.3) for matrix in averages)
        optimizer.step()
    state = optimizer.state[model.weight]
    for name, matrix in zip("AS", averages, strict=True):
        torch.testing.assert_close(state[name][0] * state[f"{name}_unit"].square(), matrix, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_change_nothing(bad):
    model = network()
    optimizer = KFAC(model, update_every=1)
    squares(model(torch.randn(20, 5, dtype=F64))).backward()
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[model[0].weight].items() if key[0] in "AS"}
    optimizer.zero_grad()
    squares(model(torch.randn(20, 5, dtype=F64))).backward()
    layer = optimizer._layers[model[0].weight]
    optimizer._collector.statistics(layer).inputs.tensors[0].fill_(bad)
    optimizer.step()
    assert optimizer.skipped_updates == 1
    assert optimizer.skipped_steps == 0
    for key, value in before.items():
        assert torch.equal(optimizer.state[model[0].weight][key], value)


def test_a_singular_average_without_damping_is_skipped():
    """Fewer rows than a layer is wide, and no damping: there is no inverse, and the old one stays."""
    model = network()
    optimizer = KFAC(model, update_every=1, damping=0.0, preset="paper", decay=0.0, lr=1e-3)
    squares(model(torch.zeros(2, 5, dtype=F64))).backward()
    optimizer.step()
    assert optimizer.skipped_updates > 0
    assert torch.equal(optimizer.state[model[0].weight]["A_inverse"][0], torch.eye(6, dtype=F64))


def test_its_arguments_are_those_of_ingd():
    """The signature shows all of them with the same defaults, and an unknown one is refused by name."""
    ours, theirs = inspect.signature(KFAC).parameters, inspect.signature(INGD).parameters
    assert ours["decay"].default == 0.95
    for name, parameter in ours.items():
        if name not in ("model", "decay"):
            assert parameter.default == theirs[name].default
    assert "structure" not in ours
    with pytest.raises(TypeError, match="there is no argument structure; there are approx, curvature"):
        KFAC(network(), structure="arrow")
