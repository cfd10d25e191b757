"""A small perceptron, its batches and the loop that trains it."""

import torch
from torch import nn


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
