"""Runs of an optimizer that are compared: weights, state and what was skipped."""

import copy
import functools

import torch
from torch import nn

from gnomon.linalg import packed_size, unpack_symmetric
from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.inverse_free_factor import FORMS
from support.matrices import F64


def trained(build, model, batches, loss=None, before_step=None, parts=1):
    """The model and its optimizer after a step for each batch; ``before_step(step, model, optimizer)`` may meddle."""
    model = copy.deepcopy(model)
    optimizer = build(model)
    loss = loss or (lambda model, x: model(x).cos().sum(1).mean())
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        for rows in x.chunk(parts):
            (loss(model, rows) / parts).backward()
        if before_step is not None:
            before_step(step, model, optimizer)
        optimizer.step()
    return model, optimizer


def state_of(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [{k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)} for p in params]


def unpacked(state):
    """A state in which matrices that are stored with each number once are whole."""
    if "forms" not in state:
        return state
    state, numbers = dict(state), state["forms"].clone()
    for i, key in enumerate(("K", "C")):
        if numbers[i] == FORMS.index("packed gram"):
            size = next(k for k in range(1, 10_000) if packed_size(k) == state[key].shape[-1])
            state[key], numbers[i] = unpack_symmetric(state[key], size), FORMS.index("gram")
    return {**state, "forms": numbers}


def same_run(one, other, tolerance=1e-10):
    """Weights and state, or bit for bit with no tolerance."""
    compare = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True)
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        compare(p, q)
        assert p.isfinite().all()
    for ours, theirs in zip(state_of(one[1]), state_of(other[1]), strict=True):
        assert ours.keys() == theirs.keys()
        ours, theirs = unpacked(ours), unpacked(theirs)
        for key, value in ours.items():
            compare(value, theirs[key])
    for name in ("skipped_steps", "skipped_updates"):
        assert getattr(one[1], name) == getattr(other[1], name)


OPTIMIZERS = {
    "robust": INGD,
    "paper": functools.partial(INGD, preset="paper", precond_lr=0.05),
    "kl_clip": functools.partial(INGD, kl_clip=1e-3),
    "kfac": KFAC,
    "kfac-paper": functools.partial(KFAC, preset="paper", damping=0.1),
}


def wide(bias=True):
    torch.manual_seed(0)
    layers = [nn.Linear(40, 30, bias=bias), nn.Tanh(), nn.Linear(30, 20, bias=bias)]
    return nn.Sequential(*layers).double()


def wide_batches(n=30, samples=6):
    return [torch.randn(samples, 40, dtype=F64) for _ in range(n)]


def convolutions():
    torch.manual_seed(0)
    pointwise = [m for _ in range(8) for m in (nn.Conv2d(4, 4, 1), nn.Tanh())]
    grouped = [nn.Conv2d(4, 4, 3, groups=2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2, padding=1)]
    return nn.Sequential(*pointwise, *grouped, nn.Flatten()).double()
