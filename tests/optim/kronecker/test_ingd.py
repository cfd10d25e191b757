"""INGD against a plain transcription of the paper's figure, and against singd where it is installed."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

from gnomon import groups
from gnomon.optim.ingd import INGD, published_precond_lr


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("T", [1, 10])
@pytest.mark.parametrize("outside", [False, True])
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
        momenta = groups.Dense(p).expand(own["m_K"])[0], groups.Dense(d).expand(own["m_C"])[0]
        for ours, theirs in zip((own["K"], own["C"], *momenta), ("K", "C", "mK", "mC"), strict=True):
            torch.testing.assert_close(ours[0], state[n][theirs], rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(importlib.util.find_spec("singd") is None, reason="singd is not installed (pip install singd)")
@pytest.mark.parametrize("T", [1, 10])
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


def test_accumulation_equals_the_large_batch():
    torch.manual_seed(0)
    model, shape = models()["linear"]
    model = model.double()
    twin = copy.deepcopy(model)
    whole, parts = INGD(model, update_every=1), INGD(twin, update_every=1)
    for _ in range(5):
        x = torch.randn(shape, dtype=torch.float64)
        whole.zero_grad()
        model(x).square().sum(-1).mean().backward()
        whole.step()
        parts.zero_grad()
        for rows in x.split(4):
            (twin(rows).square().sum(-1).mean() / 4).backward()
        parts.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


NAMES = ["dense", "triangular", "diagonal", "block", "arrow", "heisenberg", "toeplitz", "identity"]
FACTORIES = {
    "upper": lambda k: groups.Triangular(k, upper=True),
    "small blocks": lambda k: groups.BlockDiagonal(k, min(k, 3)),
    "pair": (groups.Triangular, groups.Arrow),
    "pattern": {"0": "diagonal", "[3-9]": ("toeplitz", "dense")},
}


@pytest.mark.parametrize("structure", [*NAMES, *FACTORIES])
@pytest.mark.parametrize("curvature", ["kfac", "gradient"])
def test_every_structure_trains(structure, curvature):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 27), nn.LayerNorm(27), nn.Tanh(), nn.Linear(27, 2))
    x = torch.randn(64, 5)
    y = x[:, :2].sin()
    optimizer = INGD(model, 5e-3, structure=FACTORIES.get(structure, structure), update_every=2, curvature=curvature)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_structures_by_pattern_and_by_size():
    model = nn.ModuleDict({"small": nn.Linear(3, 4), "large": nn.Linear(3, 40), "other": nn.Linear(3, 4)})
    optimizer = INGD(model, structure={"small": ("diagonal", "triangular"), "lar*": "toeplitz"}, max_dim=20)
    rows = {row.name.split(".")[0]: (row.k, row.c) for row in optimizer.summary().rows}
    assert rows == {
        "small": ("Diagonal(4)", "Triangular(4)"),
        "large": ("Toeplitz(4)", "Diagonal(40)"),
        "other": ("Dense(4)", "Dense(4)"),
    }


def test_grouped_convolutions_apart_and_averaged():
    conv = nn.Conv2d(4, 6, 3, groups=2)
    assert INGD(conv).factors("")[0].shape == (2, 19, 19)
    average = INGD(conv, grouped="average", preset="paper", precond_lr=1.0, damping=0.0, update_every=1)
    x = torch.randn(5, 4, 6, 6)
    y = conv(x)
    g = torch.randn_like(y)
    (y * g).sum().backward()
    average.step()
    patches = unfold(x.unflatten(1, (2, 2)).mean(1), 3).mT.flatten(0, 1)
    rows = torch.cat([patches, torch.ones(len(patches), 1)], 1)
    outputs = g.flatten(2).mT.flatten(0, 1)
    mu_aa, mu_gg = rows.T @ rows / len(rows), 5 * outputs.T @ outputs
    wanted = torch.eye(19) - 0.5 * (mu_gg.trace() / 6 * mu_aa - torch.eye(19))
    torch.testing.assert_close(average.factors("")[0], wanted, rtol=1e-4, atol=1e-2)


def test_gradient_curvature_satisfies_the_equations_of_its_fixed_point():
    """S_a = E[G S_b^-1 G^T]/p and S_b = E[G^T S_a^-1 G]/d for Gaussian gradients, to the noise of single samples."""
    torch.manual_seed(0)
    d, p = 3, 4
    left, right = torch.randn(d, d, dtype=torch.float64), torch.randn(p, p, dtype=torch.float64)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(d, p, dtype=torch.float64))
    optimizer = INGD(
        model, 0.0, curvature="gradient", damping=0.0, update_every=1, precond_lr=lambda t: max(0.003, 1 / (t + 2))
    )
    for _ in range(4000):
        model.w.grad = left @ torch.randn(d, p, dtype=torch.float64) @ right
        optimizer.step()
    K, C = optimizer.factors("w")
    S_a, S_b = torch.linalg.inv(C @ C.T), torch.linalg.inv(K @ K.T)
    fitted, wanted = torch.kron(S_a, S_b), torch.kron(left @ left.T, right.T @ right)
    shape = fitted * (wanted.trace() / fitted.trace())
    assert (shape - wanted).norm() < 0.1 * wanted.norm()
    assert fitted.trace() / wanted.trace() == pytest.approx(1, abs=0.3)


def test_fisher_of_the_model_itself():
    """Statistics of sampled targets are those of the Fisher matrix, whatever the labels are."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).double()
    x = torch.randn(1, 3, dtype=torch.float64).expand(20000, 3)
    optimizer = INGD(model, 0.0, fisher="mc", subsample=False)
    output = model(x)
    optimizer.observe(output)
    nn.functional.cross_entropy(output, torch.zeros(20000, dtype=torch.long)).backward()
    statistics = optimizer._tracked[model.weight].statistics
    probability = output[0].softmax(0).detach()
    wanted = probability.diag() - probability.outer(probability)
    torch.testing.assert_close(statistics.outputs.s[0] * statistics.terms, wanted, rtol=0.05, atol=0.01)
    assert model.weight.grad is not None
    optimizer.step()
    assert not torch.equal(optimizer.factors("")[1], torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_training_with_sampled_targets(likelihood):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(64, 5)
    optimizer = INGD(model, 1e-2, fisher="mc", update_every=3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        output = model(x)
        optimizer.observe(output, likelihood)
        loss = (output - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_sampled_targets_that_are_forgotten():
    model = nn.Linear(3, 2)
    optimizer = INGD(model, fisher="mc")
    before = model.weight.clone()
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"fisher='mc' needs observe\(output\) before each backward pass"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="likelihood must be 'categorical', 'bernoulli' or 'gaussian', got 'poisson'"):
        optimizer.observe(model(torch.randn(4, 3)), "poisson")
    with pytest.raises(RuntimeError, match=r"observe\(\) is for fisher='mc'"):
        INGD(model).observe(model(torch.randn(4, 3)))


@pytest.mark.parametrize(("structure", "limit"), [("dense", 8.5), ("triangular", 5.0), ("diagonal", 1.1)])
def test_memory_of_the_state(structure, limit):
    """On the perceptron 784-512-512-10, with the momentum and the cached products."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = INGD(model, structure=structure, growing_intervals=False)
    model(torch.randn(128, 784)).square().mean().backward()
    optimizer.step()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert optimizer.memory_usage() <= limit * parameters
    assert optimizer.summary().bytes == pytest.approx(optimizer.memory_usage(), rel=0.01)


def test_the_summary_says_it_before_training(capsys):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6))
    rows = INGD(model).summary().rows
    text = capsys.readouterr().out
    for part in ("0.weight", "10 x 4", "Diagonal(10)", "2 of Dense(7)", "adamw", "total"):
        assert part in text
    dense = next(row for row in rows if row.name.startswith("1."))
    # An update of K K^T takes a product, for each of two groups; and C C^T likewise.
    assert dense.update >= 2 * (7**3 + 3**3)
    assert dense.step >= 2 * 3 * 7 * (7 + 3)
    paper = next(row for row in INGD(model, preset="paper").summary().rows if row.name.startswith("1."))
    assert paper.update >= 2 * 3 * (7**3 + 3**3)  # K^T K, the move and K K^T


def test_steps_do_not_leave_anything_behind():
    """State and memory are the same in each interval."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 2))
    optimizer = INGD(model, growing_intervals=False)
    sizes = []
    for step in range(200):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        if step in (20, 199):
            sizes.append(optimizer.memory_usage())
    assert sizes[0] == sizes[1]
