"""Every kind of layer is trained."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from gnomon.optim import INGD, KFAC
from support.marks import slow_where
from support.perceptron import batches, train

OPTIMIZERS = [INGD, KFAC]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dims", slow_where([{}, {"kdim": 3, "vdim": 5}], bool))
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


@pytest.mark.slow
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
    losses = train(decoder, INGD(decoder), range(10), lambda m, _: (m(x, x) - y).square().mean())
    assert losses[-1] < 0.95 * losses[0]


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


@pytest.mark.slow
@pytest.mark.parametrize("fallback", slow_where(["adamw", "sgd"], lambda fallback: fallback == "sgd"))
@pytest.mark.parametrize("curvature", slow_where(["kfac", "gradient"], lambda curvature: curvature == "gradient"))
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
    layer = optimizer._layers[model.a.weight]
    model.loss(batches(1)[0]).backward()
    model.loss(batches(1)[0]).backward()
    assert optimizer._collector.statistics(layer).terms == 32  # two batches, although the model itself is never called
    attention = nn.MultiheadAttention(8, 2)
    nn.utils.parametrizations.weight_norm(attention.out_proj)
    by_name = {row.name: row.treatment for row in kind(attention).summary().rows}
    assert by_name["out_proj.parametrizations.weight.original1"].endswith(", gradient curvature")


def test_trains_every_kind_of_layer_by_default():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 11))
    before = copy.deepcopy(model)
    tokens = torch.randint(11, (32, 4))
    optimizer = KFAC(model, 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() * 3 + 1) % 11)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert not torch.equal(p, q)
    assert "KFAC" in str(optimizer.summary())
