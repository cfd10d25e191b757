"""The networks from timm, which `make test-vision` tests in an environment of their own."""

import importlib.util

import pytest
import torch
from torch.nn.functional import cross_entropy

from gnomon.experiments import models
from gnomon.experiments.models import vision
from gnomon.optim import INGD

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None,
    reason="timm is not installed; `make test-vision` runs these tests in an environment that has it",
)

PAPER = [
    ("regnetx-1.6gf", 100, 8_368_436),
    ("regnetx-1.6gf", 200, 8_459_736),
    ("regnetz-500mf", 100, 6_200_242),
    ("repvgg-b1g4", 100, 38_121_956),
    ("rexnetr-100", 100, 3_730_404),
]
NAMES = [name for name, spec in models.MODELS.items() if spec.package == "timm"]


@pytest.mark.parametrize(("name", "classes", "count"), PAPER)
def test_parameters_of_the_paper(name, classes, count):
    assert sum(p.numel() for p in models.build(name, classes).parameters() if p.requires_grad) == count


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_channels_last(name):
    model = models.build(name, 10).to(memory_format=torch.channels_last)
    size = models.MODELS[name].size
    images = torch.randn(2, 3, size, size).contiguous(memory_format=torch.channels_last)
    cross_entropy(model(images), torch.tensor([0, 1])).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_regnetx_keeps_the_resolution_of_small_images():
    features = models.build("regnetx-1.6gf", 10).forward_features(torch.randn(2, 3, 32, 32))
    assert features.shape == (2, 912, 4, 4)


def test_repvgg_is_that_of_timm():
    ours, theirs = models.build("repvgg-b1g4", 10).eval(), vision.timm_model("repvgg_b1g4", 10, 3).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 65, 64)
    torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize("name", NAMES)
def test_ingd_knows_each_layer(name):
    model = models.build(name, 10)
    opt = INGD(model, lr=1e-2, structure="diagonal")
    rows = opt.summary().rows
    assert {n for row in rows for n in row.name.split(" + ")} == {n for n, _ in model.named_parameters()}
    known = (torch.nn.Conv2d, torch.nn.Linear)
    assert sum(row.treatment.startswith("INGD") for row in rows) == sum(isinstance(m, known) for m in model.modules())

    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
    before = cross_entropy(model(images), labels)
    before.backward()
    opt.step()
    assert cross_entropy(model(images), labels) < before
