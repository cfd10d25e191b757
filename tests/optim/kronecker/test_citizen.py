"""Ordinary situations of PyTorch in which an optimizer with hooks and factors can break."""

import copy
import io
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from gnomon.optim import INGD, KFAC

OPTIMIZERS = [INGD, KFAC]


def perceptron(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def batches(count, dtype=torch.float32, size=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 5, generator=generator, dtype=dtype) for _ in range(count)]


def objective(model, x):
    return (model(x) - x[:, :3].sin()).square().mean()


def train(model, optimizer, data, loss=objective):
    losses = []
    for x in data:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def train_scaled(model, optimizer, data, scaler):
    for x in data:
        optimizer.zero_grad()
        scaler.scale(objective(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()


def equal(model, twin):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def close(model, twin, **tolerance):
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


# ---------------------------------------------------------------------- state
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precond_dtype": torch.bfloat16},
        {"precond_dtype": torch.float16},
        {"structure": "arrow"},
        {"preset": "paper"},
    ],
)
@pytest.mark.parametrize("after", [3, 37])
def test_resume_is_bit_for_bit(settings, after):
    """Also in the middle of an interval between updates, through a file that torch loads at its defaults."""
    data = batches(60)
    model = perceptron()
    optimizer = INGD(model, update_every=7, **settings)
    train(model, optimizer, data[:after])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    twin = perceptron()
    resumed = INGD(twin, update_every=7, **settings)
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, data[after:])
    train(twin, resumed, data[after:])
    assert equal(model, twin)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_loading_leaves_the_dictionary_alone_and_shares_nothing(kind):
    model = perceptron()
    optimizer = kind(model)
    train(model, optimizer, batches(5))
    saved = copy.deepcopy(optimizer.state_dict())
    twin = perceptron()
    other = kind(twin)
    other.load_state_dict(saved)
    before = copy.deepcopy(saved)
    train(twin, other, batches(5))
    for number, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before["state"][number][key])), key
    assert saved["param_groups"] == before["param_groups"]


def test_state_is_plain_tensors():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(3))
    for state in optimizer.state_dict()["state"].values():
        assert all(type(value) is torch.Tensor for value in state.values())


def test_a_state_of_another_model_is_refused():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(3))
    saved = optimizer.state_dict()
    other = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 3))
    fresh = INGD(other)
    with pytest.raises(ValueError, match=r"another model, structure or preset: .* of 0\.weight has shape"):
        fresh.load_state_dict(saved)
    with pytest.raises(ValueError, match="another model, structure or preset: K of"):
        INGD(perceptron(), structure="diagonal").load_state_dict(saved)
    with pytest.raises(ValueError, match="another optimizer: its groups have no decay"):
        KFAC(perceptron()).load_state_dict(saved)
    paper = INGD(perceptron(), preset="paper")
    train(paper._model, paper, batches(2))
    fresh = INGD(perceptron())
    with pytest.raises(ValueError, match=r"preset: KK of .* is missing"):
        fresh.load_state_dict(paper.state_dict())
    with pytest.raises(ValueError, match="state_dict must have 'state' and 'param_groups'"):
        fresh.load_state_dict({})
    with pytest.raises(ValueError, match="another model or other groups"):
        INGD(nn.Linear(5, 3)).load_state_dict(saved)
    assert not fresh.state
    assert fresh.param_groups[0]["step"] == 0


# ---------------------------------------------------------------------- life and death
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_freed_with_its_hooks(kind):
    model = perceptron()
    optimizer = kind(model)
    train(model, optimizer, batches(2))
    reference = weakref.ref(optimizer)
    del optimizer  # at once, without the garbage collector
    assert reference() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_close_removes_the_hooks_and_training_goes_on():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(2))
    before = optimizer.factors("0")
    optimizer.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    train(model, optimizer, batches(2))
    assert torch.equal(optimizer.factors("0")[0], before[0])


