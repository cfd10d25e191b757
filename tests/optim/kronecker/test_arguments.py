"""Models and settings that are refused."""

import math

import pytest
import torch
from torch import nn

from gnomon.optim import INGD, KFAC
from gnomon.optim.kronecker.config import IN_PLACE_OF, preset_arguments
from support.perceptron import perceptron

OPTIMIZERS = [INGD, KFAC]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bad_models(kind):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got generator"):
        kind(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="model has no trainable parameters"):
        kind(nn.ReLU())
    with pytest.raises(ValueError, match="model has no trainable parameters"):
        kind(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(TypeError, match=r"0\.weight is of type torch\.complex64"):
        kind(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="has no shape yet; run a batch"):
        kind(nn.LazyLinear(3))
    whole = nn.Linear(2, 2)
    whole.codes = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    kind(whole)  # what is not trained may be of any type


def test_sparse_gradients_are_refused_before_anything_changes():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = INGD(model)
    before = model[1].weight.clone()
    model(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"the gradient of 0\.weight is sparse; build its embedding with sparse=False"
    ):
        optimizer.step()
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr must be finite and at least 0, got -1\.0"),
        ({"lr": math.nan}, "lr must be finite and at least 0, got nan"),
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1, got 1\.0"),
        ({"damping": -0.1}, "damping must be finite and at least 0"),
        ({"update_every": 0}, "update_every must be a positive integer, got 0"),
        ({"update_every": 2.5}, "update_every must be a positive integer, got 2.5"),
        ({"approx": "fold"}, "approx must be 'auto' or 'expand' or 'reduce', got 'fold'"),
        ({"convention": "both"}, "convention must be 'inside' or 'outside', got 'both'"),
        ({"curvature": "exact"}, "curvature must be 'kfac' or 'gradient', got 'exact'"),
        ({"fisher": "true"}, "fisher must be 'empirical' or 'mc', got 'true'"),
        ({"grouped": "all"}, "grouped must be 'each' or 'average', got 'all'"),
        ({"fallback": "lion"}, "fallback must be 'adamw' or 'sgd', got 'lion'"),
        ({"preset": "fast"}, "preset must be 'robust' or 'paper', got 'fast'"),
        ({"structure": "sparse"}, "structure must be one of auto, dense, triangular, .*, got 'sparse'"),
        ({"structure": ("dense",)}, r"structure must be a pair \(inputs, outputs\), got 1 parts"),
        ({"structure": lambda k: None}, "structure must give a group of size 6 for that size, got None"),
        ({"structure": {"0": "nothing"}}, "structure must be one of"),
        ({"step_rms": 0.0}, r"step_rms must be positive, or None to leave it out, got 0\.0"),
        ({"step_rms": 0.5, "kl_clip": 1e-3}, "step_rms and kl_clip are two ways"),
        ({"kl_clip": -1.0}, "kl_clip must be positive"),
        ({"max_factor_step": 0.0}, "max_factor_step must be positive"),
        ({"max_dim": 0}, "max_dim must be a positive integer, or None for no limit, got 0"),
        ({"order": 3}, "order must be 1 or 2, got 3"),
        ({"precond_dtype": torch.int8}, r"precond_dtype must be torch\.float64, .*, got torch\.int8"),
        ({"fallback_lr": -1.0}, r"fallback_lr must be finite and at least 0, got -1\.0"),
    ],
)
def test_impossible_settings(settings, message):
    model = perceptron()
    with pytest.raises(ValueError, match=message):
        INGD(model, **settings)
    assert not any(m._forward_hooks for m in model.modules())


def test_settings_of_a_wrong_type():
    for settings, message in (
        ({"lr": "fast"}, "lr must be a number or a function of the step that gives one, got 'fast'"),
        ({"structure": 3}, "structure must be a name, a function of the size, a pair or a mapping, got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            INGD(perceptron(), **settings)
    with pytest.raises(KeyError, match="no layer 'head' has factors; those that have: '0', '3'"):
        INGD(perceptron()).factors("head")


@pytest.mark.parametrize("memory", ["tiny", None, 0])
def test_a_wrong_value_of_memory(memory):
    with pytest.raises(ValueError, match=f"memory must be 'default' or 'low', got {memory!r}"):
        INGD(nn.Linear(2, 2), memory=memory)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"betas": (0.9, 0.999)}, "there is no argument betas: momentum takes the place of the first beta"),
        ({"eps": 1e-8}, "there is no argument eps: damping takes its place"),
        ({"fused": True}, "there is no argument fused: leave it out"),
        (
            {"foreach": False, "eps": 1.0},
            "there is no argument foreach: leave it out.*; there is no argument eps: damping",
        ),
        ({"maximize": True}, "there is no argument maximize: take the loss with the opposite sign"),
        ({"nesterov": True}, "there is no argument nesterov: steps by step_rms are Nesterov's already"),
    ],
)
def test_arguments_of_other_optimizers(kind, arguments, message):
    with pytest.raises(TypeError, match=message):
        kind(perceptron(), **arguments)


def test_parameters_in_the_place_of_the_model():
    with pytest.raises(TypeError, match="there is no argument params: pass the model itself as the first argument"):
        INGD(params=perceptron().parameters())


def test_no_argument_of_ours_is_taken_for_one_of_others():
    for kind in OPTIMIZERS:
        assert not set(IN_PLACE_OF) & set(preset_arguments(kind))
