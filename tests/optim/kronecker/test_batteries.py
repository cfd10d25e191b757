"""What public batteries of optimizer tests ask of any optimizer, asked of INGD and KFAC by a thin constructor.

The cases follow what torch's ``test/test_optim.py``, timm's ``tests/test_optim.py`` and the generic tests of
pytorch_optimizer check. These optimizers take a model, so bare tensors are put into one. What does not apply:

- ``foreach``, ``fused``, ``capturable``, ``differentiable``, ``maximize``, ``amsgrad``, ``betas``, ``eps``: there
  are no such arguments (``test_arguments.py`` has what is said); steps on CUDA graphs need a GPU;
- complex and sparse parameters: refused with the remedy (``test_arguments.py``, and below);
- a generator of parameters, or an empty list, as the first argument: it must be the model;
- parameters on several devices, and pinned or moved state: there is one device on the machines that run these tests
  (``test_dtype_changes.py`` has changes of type);
- old layouts of torch's own states: there are none of these optimizers;
- cautious, AdaNorm, AdamD, gradient centralization and other options of pytorch_optimizer's own classes.
"""

import copy
import functools
import io
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from gnomon.optim import INGD, KFAC

KINDS = [INGD, KFAC]


class Bare(nn.Module):
    """Tensors as the parameters of a model, with the objective of torch's and timm's batteries."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.register_buffer("input", torch.randn(5, generator=torch.Generator().manual_seed(2)).to(weight.dtype))

    def objective(self):
        return (self.weight.mv(self.input) + self.bias).square().sum()


def contiguous(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return Bare(torch.randn(10, 5, generator=generator).to(dtype), torch.randn(10, generator=generator).to(dtype))


def strided():
    generator = torch.Generator().manual_seed(1)
    return Bare(torch.randn(10, 5, 2, generator=generator)[..., 0], torch.randn(10, 2, generator=generator)[..., 0])


def closure_of(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model.objective()
        loss.backward()
        return loss

    return closure


def equal(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


# ---------------------------------------------------------------------- the loss goes down
SETTINGS = {
    "defaults": lambda model: {},
    "rate": lambda model: {"lr": 3e-3},
    "rate as a tensor": lambda model: {"lr": torch.tensor(1e-2)},
    "weight decay": lambda model: {"weight_decay": 0.5},
    "no weight decay": lambda model: {"weight_decay": 0.0},
    "no momentum": lambda model: {"momentum": 0.0},
    "momentum": lambda model: {"momentum": 0.95},
    "two groups": lambda model: {"groups": [{"params": [model.weight]}, {"params": [model.bias], "lr": 3e-3}]},
    "one group": lambda model: {"groups": [{"params": model.bias, "lr": 3e-3}]},
    "gradient": lambda model: {"curvature": "gradient"},
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
    for _ in range(50):
        returned = optimizer.step(closure)
        assert isinstance(returned, torch.Tensor)
    assert closure().item() < first


SCHEDULES = {
    "steps": [functools.partial(schedules.StepLR, gamma=0.9, step_size=10)],
    "warm-up": [functools.partial(schedules.LinearLR, start_factor=0.4, total_iters=4)],
    "plateau": [schedules.ReduceLROnPlateau],
    "several": [
        functools.partial(schedules.StepLR, gamma=0.99, step_size=10),
        functools.partial(schedules.ExponentialLR, gamma=0.99),
        schedules.ReduceLROnPlateau,
    ],
    "cosine": [functools.partial(schedules.CosineAnnealingLR, T_max=50)],
    "one cycle": [functools.partial(schedules.OneCycleLR, max_lr=1e-2, total_steps=60, cycle_momentum=False)],
    "cycle of momenta": [functools.partial(schedules.OneCycleLR, max_lr=1e-2, total_steps=60)],
}


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_schedulers(name, rate):
    model = contiguous()
    optimizer = INGD(model, rate if isinstance(rate, float) else rate.clone())
    chosen = [make(optimizer) for make in SCHEDULES[name]]
    closure = closure_of(model, optimizer)
    first = closure().item()
    for _ in range(50):
        loss = optimizer.step(closure)
        for schedule in chosen:
            schedule.step(*([loss] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
    assert closure().item() < first


@pytest.mark.parametrize("kind", KINDS)
def test_rosenbrock_from_half_of_the_gradient_at_a_time(kind):
    """A vector of two numbers, which has no factors; each step sees one coordinate of the gradient."""
    model = nn.Module()
    model.x = nn.Parameter(torch.tensor([1.5, 1.5]))
    optimizer = kind(model, 1e-3)
    solution = torch.ones(2)
    first = model.x.detach().dist(solution)
    for step in range(300):
        x, y = model.x.detach()
        gradient = torch.stack([-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)])
        model.x.grad = gradient * torch.tensor([step % 2, 1 - step % 2])
        optimizer.step()
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
    torch.manual_seed(0)
    x = torch.randn(100, 2)
    y = (x.sum(1, keepdim=True) > 0).float()
    model = nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(), nn.Linear(2, 1)).to(dtype)
    optimizer = kind(model, 5e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5 * losses[-1]


# ---------------------------------------------------------------------- states
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_states_go_through_files_and_are_deterministic(kind, name):
    model = contiguous()
    optimizer = kind(model, **SETTINGS[name](model))
    for _ in range(8):
        optimizer.step(closure_of(model, optimizer))
    twin = copy.deepcopy(model)
    other = kind(twin, **SETTINGS[name](twin))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    kept = copy.deepcopy(loaded)
    other.load_state_dict(loaded)
    assert_equal(loaded, kept)
    for _ in range(8):
        optimizer.step(closure_of(model, optimizer))
        other.step(closure_of(twin, other))
        assert equal(model, twin)
    assert_equal(optimizer.state_dict(), other.state_dict())


def assert_equal(one, other):
    """Nested dictionaries and lists of tensors and numbers."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_a_step_has_made_is_not_empty(kind):
    model = contiguous()
    optimizer = kind(model)
    assert not optimizer.state_dict()["state"]
    optimizer.step(closure_of(model, optimizer))
    assert set(optimizer.state) == set(model.parameters())
    assert all(optimizer.state[p] for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_all_public_attributes(kind):
    model = contiguous()
    optimizer = kind(model)
    optimizer.step(closure_of(model, optimizer))
    copied = copy.deepcopy(optimizer)
    public = [{name for name in vars(one) if not name.startswith("_")} for one in (optimizer, copied)]
    assert public[0] == public[1]


# ---------------------------------------------------------------------- steps that change nothing
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradients_and_gradients_of_zeros(kind):
    model = contiguous()
    optimizer = kind(model, weight_decay=0.0)
    before = copy.deepcopy(model)
    optimizer.step()
    assert equal(model, before)
    assert not optimizer.state_dict()["state"]
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert equal(model, before)
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_may_leave_everything_without_a_gradient(kind):
    optimizer = kind(contiguous())
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.step(closure=lambda: None) is None


@pytest.mark.parametrize("kind", KINDS)
def test_scalars_and_empty_parameters(kind):
    model = contiguous()
    model.scale, model.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
    optimizer = kind(model)
    (model.objective() * model.scale + model.empty.sum()).backward()
    optimizer.step()
    assert model.scale.item() != 2.0


# ---------------------------------------------------------------------- hooks
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_around_steps_and_states(kind):
    model = contiguous()
    optimizer = kind(model)
    seen = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving")),
        optimizer.register_state_dict_post_hook(lambda _, state: seen.append("saved")),
        optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("loading")),
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded")),
    ]
    optimizer.step(closure_of(model, optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "saving", "saved", "loading", "loaded"]
    for handle in handles:
        handle.remove()
    optimizer.step(closure_of(model, optimizer))
    assert len(seen) == 6


def test_a_hook_may_change_the_arguments_of_a_step():
    model = contiguous()
    optimizer = INGD(model)
    optimizer.register_step_pre_hook(lambda me, arguments, keywords: ((me, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


# ---------------------------------------------------------------------- groups and errors
@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_refused(kind):
    model = contiguous()
    optimizer = kind(model, groups=[{"params": [model.weight]}])
    for group, error in [
        ({"params": [model.weight]}, ValueError),
        ({"params": [torch.ones(2)]}, ValueError),
        ({"params": [3]}, TypeError),
        ([model.weight], TypeError),
        ({"params": [model.bias], "unknown": 1}, ValueError),
    ]:
        with pytest.raises(error):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_no_step_could_use(kind):
    with pytest.raises(TypeError, match="real and imaginary"):
        kind(Bare(torch.randn(10, 5, dtype=torch.complex64), torch.randn(10)))
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kind(model)
    before = copy.deepcopy(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert equal(model, before)


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
