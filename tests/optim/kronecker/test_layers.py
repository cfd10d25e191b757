"""Layers as matrices: the rows of inputs and output gradients reproduce the gradient of every kind of module."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from gnomon.optim.kronecker.layers import is_known, layer_of


class Conv1D(nn.Module):
    """As in transformers, which need not be installed."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


Conv1D.__module__ = "transformers.pytorch_utils"
MODULES = {
    "linear": (nn.Linear(5, 3), (4, 5)),
    "linear, no bias": (nn.Linear(5, 3, bias=False), (4, 5)),
    "linear over a sequence": (nn.Linear(5, 3), (4, 6, 5)),
    "linear over a grid": (nn.Linear(5, 3), (4, 2, 3, 5)),
    "linear of one vector": (nn.Linear(5, 3), (5,)),
    "linear with its weight transposed": (Conv1D(3, 5), (4, 5)),
    "linear with its weight transposed, over a sequence": (Conv1D(3, 5), (4, 6, 5)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv1d, same, dilated": (nn.Conv1d(4, 6, 4, padding="same", dilation=2), (2, 4, 11)),
    "conv2d": (nn.Conv2d(3, 5, 3), (2, 3, 7, 8)),
    "conv2d, no bias": (nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), (2, 3, 7, 8)),
    "conv2d, grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
    "conv2d, many channels": (nn.Conv2d(18, 6, 3, groups=2, padding=1, stride=(1, 2)), (2, 18, 5, 6)),
    "conv2d, depthwise": (nn.Conv2d(4, 4, 3, groups=4, stride=2), (2, 4, 7, 7)),
    "conv2d, dilated": (nn.Conv2d(3, 5, 3, dilation=(2, 1), padding=2), (2, 3, 7, 8)),
    "conv2d, circular": (nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (2, 3, 7, 8)),
    "conv2d, reflect": (nn.Conv2d(3, 5, 3, padding=(1, 2), padding_mode="reflect"), (2, 3, 7, 8)),
    "conv2d, same, even kernel": (nn.Conv2d(3, 5, 4, padding="same"), (2, 3, 7, 8)),
    "conv2d, same, replicate": (nn.Conv2d(3, 5, 3, padding="same", padding_mode="replicate"), (2, 3, 7, 8)),
    "conv2d, 1x1": (nn.Conv2d(3, 5, 1), (2, 3, 7, 8)),
    "conv2d without a batch": (nn.Conv2d(3, 5, 3), (3, 7, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2, stride=2, groups=1), (2, 2, 5, 4, 6)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1), (2, 4, 5)),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 4)),
    "transposed 2d, dilated": (nn.ConvTranspose2d(4, 3, (2, 3), dilation=2), (2, 4, 5, 4)),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, bias=False), (2, 2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_rows_reproduce_the_gradient(name):
    torch.manual_seed(0)
    module, shape = MODULES[name]
    module = module.double()
    module.zero_grad()
    x = torch.randn(shape, dtype=torch.float64)
    y = module(x)
    g = torch.randn_like(y)
    y.backward(g)
    layer = layer_of(module)
    x_rows, g_rows = layer.rows(x, g)
    assert x_rows.shape[::2] == (layer.blocks, layer.p)
    assert g_rows.shape[::2] == (layer.blocks, layer.d)
    matrix = g_rows.mT @ x_rows
    bias = None if layer.bias is None else layer.bias.grad
    torch.testing.assert_close(layer.matrix(module.weight.grad, bias), matrix)
    for parameter, gradient in zip(layer.parameters, layer.tensors(matrix), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("name", MODULES)
def test_reduced_rows_are_means_of_inputs_and_sums_of_gradients(name):
    torch.manual_seed(0)
    module, shape = MODULES[name]
    x = torch.randn(shape, dtype=torch.float64)
    g = torch.randn_like(module.double()(x))
    layer = layer_of(module)
    samples = shape[0] if len(shape) > 1 and not name.endswith("a batch") else 1
    expanded = [rows.unflatten(1, (samples, -1)) for rows in layer.rows(x, g)]
    x_rows, g_rows = layer.rows(x, g, "reduce")
    torch.testing.assert_close(x_rows, expanded[0].mean(2))
    torch.testing.assert_close(g_rows, expanded[1].sum(2))


@pytest.mark.parametrize("name", [name for name, (module, _) in MODULES.items() if "conv" in name or "transp" in name])
def test_rows_at_every_second_position_are_those_of_all_positions(name):
    torch.manual_seed(0)
    module, shape = MODULES[name]
    layer = layer_of(module.double())
    if not layer.has_axes or len(shape) < module.weight.ndim:
        pytest.skip("there are no positions, or no batch")
    x = torch.randn(5, *shape[1:], dtype=torch.float64)
    g = torch.randn_like(module(x))
    grid = (x if module.transposed else g).shape[2:]
    chosen = torch.zeros(5, *grid, dtype=torch.bool)
    for start in (0, 1):
        chosen[(slice(start, None, 2), *(slice(start, None, 2),) * len(grid))] = True
    assert layer.count(x, g, "expand") == chosen.numel()
    order = torch.cat([torch.arange(5)[0::2], torch.arange(5)[1::2]])  # of the samples: those with one start first
    for part, whole in zip(layer.rows(x, g, every=2), layer.rows(x, g), strict=True):
        by_sample = whole.unflatten(1, chosen.shape)[:, order]
        torch.testing.assert_close(part, by_sample[:, chosen[order]])


def test_a_transposed_weight_is_trained_as_a_linear_layer():
    torch.manual_seed(0)
    linear, other = nn.Linear(5, 3).double(), Conv1D(3, 5).double()
    with torch.no_grad():
        other.weight.copy_(linear.weight.mT)
        other.bias.copy_(linear.bias)
    for settings in ({}, {"preset": "paper"}, {"structure": "triangular"}, {"memory": "low"}):
        optimizers = [INGD(model, update_every=2, **settings) for model in (linear, other)]
        for _ in range(6):
            x = torch.randn(8, 5, dtype=torch.float64)
            for model, optimizer in zip((linear, other), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(other.weight.mT, linear.weight)
        torch.testing.assert_close(other.bias, linear.bias)


def test_frozen_biases_and_unknown_modules():
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    layer = layer_of(module)
    assert (layer.bias, layer.p) == (None, 3)
    assert not is_known(nn.LayerNorm(3))
    assert not is_known(nn.ReLU())
    assert not is_known(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    assert not is_known(nn.Embedding(3, 2, sparse=True))
