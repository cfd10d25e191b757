"""The direction and the length of a step."""

import math

import pytest
import torch
from torch import nn

from gnomon.linalg import rms_of
from gnomon.optim import INGD
from gnomon.optim.kronecker.layer_steps import EMBEDDING, LEAST_WIDTH, PLAIN
from support.matrices import F64, close
from support.perceptron import batches
from support.teaching import teacher


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e15])
def test_the_size_of_a_step_at_any_scale(scale):
    model = nn.Linear(5, 3)
    optimizer = INGD(model, 1e-2, weight_decay=0.0, base_width=None)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    (scale * model(batches(1)[0]).square().mean()).backward()
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after - before).square().mean().sqrt().item() == pytest.approx(0.5e-2, rel=1e-4)


def test_the_step_has_the_given_size():
    model = nn.Linear(6, 4)
    optimizer = INGD(model, 1e-2, weight_decay=0.0, step_rms=0.3, base_width=None)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    x, _ = teacher()
    model(x).square().mean().backward()
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after - before).square().mean().sqrt().item() == pytest.approx(0.3e-2, rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"polar": False}, {"base_width": 32, "step_rms": 0.1}], ids=str)
def test_steps_are_smaller_in_wider_layers(settings):
    """The root mean square of a step is ``step_rms sqrt(base_width / p)``, half of it without polar factors, and
    twice ``step_rms`` in an embedding.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 60), nn.Linear(60, 300), nn.Tanh(), nn.Linear(300, 4, bias=False))
    optimizer = INGD(model, 1e-2, weight_decay=0.0, **settings)
    step_rms, base = settings.get("step_rms", 0.5), settings.get("base_width", 128)
    base *= 1 if settings.get("polar", True) else PLAIN**2
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randint(20, (64,))).square().mean().backward()
    optimizer.step()
    table, *first, second = (p.detach() - old for p, old in zip(model.parameters(), before, strict=True))
    first = torch.cat([first[0], first[1][:, None]], 1)
    lengths = [step.square().mean().sqrt().item() for step in (table, first, second)]
    wanted = [1e-2 * step_rms * factor for factor in (EMBEDDING, math.sqrt(base / 61), math.sqrt(base / 300))]
    assert lengths == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (nn.Conv2d(64, 8, 3), 64),
        (nn.Conv2d(3, 8, 8, bias=False), 64),
        (nn.Conv2d(12, 12, 7, groups=12), 49),
        (nn.Conv1d(120, 8, 4, groups=2), 60),
        (nn.ConvTranspose2d(50, 4, 3), 50),
        (nn.Conv2d(3, 8, 3), LEAST_WIDTH),
        (nn.Conv1d(16, 8, 4, groups=2), LEAST_WIDTH),
    ],
    ids=str,
)
def test_the_width_of_a_convolution(module, width):
    """It is the larger one of the channels and the positions of a patch, and 48 at least."""
    optimizer = INGD(module, 1e-2, weight_decay=0.0)
    before = [p.detach().clone() for p in module.parameters()]
    module(torch.randn(4, module.in_channels, *(9,) * len(module.kernel_size))).square().mean().backward()
    optimizer.step()
    layer = next(iter(optimizer._layers.values())).layer
    moved = [p.detach() - old for p, old in zip(module.parameters(), before, strict=True)]
    count = sum(layer.weight.numel() if p.ndim > 1 else p.numel() for p in layer.parameters)
    total = sum(step.square().sum() for step in moved[: len(layer.parameters)])
    assert (total / count).sqrt().item() == pytest.approx(0.5e-2 * math.sqrt(128 / width), rel=1e-4)


def test_the_predicted_change_is_bounded():
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    x = torch.randn(64, 6)
    before = model.weight.detach().clone()
    optimizer = INGD(model, 10.0, kl_clip=1e-3, weight_decay=0.0, momentum=0.0)
    model(x).square().sum(-1).mean().backward()
    gradient = model.weight.grad.clone()
    optimizer.step()
    K, C = optimizer.factors("")
    step, natural = before - model.weight.detach(), C @ C.T @ gradient @ K @ K.T
    share = (step.norm() / (10.0 * natural.norm())).item()
    torch.testing.assert_close(step, 10.0 * share * natural)
    assert 10.0**2 * share**2 * (gradient * natural).sum().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_step_is_along_nesterovs_average_and_as_long_as_asked():
    """Against the formulas of INGD's docstring, with factors that do nothing and a step that is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = INGD(model, 0.1, momentum=0.8, weight_decay=0.3, step_rms=0.2, base_width=None, structure="identity")
    weights = [torch.cat([m.weight, m.bias[:, None]], 1).detach() for m in (model[0], model[2])]
    averages = [torch.zeros_like(w) for w in weights]
    for number in range(8):
        optimizer.zero_grad()
        (model(torch.randn(6, 5, dtype=F64)).square().sum() * (math.nan if number == 4 else 1)).backward()
        optimizer.step()
        for i, m in enumerate((model[0], model[2])):
            g = torch.cat([m.weight.grad, m.bias.grad[:, None]], 1)
            if number != 4:
                averages[i] = 0.8 * averages[i] + 0.2 * g
                ahead = 0.8 * averages[i] + 0.2 * g
                weights[i] = (1 - 0.1 * 0.3) * weights[i] - 0.1 * 0.2 * ahead / ahead.square().mean().sqrt()
            close(torch.cat([m.weight, m.bias[:, None]], 1).detach(), weights[i])
            close(optimizer.state[m.weight]["momentum_buffer"], averages[i][:, :-1])
    assert optimizer.skipped_steps == 1


