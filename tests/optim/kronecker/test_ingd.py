"""INGD against a plain transcription of the paper's figure, and against singd where it is installed."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

from gnomon.optim import INGD
from gnomon.optim.kronecker.dense_factor import DenseFactor
from gnomon.optim.kronecker.factor_update import published_precond_lr
from support.marks import slow_where


def models():
    return {
        "linear": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)), (16, 5)),
        "convolution": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(4, 3, 2, bias=False), nn.Flatten()
            ),
            (8, 2, 6, 6),
        ),
        "sequence": (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)), (8, 3, 5)),
    }


def reference(model, batches, lr, a1, b1, a2, gamma, damping, T, outside):
    """Fig. matDL_opt in plain matrices; convolutions through unfold."""
    layers = [m for m in model if isinstance(m, (nn.Linear, nn.Conv2d))]
    state = {}
    for step, x in enumerate(batches):
        inputs, outputs = {}, {}
        h = x
        for m in model:
            if m in layers:
                inputs[m] = h
            h = m(h)
            if m in layers:
                outputs[m] = h
        loss = h.square().sum() / len(x)
        grads = dict(
            zip(layers, torch.autograd.grad(loss, [outputs[m] for m in layers], retain_graph=True), strict=True)
        )
        model.zero_grad()
        loss.backward()
        for m in layers:
            if isinstance(m, nn.Conv2d):
                a = unfold(inputs[m], m.kernel_size, m.dilation, m.padding, m.stride).mT.flatten(0, 1)
                g = grads[m].flatten(2).mT.flatten(0, 1)
            else:
                a, g = inputs[m].flatten(0, -2), grads[m].flatten(0, -2)
            G, W = m.weight.grad.flatten(1), m.weight.data.flatten(1)
            if m.bias is not None:
                a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
                G, W = torch.cat([G, m.bias.grad[:, None]], 1), torch.cat([W, m.bias.data[:, None]], 1)
            d, p = G.shape
            eye = {n: torch.eye(n, dtype=x.dtype) for n in (d, p)}
            s = state.setdefault(m, {"K": eye[p], "C": eye[d], "mK": 0 * eye[p], "mC": 0 * eye[d], "M": 0 * G})
            if step % T == 0:
                K, C = s["K"], s["C"]
                HK, HC = K.T @ (a.T @ a / len(a)) @ K, C.T @ (len(x) * g.T @ g) @ C
                b = b1(step) if callable(b1) else b1
                now, later = (1, b) if outside else (b, 1)
                uK = (HC.trace() * HK + damping * (C.T @ C).trace() * K.T @ K - d * eye[p]) / (2 * d)
                uC = (HK.trace() * HC + damping * (K.T @ K).trace() * C.T @ C - p * eye[d]) / (2 * p)
                s["mK"], s["mC"] = a1 * s["mK"] + now * uK, a1 * s["mC"] + now * uC
                s["K"], s["C"] = K @ (eye[p] - later * s["mK"]), C @ (eye[d] - later * s["mC"])
            s["M"] = a2 * s["M"] + s["C"] @ s["C"].T @ G @ s["K"] @ s["K"].T + gamma * W
            W = W - lr * s["M"]
            m.weight.data = W[:, : m.weight[0].numel()].reshape(m.weight.shape)
            if m.bias is not None:
                m.bias.data = W[:, -1]
    return state, layers


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    slow_where([(torch.float64, 1e-10), (torch.float32, 1e-6)], lambda case: case[0] == torch.float32),
)
@pytest.mark.parametrize("T", slow_where([1, 10], lambda T: T == 10))
@pytest.mark.parametrize("outside", slow_where([False, True], bool))
@pytest.mark.parametrize("name", ["linear", "convolution", "sequence"])
def test_fifty_steps_equal_the_figure(name, outside, T, dtype, tolerance):
    torch.manual_seed(0)
    model, shape = models()[name]
    model = model.to(dtype)
    twin = copy.deepcopy(model)
    batches = [torch.randn(shape, dtype=dtype) for _ in range(50)]
    settings = {"lr": 0.01, "damping": 0.01}
    b1 = published_precond_lr if T == 1 else 0.02
    state, layers = reference(twin, batches, 0.01, 0.5, b1, 0.9, 0.01, 0.01, T, outside)
    convention = "outside" if outside else "inside"
    optimizer = INGD(model, precond_lr=b1, update_every=T, convention=convention, preset="paper", **settings)
    for x in batches:
        optimizer.zero_grad()
        (model(x).square().sum() / len(x)).backward()
        optimizer.step()
    for m, n in zip([m for m in model if hasattr(m, "weight")], layers, strict=True):
        torch.testing.assert_close(m.weight, n.weight, rtol=tolerance, atol=tolerance)
        own = optimizer.state[m.weight]
        p, d = own["K"].shape[-1], own["C"].shape[-1]
        momenta = [DenseFactor(k).unpack_momentum(own[key])[0] for k, key in ((p, "m_K"), (d, "m_C"))]
        for ours, theirs in zip((own["K"], own["C"], *momenta), ("K", "C", "mK", "mC"), strict=True):
            torch.testing.assert_close(ours[0], state[n][theirs], rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(importlib.util.find_spec("singd") is None, reason="singd is not installed (pip install singd)")
@pytest.mark.parametrize("T", slow_where([1, 10], lambda T: T == 10))
@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_equal_to_singd(name, T):
    from singd.optim.optimizer import SINGD

    torch.manual_seed(0)
    model, shape = models()[name]
    twin = copy.deepcopy(model)
    ours = INGD(model, lr=0.01, damping=0.01, precond_lr=0.02, update_every=T, convention="outside", preset="paper")
    groups_of = {
        "lr": 0.01,
        "damping": 0.01,
        "lr_cov": 0.02,
        "T": T,
        "alpha1": 0.5,
        "momentum": 0.9,
        "weight_decay": 0.01,
    }
    theirs = SINGD(twin, structures=("dense", "dense"), normalize_lr_cov=False, kfac_like=False, **groups_of)
    for _ in range(30):
        x = torch.randn(shape)
        for m, o in ((model, ours), (twin, theirs)):
            o.zero_grad()
            (m(x).square().sum() / len(x)).backward()
            o.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    for m, n in zip(model, twin, strict=True):
        if hasattr(m, "weight"):
            torch.testing.assert_close(ours.state[m.weight]["K"][0], theirs.Ks[theirs.module_names[n]].to_dense())
