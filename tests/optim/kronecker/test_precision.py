"""Low precision: factors in half precision, autocast, models in bfloat16."""

import functools

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.dense_factor import DenseFactor
from gnomon.optim.kronecker.factor_update import published_precond_lr
from gnomon.optim.kronecker.gram_factor import GramFactor
from gnomon.optim.kronecker.statistics import RowMoment
from support.teaching import kept, student, teacher, train

HALF = [torch.bfloat16, torch.float16]


def test_half_precision_of_the_fallback():
    """Squares of its gradients vanish in float16; the step is that of float32, rounded once."""
    x, models = torch.randn(4, 8).half(), [nn.LayerNorm(8).half(), nn.LayerNorm(8)]
    for model in models:
        optimizer = INGD(model, fallback_lr=1e-2)
        (model(x.to(model.weight.dtype)).square().mean() * 1e-2).backward()
        optimizer.step()
    for half, full in zip(*(model.parameters() for model in models), strict=True):
        assert half.dtype == torch.float16
        torch.testing.assert_close(half.float(), full, rtol=1e-3, atol=1e-4)
    assert (models[1].weight - 1).abs().min() > 5e-3


def decaying(steps):
    """A rate at whose end runs differ by what they have learned, not by their last step."""
    return lambda step: 1e-2 * (1 - step / steps)


def regression(steps, dtype=torch.float32, **settings):
    """The optimizer after a small regression, and its losses."""
    (x, y), model = teacher(), student().to(dtype)
    optimizer = INGD(model, decaying(steps), **settings)
    losses = train(optimizer, lambda: (model(x.to(dtype)).float() - y).square().mean(), steps)
    return optimizer, losses


@functools.cache
def in_float32(steps, **settings):
    """The losses that those in half precision are compared with."""
    return regression(steps, **settings)[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("preset", ["paper", "robust"])
def test_factors_move_during_the_published_warm_up(preset, dtype):
    """Steps of b1 = 0.0002, of which plain rounding to bfloat16 would lose every one."""

    def moved(**settings):
        torch.manual_seed(0)
        model = nn.Linear(128, 96, bias=False)
        x = 0.5 * torch.randn(64, 128)
        optimizer = INGD(model, 0.0, preset=preset, precond_lr=published_precond_lr, update_every=1, **settings)
        train(optimizer, lambda: model(x).square().mean(), 60)
        units = optimizer.state[model.weight].get("level", torch.ones(1)).float() ** 0.5
        # The diagonal, where changes are lost; zeros, as they are elsewhere at first, have finer neighbours.
        return torch.cat([(units * A @ A.mT).diagonal() - 1 for A in optimizer.factors("")])

    full, half = moved(), moved(precond_dtype=dtype)
    assert full.abs().max() > 1e-3
    assert (half @ full / full.square().sum()).item() == pytest.approx(1, abs=0.3)
    assert torch.tensor(1 + 0.0002).bfloat16() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "dtype"),
    [*[(s, torch.bfloat16) for s in ("dense", "triangular", "diagonal", "toeplitz")], ("dense", torch.float16)],
)
def test_factors_in_half_precision_end_within_two_percent(structure, dtype):
    """On average over the last steps, along B itself: polar factors of two runs that differ by rounding go apart.

    The run is so long that the first updates, which differ between the forms of a factor, are forgotten.
    benchmarks/precision.py has an autoencoder, a CNN and a GPT.
    """
    settings = {"structure": structure, "polar": False, "base_width": None}
    _, half = regression(400, precond_dtype=dtype, **settings)
    assert sum(half[-50:]) == pytest.approx(sum(in_float32(400, **settings)[-50:]), rel=0.02)


@pytest.mark.parametrize("b1", [0.2, 0.5])
def test_a_dense_factor_moves_alike_in_either_form(b1):
    """``K K^T`` where K is stored, and P where that is: half precision must not change how factors follow."""
    curvature, one = torch.linspace(0, 1 / b1, 13).view(-1, 1, 1), torch.ones(13, 1, 1)
    rows, ones, damping = curvature.sqrt(), torch.ones(13), torch.full((13,), 0.2)
    gram = GramFactor(1)
    projection = gram.project((one,), RowMoment(rows, ones))
    (moved,) = gram.moved((one,), gram.tangent((one,), projection, ones, damping, 0.5, b1), 2, -1.0)
    m = b1 / 2 * (curvature + 0.2 - 1)
    (root,) = DenseFactor(1).moved((one,), (m,), 2, -1.0)
    torch.testing.assert_close(root**2, moved, rtol=0.08, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("factors", [None, torch.bfloat16])
def test_autocast(dtype, scaled, factors):
    """A scale that overflows float16 at first costs the scaler's steps, and nothing else."""
    (x, y), model = teacher(), student()
    optimizer = INGD(model, decaying(150), precond_dtype=factors)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=scaled)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert losses[-1] == pytest.approx(in_float32(150)[-1], rel=0.15)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
    if scaled and dtype == torch.float16:
        assert scaler.get_scale() < 2.0**24
    assert all(tensor.dtype == (factors or torch.float32) for tensor in kept(optimizer))


def test_statistics_under_autocast_are_in_full_precision():
    (x, y), model = teacher(), student()
    optimizer = INGD(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - y).square().mean()
        loss.backward()  # torch advises against it; it works all the same
        statistics = [optimizer._collector.statistics(layer) for layer in optimizer._layers.values()]
        moments = [moment for s in statistics for moment in (s.inputs, s.outputs)]
        assert all(t.dtype == torch.float32 for moment in moments for t in (*moment.tensors, moment.unit))
        optimizer.step()
    assert optimizer.skipped_updates == 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"precond_dtype": torch.bfloat16}, {"structure": "toeplitz"}])
@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_a_model_in_bfloat16_trains(preset, settings):
    settings = {"preset": preset, "update_every": 1, **settings}
    full = in_float32(200, **settings)
    optimizer, half = regression(200, dtype=torch.bfloat16, **settings)
    assert sum(half[-20:]) < 0.5 * sum(half[:3]) / 3 * 20
    assert sum(half[-20:]) == pytest.approx(sum(full[-20:]), rel=0.25)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
    assert all(tensor.dtype == settings.get("precond_dtype", torch.float32) for tensor in kept(optimizer))
