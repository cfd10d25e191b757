"""What batteries of optimizer tests ask of single steps, their hooks and their gradients.

``BATTERIES.md`` has the list of all cases.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gnomon.optim import INGD, KFAC
from support.bare import classifier, closure_of, contiguous, equal, two_clouds

KINDS = [INGD, KFAC]
BY_HAND = pytest.mark.filterwarnings("ignore:the model's layers have gradients, but no module")


# ---------------------------------------------------------------------- steps that change nothing
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [contiguous, classifier, lambda: nn.Linear(1, 5, bias=False)], ids=range(3))
def test_no_gradients_and_gradients_of_zeros(kind, make):
    model = make()
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
@BY_HAND
def test_weights_and_gradients_of_zeros(kind):
    model = nn.Linear(1, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
        p.grad = torch.zeros_like(p)
    optimizer = kind(model)
    for _ in range(2):
        optimizer.step()
    assert not any(p.any() for p in model.parameters())
    model.weight.grad[0] = 100.0
    optimizer.step()
    assert torch.isfinite(model.weight).all()
    assert model.weight.item() < 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_may_leave_everything_without_a_gradient(kind):
    optimizer = kind(contiguous())
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.step(closure=lambda: None) is None
    assert torch.equal(optimizer.step(lambda: torch.tensor([1.0])), torch.tensor([1.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_empty_or_frozen(kind):
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])
    model[1].requires_grad_(False)
    mixed = [*model[0].parameters(), *model[1].parameters()]
    optimizer = kind(model, groups=[{"params": mixed}, {"params": [*model[2].parameters()]}])
    optimizer.add_param_group({"params": []})
    before = copy.deepcopy(model)
    x = torch.ones(3, 1)
    (model[0](x) + model[1](x) + model[2](x)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert equal(model[1], before[1])
    assert not equal(model[0], before[0])
    assert not equal(model[2], before[2])


# ---------------------------------------------------------------------- gradients
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_not_changed(kind):
    model = contiguous()
    optimizer = kind(model)
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    versions = [p.grad._version for p in model.parameters()]
    for _ in range(5):
        optimizer.step()
    assert versions == [p.grad._version for p in model.parameters()]
    (x, _), watched = two_clouds(), classifier()
    optimizer = kind(watched)
    for _ in range(5):
        optimizer.zero_grad()
        watched(x).sum().backward()
        versions = [p.grad._version for p in watched.parameters()]
        optimizer.step()
        assert versions == [p.grad._version for p in watched.parameters()]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_a_graph(kind):
    """As ``autograd.grad(create_graph=True)`` gives them, and ``backward(create_graph=True)``."""
    (x, y), model = two_clouds(), classifier()
    optimizer = kind(model, 5e-2)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        if step % 2:
            for p, g in zip(
                model.parameters(), torch.autograd.grad(loss, [*model.parameters()], create_graph=True), strict=True
            ):
                p.grad = g
        else:
            loss.backward(inputs=[*model.parameters()], create_graph=True)
        optimizer.step()
        assert not any(torch.is_tensor(v) and v.requires_grad for s in optimizer.state.values() for v in s.values())
        losses.append(loss.item())
    optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
@BY_HAND
def test_gradients_of_some_parameters(kind):
    """Put in by hand: of a weight and not of its bias, zeros, and then ones."""
    model = classifier()
    optimizer = kind(model, 1e-2)
    frozen = model[0].weight.detach().clone()
    for value in (0.0, 1.0, 1.0):
        model[2].weight.grad = torch.full((1, 2), value)
        before = model[2].weight.detach().clone()
        optimizer.step()
        assert torch.isfinite(model[2].weight).all()
        assert value == 0 or not torch.equal(before, model[2].weight)
    assert torch.equal(model[0].weight, frozen)
    assert set(optimizer.state) >= {model[2].weight}


@pytest.mark.parametrize("kind", KINDS)
@BY_HAND
def test_gradients_of_many_shapes(kind):
    """Kernels of one and two dimensions and a recurrent layer in two directions, all of size 1 and larger."""
    for size in (1, 4):
        model = nn.Sequential(
            nn.Conv1d(2 * size, size, 1),
            nn.Conv2d(2 * size, size, (2, 2)),
            nn.LSTM(size, size, num_layers=1, bias=True, bidirectional=True),
        )
        optimizer = kind(model)
        chosen = [model[0].weight, model[1].weight, model[2].weight_ih_l0, model[2].weight_hh_l0]
        before = [p.detach().clone() for p in chosen]
        for p in chosen:
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert not any(torch.equal(p, old) for p, old in zip(chosen, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@BY_HAND
def test_wide_layers_without_a_gradient_of_their_bias(kind):
    model = nn.Sequential(nn.Linear(2, 700), nn.Linear(700, 40), nn.Linear(40, 1))
    optimizer = kind(model, update_every=1)
    for layer in model:
        layer.weight.grad = torch.zeros_like(layer.weight)
    before = copy.deepcopy(model)
    optimizer.step()
    assert equal(model, before)
    for layer in model:
        layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert not any(torch.equal(a.weight, b.weight) for a, b in zip(model, before, strict=True))
    assert all(torch.equal(a.bias, b.bias) for a, b in zip(model, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_filtered_between_the_pass_and_the_step(kind):
    """As where slow parts of gradients are amplified, or their norms are made 1."""
    (x, y), model = two_clouds(), classifier()
    optimizer = kind(model, 5e-2)
    averages = {p: torch.zeros_like(p) for p in model.parameters()}
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        for p, average in averages.items():
            average.lerp_(p.grad, 0.02)
            p.grad = (p.grad + 2 * average) / (p.grad.norm() + 1e-8)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_scalars_and_empty_parameters(kind):
    model = contiguous()
    model.scale, model.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
    optimizer = kind(model)
    (model.objective() * model.scale + model.empty.sum()).backward()
    optimizer.step()
    assert model.scale.item() != 2.0


# ---------------------------------------------------------------------- hooks and compilers
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_around_steps(kind):
    model = contiguous()
    optimizer, other = kind(model), torch.optim.SGD(model.parameters(), 1e-3)
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(0)),
        register_optimizer_step_post_hook(lambda *_: seen.append(5)),
        *(one.register_step_pre_hook(lambda *_: seen.append(1)) for one in (optimizer, other)),
        *(one.register_step_post_hook(lambda *_: seen.append(2)) for one in (optimizer, other)),
    ]
    try:
        optimizer.step(closure_of(model, optimizer))
        assert seen == [0, 1, 2, 5]
        other.step()
        optimizer.step()
        assert seen == [0, 1, 2, 5] * 3
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step(closure_of(model, optimizer))
    assert len(seen) == 12


def test_a_hook_may_change_the_arguments_of_a_step():
    optimizer = INGD(contiguous())
    optimizer.register_step_pre_hook(lambda me, arguments, keywords: ((me, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_is_the_step(kind):
    """``torch.compile`` calls a step as it is, alone and within a function."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [kind(model) for model in models]
    compiled = torch.compile(optimizers[1].step, backend="eager")

    @torch.compile(backend="eager")
    def train(x):
        optimizers[2].zero_grad()
        loss = models[2](x).sin().sum()
        loss.backward()
        optimizers[2].step()
        return loss

    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        for model, optimizer, step in zip(models[:2], optimizers[:2], (optimizers[0].step, compiled), strict=True):
            optimizer.zero_grad()
            model(x).sin().sum().backward()
            step()
        train(x)
        assert equal(models[0], models[1])
        assert equal(models[0], models[2])