def test_the_root_mean_square_of_directions_in_float16():
    large = torch.full((1, 99, 101), 6e4, dtype=torch.float16)
    close(rms_of([large], large.device), large[0, 0, :1].double(), 1e-5)


@pytest.mark.parametrize("scale", [1e-36, 1e-32, 1e-17, 1e-14, 1.0, 1e14, 1e17, 1e32, 1e37])
def test_the_root_mean_square_of_directions(scale):
    torch.manual_seed(1)
    shapes = (1, 501, 100), (3, 35, 20), (1, 1, 5000), (1, 5000, 1), (2, 1, 1)
    stacks = [scale * torch.randn(shape) for shape in shapes]
    stacks[0], stacks[1] = stacks[0][..., :99], stacks[1][..., :19]  # with gaps between the rows
    true = torch.cat([stack.double().square().mean((1, 2)).sqrt() for stack in stacks])
    found = rms_of(stacks, stacks[0].device)
    assert found.dtype == F64
    torch.testing.assert_close(found, true, rtol=1e-6, atol=0)
    wide = rms_of([stack.double() for stack in stacks], stacks[0].device)
    torch.testing.assert_close(wide, true, rtol=1e-10, atol=0)
    halved = [stack.bfloat16() for stack in stacks]
    found, widened = (rms_of(many, stacks[0].device) for many in (halved, [stack.float() for stack in halved]))
    torch.testing.assert_close(found, widened, rtol=1e-6, atol=0)
    stacks[0][0, 123, 4] = math.nan
    assert rms_of(stacks, stacks[0].device).isfinite().tolist() == [False] + 7 * [True]
    assert (rms_of([0 * stack for stack in stacks[1:]], stacks[0].device) == 0).all()


@pytest.mark.parametrize(("settings", "shares"), [({}, (0.5, 1, 0.25)), ({"scheduled_decay": False}, (0.5, 1, 0.5))])
def test_decay_follows_the_schedule(settings, shares):
    """A weight whose steps are tiny shrinks by ``lr weight_decay lr / max(lr)``, with the largest rate so far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    optimizer = INGD(model, 1.0, weight_decay=0.1, step_rms=1e-12, fallback_lr=1.0, **settings)
    for rate, share in zip((0.5, 1.0, 0.5), shares, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=F64)).square().sum().backward()
        optimizer.step()
        close(model[0].weight.detach(), (1 - 0.1 * share) * before, 1e-9)
    copy = INGD(model, 1.0, **settings)
    copy.load_state_dict(optimizer.state_dict())
    assert copy.param_groups[0]["peak_lr"] == optimizer.param_groups[0]["peak_lr"]
