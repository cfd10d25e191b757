"""Models in pure half precision: sizes x rows x layers x structures."""

import copy
import math

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.structures import NAMES

TYPES = (torch.bfloat16, torch.float16)


def step(model, optimizer, inputs, steps=3):
    targets = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(inputs).float()
        (output - torch.randn(output.shape, generator=targets)).square().mean().backward()
        optimizer.step()


def change(kind, make, inputs, dtype, **options):
    """How far each parameter moves, and how far in float32."""
    moved = []
    for wanted in (dtype, torch.float32):
        torch.manual_seed(0)
        model = make().to(wanted)
        x = inputs.to(wanted) if inputs.is_floating_point() else inputs
        before = [p.detach().clone() for p in model.parameters()]
        # The polar factor of a few rows enlarges what half precision rounds: test_polar.py has more rows.
        own = {"polar": False} if kind is INGD else {}
        optimizer = kind(model, lr=3e-2, weight_decay=0.0, update_every=1, **own, **options)
        step(model, optimizer, x)
        assert optimizer.skipped_steps == optimizer.skipped_updates == 0
        after = [p.detach() for p in model.parameters()]
        assert all(p.dtype == wanted for p in after)
        moved.append(torch.cat([(a - b).float().flatten() for a, b in zip(after, before, strict=True)]))
    return moved


def check(moved):
    """The same way as in float32, as far as half precision can tell."""
    half, full = moved
    assert half.isfinite().all()
    assert torch.nn.functional.cosine_similarity(half, full, dim=0) > 0.9


@pytest.mark.parametrize("kind", [INGD, KFAC])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("size", "rows"), [(16, 4), (16, 8), (16, 16), (16, 40), (64, 32), (64, 64), (64, 100)])
def test_fewer_and_more_rows_than_a_layer_is_wide(size, rows, dtype, kind):
    check(change(kind, lambda: nn.Linear(size, size), torch.randn(rows, size), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("structure", NAMES)
@pytest.mark.parametrize("rows", [8, 80])
def test_every_structure(structure, rows, dtype):
    check(change(INGD, lambda: nn.Linear(40, 24), torch.randn(rows, 40), dtype, structure=structure))


LAYERS = {
    "no bias": (lambda: nn.Linear(20, 12, bias=False), torch.randn(5, 20)),
    "sequence": (lambda: nn.Linear(20, 12), torch.randn(2, 3, 20)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), torch.randn(3, 4, 5, 5)),
    "grouped convolution": (lambda: nn.Conv1d(4, 8, 3, groups=2), torch.randn(3, 4, 9)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 2, stride=2), torch.randn(2, 4, 3, 3)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 3)), torch.randint(0, 7, (4, 5))),
    "perceptron": (lambda: nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 3)), torch.randn(6, 9)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), torch.randn(4, 8, 16)),
}


@pytest.mark.parametrize("kind", [INGD, KFAC])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("make", "inputs"), LAYERS.values(), ids=LAYERS)
def test_every_kind_of_layer(make, inputs, dtype, kind):
    check(change(kind, make, inputs, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_wide_layer(dtype):
    torch.manual_seed(0)
    model = nn.Linear(512, 512).to(dtype)
    optimizer = INGD(model, update_every=1)
    step(model, optimizer, torch.randn(256, 512).to(dtype), steps=1)
    assert optimizer.skipped_steps == 0
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_penalty_on_weights_counts(dtype):
    """A gradient that is not the product of its rows is preconditioned as it is: the penalty shrinks the weights."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False).to(dtype)
    optimizer = INGD(model, weight_decay=0.0, lr=1e-2)
    start = model.weight.float().norm()
    for _ in range(20):
        optimizer.zero_grad()
        loss = 1e-3 * model(torch.randn(8, 32).to(dtype)).float().square().mean() + model.weight.float().square().sum()
        loss.backward()
        optimizer.step()
    assert model.weight.float().norm() < 0.8 * start


@pytest.mark.parametrize("settings", [{"kl_clip": 1e-2}, {"step_rms": None}], ids=str)
def test_natural_steps_beyond_the_range_of_the_weights(settings):
    """Small gradients have long natural steps, which float16 cannot hold: the step is skipped, and nothing changes."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).half()
    before = copy.deepcopy(model)
    optimizer = INGD(model, damping=1e-3, curvature="gradient", **settings)
    model(torch.randn(16, 5).half()).float().square().mean().backward()
    for p in model.parameters():
        p.grad = p.grad.sign() * 6e-8
    with pytest.warns(UserWarning, match="the step was skipped, and nothing changed"):
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert all(p.isfinite().all() for state in optimizer.state.values() for p in state.values())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_sampled_targets_of_outputs_that_are_not_finite(likelihood):
    model = nn.Linear(5, 3)
    optimizer = INGD(model, fisher="mc")
    output = model(torch.full((4, 5), math.nan))
    optimizer.observe(output, likelihood)
    output.sum().backward()
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(p.isfinite().all() for p in model.parameters())