def test_a_copy_of_the_model_is_free():
    model = perceptron()
    optimizer = INGD(model)
    data = batches(4)
    train(model, optimizer, data[:2])
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    train(twin, plain, data)
    reference = perceptron()
    other = INGD(reference)
    train(reference, other, data)
    train(model, optimizer, data[2:])
    assert equal(model, reference)


# ---------------------------------------------------------------------- what the model does
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("curvature", ["kfac", "gradient"])
def test_tied_weights_are_stepped_once(curvature):
    torch.manual_seed(0)
    model = Tied()
    tokens = torch.randint(7, (16, 3))
    optimizer = INGD(model, 1e-2, curvature=curvature, weight_decay=0.0)
    before = model.head.weight.clone()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    rms = (model.head.weight - before).square().mean().sqrt()
    torch.testing.assert_close(rms, torch.tensor(0.5e-2), rtol=1e-4, atol=0)
    assert [row.name for row in optimizer.summary().rows] == ["embedding.weight"]


def test_linear_layers_that_share_a_weight_but_not_the_bias():
    torch.manual_seed(0)
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = INGD(model)
    losses = train(model, optimizer, batches(30), lambda m, x: m(x).square().mean())
    assert losses[-1] < losses[0]
    rows = {row.name: row.treatment for row in optimizer.summary().rows}
    assert rows["0.bias"] == rows["2.bias"] == "adamw"


