"""KFAC against explicit inverses."""

import copy

import pytest
import torch
from torch import nn

from gnomon.optim import KFAC


def reference(model, batches, lr, momentum, weight_decay, damping, decay, T):
    """The right side of Fig. matDL_opt in plain matrices."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    state = {}
    for step, x in enumerate(batches):
        inputs, outputs, h = {}, {}, x
        for m in model:
            inputs[m] = h
            h = outputs[m] = m(h)
        loss = h.square().sum() / len(x)
        model.zero_grad()
        grads = torch.autograd.grad(loss, [outputs[m] for m in layers], retain_graph=True)
        loss.backward()
        for m, g in zip(layers, grads, strict=True):
            a = torch.cat([inputs[m], torch.ones(len(x), 1, dtype=x.dtype)], 1)
            G, W = (
                torch.cat([m.weight.grad, m.bias.grad[:, None]], 1),
                torch.cat([m.weight, m.bias[:, None]], 1).detach(),
            )
            d, p = G.shape
            s = state.setdefault(m, {"A": torch.eye(p, dtype=x.dtype), "S": torch.eye(d, dtype=x.dtype), "M": 0 * G})
            if step % T == 0:
                s["A"] = decay * s["A"] + (1 - decay) * a.T @ a / len(a)
                s["S"] = decay * s["S"] + (1 - decay) * len(x) * g.T @ g
                s["Ai"] = torch.linalg.inv(s["A"] + damping * torch.eye(p, dtype=x.dtype))
                s["Si"] = torch.linalg.inv(s["S"] + damping * torch.eye(d, dtype=x.dtype))
            s["M"] = momentum * s["M"] + s["Si"] @ G @ s["Ai"] + weight_decay * W
            W = W - lr * s["M"]
            m.weight.data, m.bias.data = W[:, :-1].clone(), W[:, -1].clone()


@pytest.mark.parametrize("T", [1, 7])
def test_equal_to_explicit_inverses(T):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    twin = copy.deepcopy(model)
    batches = [torch.randn(16, 5, dtype=torch.float64) for _ in range(50)]
    reference(twin, batches, 0.01, 0.9, 0.01, 0.05, 0.95, T)
    optimizer = KFAC(model, 0.01, damping=0.05, update_every=T, preset="paper")
    for x in batches:
        optimizer.zero_grad()
        (model(x).square().sum() / len(x)).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
