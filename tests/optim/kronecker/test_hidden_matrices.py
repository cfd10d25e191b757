"""Matrices that no hook can see: gates of recurrent layers, stacks of experts, bare parameters."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gnomon.linalg import polar_factor
from gnomon.optim import INGD, KFAC

F64 = torch.float64
NATURAL = {"step_rms": None, "momentum": 0.0, "weight_decay": 0.0}
"""Steps as long as directions are, so that no layer's step depends on another matrix in it."""

RECURRENT = {
    "LSTM": (lambda: nn.LSTM(5, 6, 2, bidirectional=True, proj_size=3), 4),
    "GRU": (lambda: nn.GRU(5, 6, 2), 3),
    "RNN": (lambda: nn.RNN(5, 6), 1),
    "LSTMCell": (lambda: nn.LSTMCell(5, 6), 4),
    "GRUCell": (lambda: nn.GRUCell(5, 6, bias=False), 3),
    "RNNCell": (lambda: nn.RNNCell(5, 6), 1),
}


def output(module, x):
    """The output of a recurrent module, or of cells that are called for each time step."""
    if not isinstance(module, nn.RNNCellBase):
        return module(x)[0]
    state, found = None, []
    for now in x:
        state = module(now, state)
        found.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(found)


def trained(module, optimizer, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        output(module, torch.randn(4, 7, 5, dtype=F64, generator=generator)).sin().square().mean().backward()
        optimizer.step()
    return module


class Twins(nn.Module):
    """Each matrix of a list as a bare parameter of its own."""

    def __init__(self, matrices):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(matrix.detach().clone()) for matrix in matrices])


def gates(tensor, count):
    return list(tensor.reshape(count, -1, *tensor.shape[1:]))


# ---------------------------------------------------------------------- recurrent layers
@pytest.mark.parametrize("kind", [INGD, KFAC])
@pytest.mark.parametrize("name", RECURRENT)
def test_each_gate_steps_as_a_matrix_of_its_own(kind, name):
    """The twin has a bare parameter for each gate, with the bias as its last column, and the same gradients."""
    torch.manual_seed(0)
    make, count = RECURRENT[name]
    module = make().double()
    parts = [(w, b) for w, b in _pairs(module)]

    def matrices(of):
        found = []
        for weight, bias in parts:
            blocks = 1 if weight.shape[0] == 3 else count  # the projection of an LSTM has three rows
            columns = [of(weight)] if bias is None else [of(weight), of(bias).unsqueeze(1)]
            found += gates(torch.cat(columns, 1), blocks)
        return found

    twins = Twins(matrices(lambda p: p))
    optimizer, other = kind(module, 0.1, **NATURAL), kind(twins, 0.1, **NATURAL)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        output(module, torch.randn(4, 7, 5, dtype=F64, generator=generator)).sin().square().mean().backward()
        for twin, gradient in zip(twins.parts, matrices(lambda p: p.grad), strict=True):
            twin.grad = gradient
        optimizer.step()
        other.step()
    for twin, matrix in zip(twins.parts, matrices(lambda p: p.detach()), strict=True):
        torch.testing.assert_close(twin.detach(), matrix)


def _pairs(module):
    parts = dict(module.named_parameters())
    for name, p in parts.items():
        if name.startswith("weight"):
            yield p, parts.get(name.replace("weight", "bias"))


def test_each_gate_has_its_own_polar_factor():
    torch.manual_seed(0)
    module = nn.GRU(6, 6).double()  # whose weight has the shape of fused queries, keys and values
    plain, polar = copy.deepcopy(module), module
    optimizers = [INGD(m, 0.1, weight_decay=0.0, polar=asked) for m, asked in ((plain, False), (polar, True))]
    x = torch.randn(4, 7, 6, dtype=F64)
    moved = []
    for model, optimizer in zip((plain, polar), optimizers, strict=True):
        before = model.weight_hh_l0.detach().clone()
        output(model, x).square().mean().backward()
        optimizer.step()
        moved.append((model.weight_hh_l0.detach() - before).reshape(3, 6, 6))
    wanted = polar_factor(moved[0])
    torch.testing.assert_close(moved[1] / moved[1].norm(), wanted / wanted.norm())


@pytest.mark.parametrize("kind", [INGD, KFAC])
def test_resuming_and_copies(kind):
    torch.manual_seed(0)
    module = nn.LSTM(5, 6, 2).double()
    optimizer = kind(module)
    trained(module, optimizer)
    other = copy.deepcopy(module)
    resumed = kind(other)
    resumed.load_state_dict(optimizer.state_dict())
    trained(module, optimizer)
    trained(other, resumed)
    assert all(map(torch.equal, module.parameters(), other.parameters()))


def test_a_bias_that_two_layers_share_moves_once():
    torch.manual_seed(0)
    first, second = nn.GRUCell(5, 6).double(), nn.GRUCell(5, 6).double()
    second.bias_ih = first.bias_ih
    model = nn.ModuleList([first, second])
    optimizer = INGD(model, 0.1, weight_decay=0.0, polar=False)
    before = first.bias_ih.detach().clone()
    x = torch.randn(3, 5, dtype=F64)
    second(x, first(x)).square().mean().backward()
    optimizer.step()
    assert sum(p is first.bias_ih for layer in optimizer._layers.values() for p in layer.layer.parameters) == 1
    assert (first.bias_ih - before).norm() > 0