# ---------------------------------------------------------------------- errors
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda model: (model.weight,), TypeError, "model must be a torch.nn.Module, got Parameter"),
        (lambda model: ([model.weight],), TypeError, "model must be a torch.nn.Module, got list"),
        (lambda model: ([("weight", model.weight), model.bias],), TypeError, "model must be a torch.nn.Module"),
        (lambda model: (model, torch.ones(2)), TypeError, "lr must be a number"),
        (lambda model: (model, -1e-2), ValueError, "lr must be finite and at least 0"),
        (lambda model: (model, 1e-2, {"weight_decay": -1}), ValueError, "weight_decay must be finite and at least 0"),
        (lambda model: (model, 1e-2, {"momentum": -0.5}), ValueError, "momentum must be at least 0 and below 1"),
        (lambda model: (model, 1e-2, {"momentum": 1.0}), ValueError, "momentum must be at least 0 and below 1"),
        (lambda model: (model, 1e-2, {"damping": -1e-6}), ValueError, "damping must be finite and at least 0"),
        (lambda model: (model, 1e-2, {"update_every": -1}), ValueError, "update_every must be a positive integer"),
        (lambda model: (model, 1e-2, {"step_rms": -0.1}), ValueError, "step_rms must be positive"),
        (lambda model: (model, 1e-2, {"betas": (1.0, 0.0)}), TypeError, "no argument betas: momentum takes the place"),
        (lambda model: (model, 1e-2, {"foreach": True, "fused": True}), TypeError, "no argument fused: leave it out"),
        (lambda model: (model, 1e-2, {"differentiable": True}), TypeError, "no argument differentiable: nothing"),
    ],
    ids=range(14),
)
def test_what_is_refused(kind, arguments, error, message):
    *given, last = arguments(contiguous())
    positional, keywords = (given, last) if isinstance(last, dict) else ([*given, last], {})
    with pytest.raises(error, match=message):
        kind(*positional, **keywords)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_refused(kind):
    model = contiguous()
    with pytest.raises(ValueError, match="params holds weight, which is in another group already"):
        kind(model, groups=[{"params": [model.weight]}, {"params": [model.weight]}])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        kind(model, groups=[{"params": [model.weight, model.weight]}])
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
    with pytest.raises(ValueError, match="no setting lr_scale; lr_scale: give lr times the scale as lr"):
        optimizer.add_param_group({"params": [model.bias], "lr_scale": 0.5})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_no_step_could_use(kind):
    with pytest.raises(TypeError, match="real and imaginary"):
        kind(contiguous(torch.complex64))
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = kind(model)
    before = copy.deepcopy(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert equal(model, before)
    with pytest.raises(ValueError, match="no trainable parameters"):
        kind(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("kind", KINDS)
def test_models_on_the_meta_device(kind):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1))
    optimizer = kind(model)
    assert optimizer.memory_usage() > 0
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    with pytest.raises(RuntimeError, match=r"0\.weight is on the meta device, without values"):
        optimizer.step()
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    with pytest.raises(RuntimeError, match="build the optimizer anew"):
        optimizer.step()
    optimizer = kind(model)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
