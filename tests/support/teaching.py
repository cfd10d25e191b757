"""A small regression: a teacher, a student, and the loop that trains."""

import torch
from torch import nn


def teacher(n=256, d=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator)
    return x, torch.stack([(x[:, 0] * x[:, 1]).sin(), x[:, 2:].square().mean(1)], 1)


def student():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 2))


def train(optimizer, loss, steps=150):
    """The losses before each step."""
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def kept(optimizer):
    """The factors and their momenta, as they are stored."""
    states = [optimizer.state[weight] for weight in optimizer._layers]
    return [state[key] for state in states for key in ("K", "C", "m_K", "m_C") if key in state]