def test_the_paper_s_preset_is_as_it_was():
    model = nn.LSTM(5, 6)
    assert not INGD(model, preset="paper")._layers
    assert len(INGD(model, preset="paper", curvature="gradient")._layers) == 2


# ---------------------------------------------------------------------- bare parameters
class Adapter(nn.Module):
    """Low-rank adaptation with bare parameters, as in loralib."""

    def __init__(self, width, rank):
        super().__init__()
        self.layer = nn.Linear(width, width).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(rank, width)), nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.lora_A.T @ self.lora_B.T


def treatments(model, **settings):
    return {row.name: row.treatment for row in INGD(model, **settings).summary().rows}


@pytest.mark.parametrize("kind", [INGD, KFAC])
def test_adapters_have_factors(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Adapter(12, 3), nn.Tanh(), Adapter(12, 3))
    optimizer = kind(model)
    assert {layer.name for layer in optimizer._layers.values()} == {f"{i}.lora_{x}" for i in (0, 2) for x in "AB"}
    x = torch.randn(32, 12)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    assert all(p.grad is None for p in model[0].layer.parameters())


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 6), nn.Conv1d(4, 6, 3), nn.Conv2d(4, 6, 3), nn.ConvTranspose1d(4, 6, 3)]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm(norm, layer):
    """The matrix of directions has factors, of one block; the vector of lengths has none."""
    model = norm(copy.deepcopy(layer))
    optimizer = INGD(model)
    (found,) = optimizer._layers.values()
    assert found.layer.blocks == 1
    assert found.layer.d == layer.weight.shape[0]
    assert sum(row.treatment == "adamw" for row in optimizer.summary().rows) == 2


def test_a_stack_of_matrices_is_that_of_separate_ones():
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(3, 5, 4, dtype=F64))
    twins = Twins(model.experts)
    optimizers = INGD(model, 0.1, **NATURAL), INGD(twins, 0.1, **NATURAL)
    for step in range(4):
        gradient = torch.randn(3, 5, 4, dtype=F64)
        if step > 1:
            gradient[1] = 0  # an expert that no token has reached
        model.experts.grad = gradient
        for twin, part in zip(twins.parts, gradient, strict=True):
            twin.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    for twin, part in zip(twins.parts, model.experts.detach(), strict=True):
        torch.testing.assert_close(twin.detach(), part)


def test_experts_that_no_token_has_ever_reached():
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(3, 5, 4))
    before = model.experts.detach().clone()
    optimizer = INGD(model, weight_decay=0.0)
    for _ in range(3):
        model.experts.grad = torch.randn(3, 5, 4)
        model.experts.grad[1] = 0
        optimizer.step()
    assert optimizer.skipped_steps == optimizer.skipped_updates == 0
    assert torch.equal(model.experts[1], before[1])
    assert not (model.experts[[0, 2]] == before[[0, 2]]).any()


def test_what_is_no_matrix():
    """Vectors in disguise, and what is added to all samples."""
    model = nn.Linear(4, 4)
    model.row, model.column = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(8, 1))
    model.position, model.token = nn.Parameter(torch.ones(1, 9, 4)), nn.Parameter(torch.ones(1, 1, 4))
    model.table = nn.Parameter(torch.ones(9, 4))
    found = treatments(model)
    assert {name for name, how in found.items() if how == "adamw"} == {"row", "column", "position", "token"}
    assert found["table"] == "INGD, gradient curvature"


def test_bags_of_embeddings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 3))
    optimizer = INGD(model)
    layer = optimizer._layers[model[0].weight]
    assert str(layer.pair.left) == "Diagonal(20)"
    assert layer.turn is None
    tokens = torch.randint(0, 20, (16, 5))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------- what they cost
def test_state_of_adapters():
    """Width 4096 and rank 8: dense on the short side, diagonal on the long one."""
    with torch.device("meta"):
        models = [nn.Sequential(*(Adapter(4096, 8) for _ in range(2)))]
        models.append(nn.Sequential(nn.Linear(4096, 8, bias=False), nn.Linear(8, 4096, bias=False)))
    for model in models:
        optimizer = INGD(model)
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        assert optimizer.memory_usage() <= 1.3 * trained
        assert optimizer.summary().multiple <= 1.3
        assert "layers have a diagonal factor, where a dense one would take" in str(optimizer.summary())
    assert "diagonal factor" not in str(INGD(nn.Linear(4, 4)).summary())


# ---------------------------------------------------------------------- what still has none
def test_a_large_part_without_factors_is_said():
    model = nn.ModuleDict({"cells": nn.LSTM(40, 40), "head": nn.Linear(40, 3)})
    with pytest.warns(UserWarning, match="99% of the trained numbers have no factors") as found:
        INGD(model, preset="paper")
    (warning,) = found
    assert warning.filename == __file__
    assert "cells.weight_ih_l0 (160, 40)" in str(warning.message)
    assert "curvature='gradient'" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        INGD(model)
        KFAC(model)
        INGD(model, preset="paper", curvature="gradient")
        INGD(nn.BatchNorm1d(4000))
        INGD(nn.LSTM(4, 4), preset="paper")