class Fickle(nn.Module):
    """Leaves a layer out at times, and uses another twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.use = True

    def forward(self, x):
        x = self.a(torch.tanh(self.a(x)))
        return self.c(self.b(x) if self.use else x)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_that_is_not_used_and_one_that_is_used_twice(kind):
    torch.manual_seed(0)
    model = Fickle()
    optimizer = kind(model, 1e-2, update_every=2)
    model.use = False
    before = model.b.weight.clone()
    train(model, optimizer, batches(3))
    assert torch.equal(model.b.weight, before)
    model.use = True
    losses = train(model, optimizer, batches(40))
    assert not torch.equal(model.b.weight, before)
    assert losses[-1] < 0.7 * losses[0]


def test_frozen_before_and_after():
    model = perceptron()
    model[0].bias.requires_grad_(False)
    optimizer = INGD(model, 1e-2)
    assert [row.treatment for row in optimizer.summary().rows if row.name == "0.bias"] == ["frozen"]
    train(model, optimizer, batches(5))
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    frozen = model[0].weight.clone(), model[3].bias.clone(), model[0].bias.clone()
    moving = model[3].weight.clone()
    train(model, optimizer, batches(5))
    assert torch.equal(frozen[0], model[0].weight)
    assert torch.equal(frozen[1], model[3].bias)
    assert torch.equal(frozen[2], model[0].bias)
    assert not torch.equal(moving, model[3].weight)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, batches(2))
    assert not torch.equal(frozen[0], model[0].weight)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dims", [{}, {"kdim": 3, "vdim": 5}])
def test_attention(kind, dims):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True, **dims)
    q, k, v = torch.randn(4, 6, 8), torch.randn(4, 6, dims.get("kdim", 8)), torch.randn(4, 6, dims.get("vdim", 8))
    optimizer = kind(model, 1e-2)
    before = copy.deepcopy(model)
    losses = train(model, optimizer, range(40), lambda m, _: (m(q, k, v)[0] - q).square().mean())
    assert losses[-1] < 0.8 * losses[0]
    assert not any(torch.equal(p, r) for p, r in zip(model.parameters(), before.parameters(), strict=True))
    rows = optimizer.summary().rows
    assert {r.treatment for r in rows if "weight" in r.name} == {f"{kind.__name__}, gradient curvature"}


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layers(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(4, 6, 8)
    y = x.roll(1, 1)
    optimizer = INGD(model, 3e-3)
    before = copy.deepcopy(model)
    losses = train(model, optimizer, range(60), lambda m, _: (m(x) - y).square().mean())
    assert losses[-1] < 0.6 * losses[0]
    assert not any(torch.equal(p, r) for p, r in zip(model.parameters(), before.parameters(), strict=True))
    decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0)
    train(decoder, INGD(decoder), range(3), lambda m, _: m(x, x).square().mean())


class Everything(nn.Module):
    """One of each kind that neighbours leave untrained."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.one = nn.Conv1d(4, 6, 3, padding="same", dilation=2)
        self.two = nn.Conv2d(6, 6, 3, padding=1, groups=3, padding_mode="circular", bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.three = nn.Conv3d(1, 2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.mix = nn.Parameter(torch.randn(2, 2) / 2)
        self.recurrent = nn.GRU(3, 3, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    def forward(self, tokens):
        x = self.one(self.table(tokens).mT)
        x = self.up(self.norm(self.two(x[..., None, :].expand(-1, -1, 3, -1))))
        x = self.three(x.unsqueeze(1))
        x = torch.einsum("bc...,cd->bd...", x, self.mix) * self.scale
        x = self.recurrent(x.flatten(1)[:, :24].unflatten(1, (8, 3)))[0]
        return self.normed(x)


@pytest.mark.parametrize("fallback", ["adamw", "sgd"])
@pytest.mark.parametrize("curvature", ["kfac", "gradient"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nothing_is_left_untrained(kind, curvature, fallback):
    torch.manual_seed(0)
    model = Everything()
    before = {name: p.clone() for name, p in model.named_parameters()}
    tokens = torch.randint(1, 9, (8, 7))
    target = torch.randn(8, 8, 2)
    optimizer = kind(model, curvature=curvature, fallback=fallback, fallback_lr=1e-2)
    losses = train(model, optimizer, range(25), lambda m, _: (m(tokens) - target).square().mean())
    assert losses[-1] < losses[0]
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    covered = " + ".join(row.name for row in optimizer.summary().rows).split(" + ")
    assert sorted(covered) == sorted(before)


def test_a_weight_that_is_used_by_a_function():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return linear(x, self.layer.weight, self.layer.bias)

    torch.manual_seed(0)
    model = Functional()
    losses = train(model, INGD(model, 1e-2), batches(40))
    assert losses[-1] < 0.7 * losses[0]


# ---------------------------------------------------------------------- how it is called
def test_a_step_without_a_new_backward_pass_and_without_gradients():
    model = perceptron()
    optimizer = INGD(model)
    train(model, optimizer, batches(2))
    optimizer.step()
    after = copy.deepcopy(model)
    optimizer.zero_grad()
    steps = optimizer.param_groups[0]["step"]
    optimizer.step()
    assert equal(model, after)
    assert optimizer.param_groups[0]["step"] == steps


def test_closures():
    data = batches(6)
    model, twin = perceptron(), perceptron()
    one, other = INGD(model), INGD(twin)
    train(model, one, data)
    for x in data:

        def closure(x=x):
            other.zero_grad()
            loss = objective(twin, x)
            loss.backward()
            return loss

        assert other.step(closure).item() > 0
    assert equal(model, twin)


@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16])
def test_another_type_after_construction_and_later(target):
    model = perceptron()
    optimizer = INGD(model, update_every=2)
    model.to(target)
    train(model, optimizer, batches(3, target))
    model.float()
    train(model, optimizer, batches(3))
    model.to(target)
    losses = train(model, optimizer, batches(30, target))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("update_every", [1, 3])
def test_accumulation_equals_the_large_batch(kind, update_every):
    """In equal and unequal parts, and with two forward passes before one backward pass."""
    data = batches(7, torch.float64)
    reference = perceptron(torch.float64)
    train(reference, kind(reference, update_every=update_every, subsample=False), data)
    for sizes, together in (((8, 8), False), ((4, 12), False), ((8, 8), True)):
        model = perceptron(torch.float64)
        optimizer = kind(model, update_every=update_every, subsample=False)
        for x in data:
            optimizer.zero_grad()
            losses = []
            for part in x.split(sizes):
                losses.append(objective(model, part) * len(part) / len(x))
                if not together:
                    losses.pop().backward()
            if together:
                sum(losses).backward()
            optimizer.step()
        close(model, reference)


@pytest.mark.parametrize("how", ["optimizer", "model", "by hand"])
def test_stale_statistics_are_forgotten(how):
    data = batches(8)
    reference = perceptron()
    train(reference, INGD(reference, update_every=1), data)
    model = perceptron()
    optimizer = INGD(model, update_every=1)
    for x in data:
        objective(model, 100 * x.flip(0)).backward()  # thrown away
        if how == "optimizer":
            optimizer.zero_grad()
        elif how == "model":
            model.zero_grad()
        else:
            for p in model.parameters():
                p.grad = None
        objective(model, x).backward()
        optimizer.step()
        model.zero_grad()
    assert equal(model, reference)


def test_scaled_gradients_that_are_unscaled_and_clipped():
    """As with GradScaler: the hooks see scaled gradients, the step unscaled and clipped ones."""
    data = batches(30)
    plain, scaled = perceptron(), perceptron()
    one, other = INGD(plain), INGD(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)
    for x in data:
        one.zero_grad()
        objective(plain, x).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        one.step()
        other.zero_grad()
        scaler.scale(objective(scaled, x)).backward()
        scaler.unscale_(other)
        nn.utils.clip_grad_norm_(scaled.parameters(), 0.1)
        scaler.step(other)
        scaler.update()
    assert scaler.get_scale() > 2.0**12
    assert abs(objective(plain, data[0]) - objective(scaled, data[0])) < 0.05 * objective(plain, data[0])


def test_a_scaler_whose_scale_stays_changes_nothing():
    data = batches(12, torch.float64)
    plain, scaled = perceptron(torch.float64), perceptron(torch.float64)
    one, other = INGD(plain), INGD(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, one, data)
    train_scaled(scaled, other, data, scaler)
    close(plain, scaled)


def test_a_compiled_model_gives_the_same_losses():
    data = batches(12)
    model, twin = perceptron(), perceptron()
    compiled = torch.compile(twin, backend="aot_eager")
    plain = train(model, INGD(model, update_every=3), data)
    torch.testing.assert_close(train(compiled, INGD(compiled, update_every=3), data), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    data = batches(8)

    def loss(model, x):
        x = x.requires_grad_()
        hidden = checkpoint(model[:3], x, use_reentrant=reentrant)
        return (model[3](hidden) - x[:, :3].detach().sin()).square().mean()

    model, twin = perceptron(), perceptron()
    train(model, INGD(model, update_every=2), data)
    train(twin, INGD(twin, update_every=2), data, loss)
    close(model, twin)


def test_data_parallel_wrapper(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        data = batches(8)
        model, twin = perceptron(), perceptron()
        train(model, INGD(model), data)
        wrapped = nn.parallel.DistributedDataParallel(twin)
        train(wrapped, INGD(wrapped), data)
        close(model, twin)
    finally:
        torch.distributed.destroy_process_group()


def _replica(rank, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = perceptron(torch.float64)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = INGD(wrapped, update_every=3, subsample=False)
    train(wrapped, optimizer, [x.chunk(2)[rank] for x in batches(8, torch.float64)])
    torch.save(model.state_dict(), f"{store}.{rank}")
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one_with_the_whole_batch(tmp_path):
    torch.multiprocessing.spawn(_replica, (str(tmp_path / "store"),), nprocs=2)
    model = perceptron(torch.float64)
    train(model, INGD(model, update_every=3, subsample=False), batches(8, torch.float64))
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"store.{rank}").items():
            torch.testing.assert_close(value, model.state_dict()[name])


def test_parameters_that_join_later():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = INGD(model, 1e-2)
    train(model, optimizer, batches(12))
    for p in model[0].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    before = model[0].weight.clone()
    losses = train(model, optimizer, batches(30))
    assert not torch.equal(before, model[0].weight)
    assert losses[-1] < losses[0]
    assert "INGD" in next(row.treatment for row in optimizer.summary().rows if row.name.startswith("0."))
    with pytest.raises(ValueError, match="not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_groups_have_their_own_settings():
    model = perceptron()
    still = {"params": model[0].parameters(), "lr": 0.0}
    optimizer = INGD(model, 1e-2, groups=[still])
    before = copy.deepcopy(model)
    train(model, optimizer, batches(3))
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[3].weight, before[3].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


def test_weight_and_bias_in_different_groups():
    model = perceptron()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = INGD(model, 1e-2, weight_decay=0.5, groups=[{"params": biases, "weight_decay": 0.0}])
    losses = train(model, optimizer, batches(30))
    assert losses[-1] < losses[0]


def test_schedulers_and_functions_of_the_step():
    model = perceptron()
    optimizer = INGD(
        model,
        lambda step: 1e-2 / (1 + step),
        damping=lambda step: 0.1 * 0.9**step,
        update_every=lambda step: 1 + step // 2,
    )
    train(model, optimizer, batches(5))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.1 * 0.9**4)
    assert optimizer.param_groups[0]["update_every"] == 3
    optimizer = INGD(model, 1e-2, fallback_lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, batches(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-4]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_as_a_preconditioner_of_another_optimizer(kind):
    model, twin = perceptron(), perceptron()
    preconditioner = kind(model, precondition_only=True)
    plain = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for x in batches(40):
        plain.zero_grad()
        loss = objective(model, x)
        loss.backward()
        raw = model[2].weight.grad.clone()
        preconditioner.step()
        assert torch.equal(raw, model[2].weight.grad)  # norms are left to the other optimizer
        rms = torch.cat([p.grad.flatten() for p in model[0].parameters()]).square().mean().sqrt()
        torch.testing.assert_close(rms, torch.tensor(0.5), rtol=1e-3, atol=0)
        plain.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not equal(model, twin)
    assert "momentum_buffer" not in preconditioner.state[model[0].weight]


# ---------------------------------------------------------------------- groups and copies
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", ["biases", "weights", "weights alone"])
def test_the_order_of_groups_does_not_matter(kind, first):
    """The usual recipe: no decay for biases and norms."""
    reference = perceptron()
    train(reference, kind(reference, 1e-2), batches(3))
    model = perceptron()
    weights = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": others}, {"params": weights}]
    groups = {"biases": groups, "weights": groups[::-1], "weights alone": groups[1:]}[first]
    kept = copy.copy(groups[0])
    optimizer = kind(model, 1e-2, groups=groups)
    train(model, optimizer, batches(3))
    assert equal(model, reference)
    assert groups[0] == kept
    assert "exp_avg" not in optimizer.state[model[0].bias]


def test_a_weight_that_joins_without_its_bias():
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = INGD(model)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight has a gradient but is in no group, because it was frozen"):
        train(model, optimizer, batches(1))
    model[0].bias.requires_grad_(False)
    optimizer.add_param_group({"params": [model[0].weight]})
    train(model, optimizer, batches(2))
    model[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model[0].bias]})
    before = model[0].bias.clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(before, model[0].bias)
    assert "exp_avg" in optimizer.state[model[0].bias]  # its weight goes without it by now


def test_a_group_that_fails_changes_nothing():
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = INGD(model)
    model[0].requires_grad_(True)
    groups, hooks = len(optimizer.param_groups), len(model[0]._forward_hooks)
    for group, message in (
        ({"params": [model[0].weight, model[3].weight]}, r"3\.weight, which is in another group already"),
        ({"params": [model[0].weight], "lr": -1.0}, "lr must be finite"),
        ({"params": [model[0].weight], "structure": "diagonal"}, "a group has no setting structure; there are"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
        assert (len(optimizer.param_groups), len(model[0]._forward_hooks)) == (groups, hooks)
    with pytest.raises(TypeError, match="a group must be a dictionary with 'params'"):
        INGD(model, groups=["params"])


def test_a_shared_bias_moves_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].bias = model[0].bias
    optimizer = INGD(model, momentum=0.9, structure="identity")
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[model[0].bias]["momentum_buffer"], 0.1 * model[0].bias.grad)
    assert [row.name for row in optimizer.summary().rows] == ["0.weight + 0.bias", "2.weight"]


@pytest.mark.parametrize("channels", [(1, 8, 3), (9, 9, 1)])
def test_a_convolution_tied_to_its_transpose(channels):
    i, o, k = channels
    torch.manual_seed(0)
    encoder, decoder = nn.Conv2d(i, o, k), nn.ConvTranspose2d(o, i, k)
    decoder.weight = encoder.weight
    model = nn.Sequential(encoder, nn.Tanh(), decoder)
    x = torch.randn(4, i, 6, 6)
    losses = train(model, INGD(model), range(30), lambda m, _: (m(x) - x).square().mean())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_copy_of_both_goes_on_alike(kind):
    model = perceptron()
    optimizer = kind(model, lambda step: 1e-2 / (1 + step), update_every=2)
    data = batches(8)
    train(model, optimizer, data[:4])
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, data[4:])
    assert not equal(model, twin)
    train(twin, other, data[4:])
    assert equal(model, twin)
    assert other.state[twin[0].weight]


def test_names_and_patterns_of_wrapped_models():
    compiled = torch.compile(perceptron(), backend="eager")
    optimizer = INGD(compiled, structure={"0": "diagonal", "*": "dense"})
    train(compiled, optimizer, batches(1))
    assert optimizer.factors("0")[0].count_nonzero() == 6
    with pytest.raises(ValueError, match="structure has the pattern 'head', which matches no layer; there are"):
        INGD(perceptron(), structure={"head": "dense"})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_unusual_calls_and_sizes(kind):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.empty, self.none = nn.Linear(5, 3), nn.Linear(5, 0), nn.Linear(0, 3)

        def loss(self, x):
            return (self.a(input=x) + self.none(self.empty(x))).square().mean()

    model = Odd()
    optimizer = kind(model, update_every=1)
    losses = train(model, optimizer, batches(10), lambda m, x: m.loss(x))
    assert losses[-1] < losses[0]
    sample = optimizer._tracked[model.a.weight]
    model.loss(batches(1)[0]).backward()
    model.loss(batches(1)[0]).backward()
    assert sample.statistics.terms == 32  # two batches, although the model itself is never called
    attention = nn.MultiheadAttention(8, 2)
    nn.utils.parametrizations.weight_norm(attention.out_proj)
    kind(attention)


def test_a_model_that_was_compiled_before():
    """Its hooks are not called: the gradient stands in for the statistics."""
    model = perceptron()
    compiled = torch.compile(model, backend="eager")
    objective(compiled, batches(1)[0]).backward()
    model.zero_grad()
    optimizer = INGD(model)
    train(compiled, optimizer, batches(4))
    assert not torch.equal(optimizer.factors("0")[0], torch.eye(6))


@pytest.mark.parametrize("precond_dtype", [None, torch.bfloat16])
def test_another_type_between_updates(precond_dtype):
    model = perceptron()
    optimizer = INGD(model, precond_dtype=precond_dtype, growing_intervals=False)
    train(model, optimizer, batches(2))
    model.double()
    train(model, optimizer, batches(2, torch.float64))


def test_scalers_that_are_off_or_new():
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")):
        model = perceptron()
        train(model, INGD(model, kl_clip=1e-3, scaler=scaler), batches(2))
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got str"):
        INGD(perceptron(), scaler="on")


@pytest.mark.parametrize("settings", [{"preset": "paper"}, {"kl_clip": 1e-3}])
def test_a_scaler_that_is_known_changes_nothing(settings):
    data = batches(12, torch.float64)
    plain, scaled = perceptron(torch.float64), perceptron(torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, INGD(plain, update_every=2, **settings), data)
    other = INGD(scaled, update_every=2, scaler=scaler, **settings)
    train_scaled(scaled, other, data, scaler)
    close(plain, scaled)


# ---------------------------------------------------------------------- what is not finite, or nothing
def test_a_layer_without_gradient_stays():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.on = nn.Linear(5, 3), nn.Linear(5, 3), 1.0

        def forward(self, x):
            return self.a(x) + self.on * self.b(x)

    model = Branch()
    optimizer = INGD(model)
    train(model, optimizer, batches(5))
    model.on = 0.0
    before = copy.deepcopy(model)
    train(model, optimizer, batches(50))
    assert torch.equal(model.b.weight, before.b.weight)
    assert not torch.equal(model.a.weight, before.a.weight)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e15])
def test_the_size_of_a_step_at_any_scale(scale):
    model = nn.Linear(5, 3)
    optimizer = INGD(model, 1e-2, weight_decay=0.0)
    before = model.weight.clone()
    (scale * model(batches(1)[0]).square().mean()).backward()
    optimizer.step()
    assert 0.2e-2 < (model.weight - before).square().mean().sqrt() < 0.6e-2


def test_a_first_gradient_that_is_tiny():
    torch.manual_seed(0)
    model, q = nn.MultiheadAttention(8, 2), torch.randn(4, 3, 8)
    optimizer = INGD(model)
    train(model, optimizer, range(60), lambda m, i: (m(q, q, q)[0] - q).square().mean() * (1e-8 if i < 1 else 1))
    assert optimizer.skipped_updates == 0
    assert all(factor.abs().max() < 1e6 for factor in optimizer.factors("out_proj"))


def test_half_precision_of_the_fallback():
    model = nn.LayerNorm(8).half()
    optimizer = INGD(model)
    (model(torch.randn(4, 8).half()).square().mean() * 1e-2).backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_natural_directions_that_overflow_are_not_taken():
    model = perceptron()
    optimizer = INGD(model, preset="paper")
    before = copy.deepcopy(model)
    (objective(model, batches(1)[0]) * 1e25).backward()
    optimizer.step()
    assert equal(model, before) or all(torch.isfinite(p).all() for p in model.parameters())
    assert optimizer.skipped_updates + optimizer.skipped_steps > 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"kl_clip": 1e-3}, {"preset": "paper"}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_that_is_not_finite_changes_nothing(kind, settings, bad, dtype):
    data = batches(9, dtype)
    model, twin = perceptron(dtype), perceptron(dtype)
    optimizer, other = kind(model, update_every=1, **settings), kind(twin, update_every=1, **settings)
    train(model, optimizer, data[:4])
    train(twin, other, data[:4])
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    (objective(model, data[4]) * bad).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert equal(model, before)
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, state[number][key]), key
    optimizer.zero_grad()
    assert all(math.isfinite(loss) for loss in train(model, optimizer, data[5:]))
    assert optimizer.skipped_steps == 1


