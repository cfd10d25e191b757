"""The scale of the loss does not matter, over thirty orders of magnitude and in every form."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC

SCALES = (1e-15, 1e-7, 1e7, 1e15)
FORMS = {
    "gram": {},
    "gram, many rows": {"rows": 100},
    "packed gram": {"memory": "low"},
    "dense": {"precond_momentum": 0.5},
    "gradient": {"curvature": "gradient"},
    "gradient, dense": {"curvature": "gradient", "precond_momentum": 0.5},
    **{name: {"structure": name} for name in ("triangular", "diagonal", "block", "arrow", "heisenberg", "toeplitz")},
    "KFAC": {"optimizer": KFAC},
    "KFAC, gradient": {"optimizer": KFAC, "curvature": "gradient"},
}

CASES = [pytest.param(options, marks=() if name == "gram" else pytest.mark.slow) for name, options in FORMS.items()]


def weights(scale=1.0, optimizer=INGD, steps=20, rows=32, accumulate=1, **options):
    """The weights after a few steps of a regression whose loss is multiplied by a scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    x = torch.randn(steps, rows, 6)
    y = torch.tanh(x @ torch.randn(6, 3))
    optimizer = optimizer(model, weight_decay=0.0, update_every=2, **options)
    for a, b in zip(x, y, strict=True):
        optimizer.zero_grad()
        for part, target in zip(a.chunk(accumulate), b.chunk(accumulate), strict=True):
            ((model(part) - target).square().mean() * (scale / accumulate)).backward()
        optimizer.step()
    assert optimizer.skipped_updates == optimizer.skipped_steps == 0
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES, ids=FORMS)
def test_steps_do_not_depend_on_the_scale_of_the_loss(options):
    wanted = weights(**options)
    for scale in SCALES:
        torch.testing.assert_close(weights(scale, **options), wanted, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_batches_of_very_different_scales_add_up():
    """Statistics that accumulate over passes are in one unit, the larger one."""
    wanted = weights(accumulate=2)
    for scale in SCALES:
        torch.testing.assert_close(weights(scale, accumulate=2), wanted, rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.spawns
def test_compiled_steps_do_not_depend_on_it_either():
    wanted = weights(compile=True)
    for scale in SCALES:
        torch.testing.assert_close(weights(scale, compile=True), wanted, rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e4])
def test_targets_of_any_size_are_fitted_alike(size):
    """A linear regression whose targets and weights are scaled together ends at the same relative error."""

    def error(size):
        torch.manual_seed(0)
        model = nn.Linear(8, 4, bias=False)
        x = torch.randn(128, 8)
        y = size * x @ torch.randn(8, 4)
        with torch.no_grad():
            model.weight.mul_(size)
        optimizer = INGD(model, lr=0.02 * size, weight_decay=0.0, base_width=None)
        for step in range(200):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.param_groups[0]["lr"] = 0.02 * size * (1 - step / 200)
            optimizer.step()
        assert optimizer.skipped_updates == 0
        return loss.item() / y.square().mean().item()

    assert error(size) == pytest.approx(error(1.0), rel=1e-2)
