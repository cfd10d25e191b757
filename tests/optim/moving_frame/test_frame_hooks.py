"""Hooks, schedulers, scalers and closures."""

import copy
import warnings

import pytest
import torch
from torch import optim

import gnomon


def test_hooks_schedulers_and_scalers_work_once_each():
    point = gnomon.SPD(3)
    optimizer = optim.SGD(point.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    assert gnomon.moving_frame(optimizer) is optimizer
    assert repr(optimizer).startswith("SGD (")
    scaler = torch.amp.GradScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        scaler.scale(point.matrix().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert calls == ["post"]
    assert not torch.allclose(point.frame, torch.eye(3))
    _twin, copied = copy.deepcopy((point, optimizer))
    copied.register_step_post_hook(lambda *_: calls.append("copy"))
    copied.step()
    assert calls == ["post", "copy"]


def test_closures_by_keyword_and_schedulers_from_before():
    point = gnomon.SPD(3, dtype=torch.float64)
    plain = optim.SGD(point.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = gnomon.moving_frame(plain)

    def closure():
        optimizer.zero_grad()
        loss = point.matrix().sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimizer.step(closure=closure).item() == 3.0
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not bool(point.eta.any())
    assert not torch.allclose(point.frame, torch.eye(3, dtype=torch.float64))
    optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert "step" not in vars(optimizer)

    replaced = optim.SGD(point.parameters(), lr=0.1)
    replaced.step = print
    with pytest.raises(ValueError, match="call moving_frame before whatever replaces it"):
        gnomon.moving_frame(replaced)


def test_a_hook_that_clears_gradients_does_not_stop_the_fold():
    point = gnomon.SPD(3)
    optimizer = gnomon.moving_frame(optim.SGD(point.parameters(), lr=0.1))
    optimizer.register_step_post_hook(lambda o, *_: o.zero_grad())
    point.matrix().sum().backward()
    optimizer.step()
    assert not bool(point.eta.any())
    assert not torch.allclose(point.frame, torch.eye(3))