def test_the_first_step_may_fail_too():
    model = perceptron()
    optimizer = INGD(model)
    before = copy.deepcopy(model)
    (objective(model, batches(1)[0]) * math.nan).backward()
    optimizer.step()
    assert equal(model, before)
    assert train(model, optimizer, batches(40))[-1] < 0.7


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_curvature_that_is_not_finite_skips_the_update_alone(kind):
    model = nn.Linear(3, 2)
    optimizer = kind(model, update_every=1)
    x = torch.full((4, 3), 1e25)  # finite gradients, but their squares are not
    before = model.weight.clone()
    (model(x) * 1e-26).sum().backward()
    optimizer.step()
    assert optimizer.skipped_updates == 1
    assert optimizer.skipped_steps == 0
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_batches_of_one_and_of_none(kind, size):
    model = perceptron()
    optimizer = kind(model, update_every=1)
    train(model, optimizer, batches(3))
    train(model, optimizer, batches(1, size=size))
    assert optimizer.skipped_updates == (2 if size == 0 else 0)  # one for each layer
    train(model, optimizer, batches(3, size=1))
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bad_models(kind):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got generator"):
        kind(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="model has no trainable parameters"):
        kind(nn.ReLU())
    with pytest.raises(ValueError, match="model has no trainable parameters"):
        kind(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(TypeError, match=r"0\.weight is of type torch\.complex64"):
        kind(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="has no shape yet; run a batch"):
        kind(nn.LazyLinear(3))
    whole = nn.Linear(2, 2)
    whole.codes = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    kind(whole)  # what is not trained may be of any type


def test_sparse_gradients_are_refused_before_anything_changes():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = INGD(model)
    before = model[1].weight.clone()
    model(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"the gradient of 0\.weight is sparse; build its embedding with sparse=False"
    ):
        optimizer.step()
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr must be finite and at least 0, got -1\.0"),
        ({"lr": math.nan}, "lr must be finite and at least 0, got nan"),
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1, got 1\.0"),
        ({"damping": -0.1}, "damping must be finite and at least 0"),
        ({"update_every": 0}, "update_every must be a positive integer, got 0"),
        ({"update_every": 2.5}, "update_every must be a positive integer, got 2.5"),
        ({"approx": "fold"}, "approx must be 'auto' or 'expand' or 'reduce', got 'fold'"),
        ({"convention": "both"}, "convention must be 'inside' or 'outside', got 'both'"),
        ({"curvature": "exact"}, "curvature must be 'kfac' or 'gradient', got 'exact'"),
        ({"fisher": "true"}, "fisher must be 'empirical' or 'mc', got 'true'"),
        ({"grouped": "all"}, "grouped must be 'each' or 'average', got 'all'"),
        ({"fallback": "lion"}, "fallback must be 'adamw' or 'sgd', got 'lion'"),
        ({"preset": "fast"}, "preset must be 'robust' or 'paper', got 'fast'"),
        ({"structure": "sparse"}, "structure must be one of dense, triangular, .*, got 'sparse'"),
        ({"structure": ("dense",)}, r"structure must be a pair \(inputs, outputs\), got 1 parts"),
        ({"structure": lambda k: None}, "structure must give a group of size 6 for that size, got None"),
        ({"structure": {"0": "nothing"}}, "structure must be one of"),
        ({"step_rms": 0.0}, r"step_rms must be positive, or None to leave it out, got 0\.0"),
        ({"step_rms": 0.5, "kl_clip": 1e-3}, "step_rms and kl_clip are two ways"),
        ({"kl_clip": -1.0}, "kl_clip must be positive"),
        ({"max_factor_step": 0.0}, "max_factor_step must be positive"),
        ({"max_dim": 0}, "max_dim must be a positive integer, or None for no limit, got 0"),
        ({"order": 3}, "order must be 1 or 2, got 3"),
        ({"precond_dtype": torch.int8}, r"precond_dtype must be torch\.float64, .*, got torch\.int8"),
        ({"fallback_lr": -1.0}, r"fallback_lr must be finite and at least 0, got -1\.0"),
    ],
)
def test_impossible_settings(settings, message):
    model = perceptron()
    with pytest.raises(ValueError, match=message):
        INGD(model, **settings)
    assert not any(m._forward_hooks for m in model.modules())


def test_settings_of_a_wrong_type():
    for settings, message in (
        ({"lr": "fast"}, "lr must be a number or a function of the step that gives one, got 'fast'"),
        ({"structure": 3}, "structure must be a name, a function of the size, a pair or a mapping, got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            INGD(perceptron(), **settings)
    with pytest.raises(KeyError, match="no layer 'head' has factors; those that have: '0', '3'"):
        INGD(perceptron()).factors("head")
