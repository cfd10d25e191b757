"""What batteries of optimizer tests ask: that a loss goes down. ``BATTERIES.md`` has the list of all cases."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from gnomon.optim import INGD, KFAC
from support.bare import Bare, classifier, closure_of, contiguous, equal, fall_of_the_loss, strided, two_clouds
from support.teaching import train

KINDS = [INGD, KFAC]

SETTINGS = {
    "defaults": lambda model: {},
    "rate": lambda model: {"lr": 3e-3},
    "rate as a tensor": lambda model: {"lr": torch.tensor(1e-2)},
    "weight decay": lambda model: {"weight_decay": 0.5},
    "weight decay of 1": lambda model: {"lr": 1e-3, "weight_decay": 1.0},
    "no weight decay": lambda model: {"weight_decay": 0.0},
    "no momentum": lambda model: {"momentum": 0.0},
    "momentum": lambda model: {"momentum": 0.95},
    "two groups": lambda model: {"groups": [{"params": [model.weight]}, {"params": [model.bias], "lr": 3e-3}]},
    "one group": lambda model: {"groups": [{"params": model.bias, "lr": 3e-3}]},
    "gradient": lambda model: {"curvature": "gradient"},
    "steps as long as they are": lambda model: {"lr": 1e-3, "step_rms": None},
    "paper": lambda model: {"lr": 1e-3, "preset": "paper"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [contiguous, strided])
@pytest.mark.parametrize("name", SETTINGS)
def test_goes_in_the_right_direction(kind, make, name):
    model = make()
    optimizer = kind(model, **SETTINGS[name](model))
    assert "Parameter Group 0" in repr(optimizer)
    closure = closure_of(model, optimizer)
    first = closure().item()
    for _ in range(20):
        assert isinstance(optimizer.step(closure), torch.Tensor)
    assert closure().item() < first


SCHEDULES = {
    "steps": [functools.partial(schedules.StepLR, gamma=0.9, step_size=10)],
    "warm-up": [functools.partial(schedules.LinearLR, start_factor=0.4, total_iters=4)],
    "constant warm-up": [functools.partial(schedules.ConstantLR, factor=0.4, total_iters=4)],
    "polynomial": [functools.partial(schedules.PolynomialLR, power=0.9, total_iters=4)],
    "plateau": [schedules.ReduceLROnPlateau],
    "steps and plateau": [functools.partial(schedules.StepLR, gamma=0.9, step_size=10), schedules.ReduceLROnPlateau],
    "several": [
        functools.partial(schedules.StepLR, gamma=0.99, step_size=10),
        functools.partial(schedules.ExponentialLR, gamma=0.99),
        schedules.ReduceLROnPlateau,
    ],
    "cosine": [functools.partial(schedules.CosineAnnealingLR, T_max=20)],
    "one cycle": [functools.partial(schedules.OneCycleLR, max_lr=1e-2, total_steps=30, cycle_momentum=False)],
    "cycle of momenta": [functools.partial(schedules.OneCycleLR, max_lr=1e-2, total_steps=30)],
}


def follow(schedulers, loss):
    for schedule in schedulers:
        schedule.step(*([loss.detach()] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
@pytest.mark.parametrize("make", [contiguous, strided])
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_schedulers(name, make, rate):
    model = make()
    optimizer = INGD(model, rate if isinstance(rate, float) else rate.clone())
    chosen = [scheduler(optimizer) for scheduler in SCHEDULES[name]]
    closure = closure_of(model, optimizer)
    first = closure().item()
    for _ in range(20):
        follow(chosen, optimizer.step(closure))
    assert closure().item() < first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_groups_with_schedulers(kind, name):
    """Two matrices, one of which has a rate of its own."""
    parts = nn.ModuleList([contiguous(), contiguous(seed=3)])
    optimizer = kind(parts, 1e-2, groups=[{"params": [parts[1].weight], "lr": 3e-3}])
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2, 3e-3}
    chosen = [scheduler(optimizer) for scheduler in SCHEDULES[name]]
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = sum(part.objective() for part in parts)
        loss.backward()
        optimizer.step()
        follow(chosen, loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimensions", [0, 1, 2])
def test_a_rate_of_one_element_takes_the_steps_of_a_number(kind, dimensions):
    models = [contiguous(), contiguous()]
    optimizers = [kind(models[0], 1e-3), kind(models[1], torch.tensor(1e-3).reshape([1] * dimensions))]
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step(closure_of(model, optimizer))
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(one, other)


# ---------------------------------------------------------------------- groups
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_without_weight_decay(kind):
    parts = nn.ModuleList([contiguous(), contiguous(seed=3)])
    optimizer = kind(parts, weight_decay=0.5, groups=[{"params": [*parts[1].parameters()], "weight_decay": 0.0}])
    first = sum(part.objective() for part in parts).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss = sum(part.objective() for part in parts)
        loss.backward()
        optimizer.step()
    assert loss.item() < first
    before = [part.weight.detach().clone() for part in parts]
    for p in parts.parameters():
        p.grad = torch.zeros_like(p)
    kind(parts, weight_decay=0.5, momentum=0.0, groups=[{"params": [parts[1].weight], "weight_decay": 0.0}]).step()
    assert torch.equal(before[1], parts[1].weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_with_a_tiny_rate_stays(kind):
    """Two groups have a usual rate; the rate of all others is so small that nothing of them moves."""
    model = contiguous()
    model.other = nn.Parameter(torch.randn(2, 2))
    optimizer = kind(model, 1e-28, groups=[{"params": [model.weight, model.bias], "lr": 1e-3}])
    first, before = model.objective().item(), model.other.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.objective()
        loss.backward()
        model.other.grad = torch.rand_like(model.other)
        optimizer.step()
    assert loss.item() < first
    assert torch.equal(model.other, before)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_that_fall_with_depth(kind):
    """As layer-wise decay of the rate makes groups, with no weight decay for vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 2))
    scales = {"0": 0.5, "1": 0.5, "3": 1.0}
    groups = [
        {"params": [p], "lr": 1e-2 * scales[name[0]], "weight_decay": 0.05 if p.ndim > 1 else 0.0}
        for name, p in model.named_parameters()
    ]
    optimizer = kind(model, 1e-2, groups=groups)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in model.parameters()] == [5e-3] * 4 + [1e-2] * 2
    x = torch.randn(16, 10)
    losses = train(optimizer, lambda: (model(x) - 1).square().mean(), 20)
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------- models
ROSENBROCK = {"constant": [], "falling": [functools.partial(schedules.StepLR, gamma=0.99, step_size=10)]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROSENBROCK)
def test_rosenbrock_from_half_of_the_gradient_at_a_time(kind, name):
    """A vector of two numbers, which has no factors; each step sees one coordinate of the gradient."""
    model = nn.Module()
    model.x = nn.Parameter(torch.tensor([1.5, 1.5]))
    optimizer = kind(model, 1e-3)
    chosen = [scheduler(optimizer) for scheduler in ROSENBROCK[name]]
    solution = torch.ones(2)
    first = model.x.detach().dist(solution)
    for step in range(300):
        x, y = model.x.detach()
        gradient = torch.stack([-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)])
        model.x.grad = gradient * torch.tensor([step % 2, 1 - step % 2])
        optimizer.step()
        follow(chosen, gradient.sum())
    assert model.x.detach().dist(solution) < first


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_tiny_model_falls_at_each_step(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
    optimizer = kind(model, 1e-2)
    x = torch.linspace(0.1, 0.6, 6).view(3, 2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(after < before for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logistic_regression(kind, dtype):
    """The loss falls by a factor of 1.5; in bfloat16 under autocast, with a scaler that is off."""
    (x, y), model = two_clouds(), classifier().to(dtype)
    optimizer = kind(model, 5e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x.to(dtype)), y.to(dtype))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[0] > 1.5 * losses[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_complex_numbers_as_two_real_parts(kind):
    """What the message for complex parameters says to do."""
    model = nn.ModuleList([contiguous(), contiguous(seed=3)])
    optimizer = kind(model)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.complex(model[0].weight, model[1].weight).mv(model[0].input.to(torch.complex64)).abs().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_several_types(kind):
    model = nn.ModuleList([contiguous(torch.float32), contiguous(torch.float64), contiguous(torch.bfloat16)])
    optimizer = kind(model)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = sum(part.objective().double() for part in model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert [part.weight.dtype for part in model] == [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the model's layers have gradients, but no module")
def test_a_weight_and_a_bias_of_different_types(kind):
    model = classifier()
    model[0].weight.data = model[0].weight.data.half()
    optimizer, before = kind(model), copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    for p, old in zip(model.parameters(), before.parameters(), strict=True):
        assert p.dtype == old.dtype
        assert not torch.equal(p, old)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("default", [torch.float64, torch.float16], ids=str)
def test_the_default_type_of_tensors_does_not_matter(kind, default):
    """Nor does a step without gradients in the middle."""
    usual = torch.get_default_dtype()
    found = [nn.ModuleList([contiguous(torch.float64)]) for _ in range(2)]
    for model, dtype in zip(found, (usual, default), strict=True):
        torch.set_default_dtype(dtype)
        try:
            model.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            optimizer = kind(model)
            for step in range(7):
                optimizer.zero_grad()
                if step != 2:
                    (model[0].objective() * model.scale).backward()
                optimizer.step()
        finally:
            torch.set_default_dtype(usual)
    assert equal(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_frozen_for_some_steps(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
    model.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = kind(model, 1e-2)
    x = torch.linspace(0.1, 0.6, 6).view(3, 2)
    moved = []
    for step in range(7):
        model[2].requires_grad_(step not in (3, 4))
        before = model[2].weight.detach().clone()
        optimizer.zero_grad()
        if step != 2:
            (model[:4](x) * model.scale).sum().backward()
        optimizer.step()
        moved.append(not torch.equal(before, model[2].weight))
    assert moved == [True, True, False, False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 1, 2, 1)).to(memory_format=torch.channels_last)
    x = torch.randn(20, 1, 2, 2).to(memory_format=torch.channels_last)
    optimizer = kind(model)
    losses = train(optimizer, lambda: (model(x) - 1).square().mean(), 5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_losses_of_one_network(kind):
    """Several tasks: heads on common features, whose gradients are added."""
    (x, y), trunk = two_clouds(), classifier()
    torch.manual_seed(1)
    model = nn.ModuleDict({"trunk": trunk[:2], "one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})
    optimizer = kind(model, 5e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        h = model["trunk"](x)
        parts = (
            nn.functional.binary_cross_entropy_with_logits(model["one"](h), y),
            nn.functional.l1_loss(model["two"](h), y),
        )
        for part in parts:
            part.backward(retain_graph=True)
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    assert losses[0] > 1.25 * losses[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_pass_at_perturbed_weights(kind):
    """Sharpness-aware minimization: the step is taken with the gradient at other weights."""
    (x, y), model = two_clouds(), classifier()
    optimizer = kind(model, 5e-2)

    def pass_through():
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        return loss.item()

    losses = []
    for _ in range(20):
        losses.append(pass_through())
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            torch._foreach_add_([*model.parameters()], moves)
            torch.set_grad_enabled(True)
            pass_through()
            torch.set_grad_enabled(False)
            torch._foreach_sub_([*model.parameters()], moves)
        optimizer.step()
    assert losses[0] > 1.3 * losses[-1]


def test_a_model_of_other_settings_falls_as_far():
    """Options by which other optimizers have variants: ``kl_clip``, low memory, factors in bfloat16."""
    for settings in ({"kl_clip": 1e-2}, {"memory": "low"}, {"precond_dtype": torch.bfloat16}, {"polar": False}):
        model = classifier()
        assert fall_of_the_loss(model, INGD(model, 5e-2, **settings), 20) > 1.5


def test_bare_tensors_are_matrices_and_vectors():
    assert isinstance(contiguous(), Bare)
    names = {row.name: row.treatment for row in INGD(contiguous()).summary().rows}
    assert names == {"weight": "INGD, gradient curvature", "bias": "adamw"}
