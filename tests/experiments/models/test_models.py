"""The networks by name: parameters as in the paper's table, images of several sizes, and each layer known to INGD."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from gnomon.experiments import models
from gnomon.experiments.models.resnet import resnet
from gnomon.experiments.models.vit import VisionTransformer
from gnomon.optim import INGD

PAPER = [
    ("vgg16-bn", 100, 14_774_436),
    ("vgg16-bn", 200, 14_825_736),
    ("pyramidnet-65", 100, 707_428),
    ("pyramidnet-65", 200, 733_128),
    ("convmixer256-12", 100, 911_204),
    ("convmixer256-12", 200, 936_904),
    ("convmixer180-16", 100, 721_900),
]


@pytest.mark.parametrize(("name", "classes", "count"), PAPER)
def test_parameters_of_the_paper(name, classes, count):
    assert sum(p.numel() for p in models.build(name, classes).parameters() if p.requires_grad) == count


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [("resnet-50", 1000, 25_557_032), ("vit-b", 1000, 86_567_656), ("gpt-1.3b", 50257, 1_418_699_857)],
)
def test_large_models_take_no_memory_on_the_meta_device(name, classes, count):
    with torch.device("meta"):
        model = models.LARGE[name].build(classes)
    assert sum(p.numel() for p in model.parameters()) == count
    assert all(p.is_meta for p in model.parameters())


def test_small_ones_of_the_large_kinds():
    images = torch.randn(2, 3, 64, 64)
    assert resnet((1, 1), 10, 3)(images).shape == (2, 10)
    vision = VisionTransformer(32, 4, 2, patch=16, size=64, classes=10)
    output = vision(images)
    assert output.shape == (2, 10)
    # Its attention looks both ways: the class token, which is first, sees the last patch.
    images[:, :, -1, -1] += 1
    assert not torch.equal(vision(images), output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("vgg16-bn", 3, 32),
        ("vgg16-bn", 3, 64),
        ("pyramidnet-65", 3, 32),
        ("pyramidnet-65", 3, 35),
        ("convmixer256-12", 3, 32),
        ("convmixer180-16", 3, 224),
        ("convmixer128-6", 3, 64),
        ("cnn", 3, 32),
        ("cnn", 1, 28),
        ("cnn", 1, 8),
        ("mlp", 1, 8),
        ("mlp", 3, 32),
    ],
)
def test_images(name, channels, size):
    model = models.build(name, 10, channels).to(memory_format=torch.channels_last)
    convolved = []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda module, inputs, output: convolved.append(output))
    images = torch.randn(2, channels, size, size).contiguous(memory_format=torch.channels_last)
    output = model(images)
    assert output.shape == (2, 10)
    assert output.isfinite().all()
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in convolved)


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        # an update of its dense factors of size 4609 takes half a minute
        pytest.param("vgg16-bn", "diagonal", marks=pytest.mark.slow),
        pytest.param("pyramidnet-65", "dense", marks=pytest.mark.slow),
        pytest.param("convmixer256-12", "dense", marks=pytest.mark.slow),
        ("cnn", "dense"),
        ("mlp", "dense"),
        pytest.param("gpt", "dense", marks=pytest.mark.slow),
    ],
)
def test_ingd_knows_each_layer(name, structure):
    model = models.build(name, 10)
    opt = INGD(model, lr=1e-2, structure=structure)
    rows = opt.summary().rows
    assert {n for row in rows for n in row.name.split(" + ")} == {n for n, _ in model.named_parameters()}
    known = (torch.nn.Conv2d, torch.nn.Linear, torch.nn.Embedding)
    assert sum(row.treatment.startswith("INGD") for row in rows) == sum(isinstance(m, known) for m in model.modules())

    size = models.MODELS[name].size
    x = torch.randint(10, (2, 64)) if size is None else torch.randn(2, 3, size, size)
    y = torch.randint(10, (2, 64) if size is None else (2,))
    losses = []
    for _ in range(2):
        opt.zero_grad()
        loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_intervals_of_the_paper():
    intervals = {name: spec.update_every for name, spec in models.MODELS.items() if spec.update_every is not None}
    assert intervals == {
        "vgg16-bn": 10,
        "pyramidnet-65": 10,
        "convmixer256-12": 10,
        "regnetx-1.6gf": 10,
        "regnetz-500mf": 25,
        "repvgg-b1g4": 60,
        "convmixer180-16": 25,
        "rexnetr-100": 15,
    }


def test_bad_requests():
    with pytest.raises(ValueError, match=r"unknown model 'vgg'; known are vgg16-bn, .*, gpt"):
        models.build("vgg", 10)
    with pytest.raises(ValueError, match="classes must be at least 1, got 0"):
        models.build("cnn", 0)
    with pytest.raises(ValueError, match="channels must be at least 1, got -1"):
        models.build("cnn", 10, -1)


def test_a_package_that_is_absent():
    spec = replace(models.MODELS["repvgg-b1g4"], package="no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"'repvgg-b1g4' needs no_such_package; install .* 'vision'"):
        spec.build(10)
