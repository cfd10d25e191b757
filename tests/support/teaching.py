"""A small regression, and the loop that trains on it."""

import torch


def teacher(n=256, d=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator)
    return x, torch.stack([(x[:, 0] * x[:, 1]).sin(), x[:, 2:].square().mean(1)], 1)


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
