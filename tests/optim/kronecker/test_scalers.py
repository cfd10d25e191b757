"""Gradients that are scaled, unscaled and clipped."""

import pytest
import torch
from torch import nn

from gnomon.optim import INGD
from support.perceptron import batches, close, equal, objective, perceptron, train, train_scaled


def test_scaled_gradients_that_are_unscaled_and_clipped():
    """As with GradScaler: the hooks see scaled gradients, the step unscaled and clipped ones."""
    data = batches(30)
    plain, scaled = perceptron(), perceptron()
    one, other = INGD(plain), INGD(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)
    for x in data:
        one.zero_grad()
        objective(plain, x).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        one.step()
        other.zero_grad()
        scaler.scale(objective(scaled, x)).backward()
        scaler.unscale_(other)
        nn.utils.clip_grad_norm_(scaled.parameters(), 0.1)
        scaler.step(other)
        scaler.update()
    assert scaler.get_scale() > 2.0**12
    assert abs(objective(plain, data[0]) - objective(scaled, data[0])) < 0.05 * objective(plain, data[0])


def test_a_scaler_whose_scale_stays_changes_nothing():
    data = batches(12, torch.float64)
    plain, scaled = perceptron(torch.float64), perceptron(torch.float64)
    one, other = INGD(plain), INGD(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, one, data)
    train_scaled(scaled, other, data, scaler)
    close(plain, scaled)


def test_scalers_that_are_off_or_new():
    """A scaler that has scaled no loss leaves curvature in its units."""
    data = batches(6)
    plain = perceptron()
    train(plain, INGD(plain, kl_clip=1e-3, update_every=2), data)
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")):
        model = perceptron()
        train(model, INGD(model, kl_clip=1e-3, update_every=2, scaler=scaler), data)
        assert equal(model, plain)
    model = perceptron()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train_scaled(model, INGD(model, kl_clip=1e-3, update_every=2, scaler=scaler), data, scaler)
    assert equal(model, plain)
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got str"):
        INGD(perceptron(), scaler="on")


@pytest.mark.parametrize("settings", [{"preset": "paper"}, {"kl_clip": 1e-3}])
def test_a_scaler_that_is_known_changes_nothing(settings):
    data = batches(12, torch.float64)
    plain, scaled = perceptron(torch.float64), perceptron(torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, INGD(plain, update_every=2, **settings), data)
    other = INGD(scaled, update_every=2, scaler=scaler, **settings)
    train_scaled(scaled, other, data, scaler)
    close(plain, scaled)
