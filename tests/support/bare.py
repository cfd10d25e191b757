"""Bare tensors as the parameters of a model, with the objective of torch's and timm's batteries of optimizer tests."""

import torch
from torch import nn


class Bare(nn.Module):
    """A matrix and a vector; the objective is the square of ``W x + b``."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.register_buffer("input", torch.randn(5, generator=torch.Generator().manual_seed(2)).to(weight.dtype))

    def objective(self):
        return (self.weight.mv(self.input) + self.bias).square().sum()


def contiguous(dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
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
    """Whether two models have the same parameters, bit for bit."""
    return all(map(torch.equal, one.parameters(), other.parameters()))


def two_clouds():
    """A hundred points of two classes in the plane, as pytorch_optimizer's tests have them."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(100).ge(50).float().unsqueeze(1)
    return 2 * torch.randn(100, 2, generator=generator) + 4 * y - 2, y


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(), nn.Linear(2, 1))


def fall_of_the_loss(model, optimizer, steps=10):
    """The first loss over the last, on :func:`two_clouds`."""
    x, y = two_clouds()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0] / losses[-1]
