"""Weights and biases that several layers share."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from support.perceptron import batches, train


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
    optimizer = INGD(model, 1e-2, curvature=curvature, weight_decay=0.0, base_width=None)
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
