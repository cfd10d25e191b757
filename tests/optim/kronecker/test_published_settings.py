"""The settings of the paper's Table hyperparameters_opt."""

from torch import nn

from gnomon.experiments.training.config import Config, completed
from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.factor_update import published_precond_lr


def test_the_preset_has_the_published_settings():
    group = INGD(nn.Linear(3, 2), preset="paper").param_groups[0]
    published = {"momentum": 0.9, "weight_decay": 0.01, "damping": 0.005, "precond_momentum": 0.5, "update_every": 10}
    assert {name: group[name] for name in published} == published
    group = KFAC(nn.Linear(3, 2), preset="paper").param_groups[0]
    published = {"momentum": 0.9, "weight_decay": 0.01, "damping": 0.005, "decay": 0.95, "update_every": 10}
    assert {name: group[name] for name in published} == published


def test_the_warm_up_of_the_preconditioners_rate():
    rates = {step: published_precond_lr(step) for step in (0, 99, 100, 499, 500, 10_000)}
    assert rates == {0: 2e-4, 99: 2e-4, 100: 2e-3, 499: 2e-3, 500: 1e-2, 10_000: 1e-2}


def test_the_damping_of_one_model_is_smaller():
    for optimizer in ("ingd", "kfac"):
        for model, damping in (("repvgg-b1g4", 0.0005), ("rexnetr-100", 0.005)):
            config = Config(model=model, data="imagenet-100", optimizer=optimizer, preset="paper")
            assert completed(config).damping == damping
