"""Classifiers and a denoiser of images: twenty classes of CIFAR-100, mostly at 16 x 16 pixels to save time."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from ..data import cifar, digits
from ..data.augment import flip
from ..data.base import DataMissingError, shuffled
from ..models.resnet import basic_resnet
from ..models.unet import UNet
from ..models.vit import VisionTransformer
from .cifar import small_cnn
from .samples import Samples, SampleTask, percent_wrong

CLASSES = 20
"""The number of CIFAR-100's classes that are used, the first ones."""
VALIDATION = 800


@functools.cache
def cifar_part(part: Literal["train", "test"]) -> Samples:
    """Return the normalized images of the first classes, in the order of the files, which is random."""
    images, labels = cifar.read(cifar.CIFAR100, part)
    chosen = labels < CLASSES
    return Samples(cifar.RECIPE.normalized(images[chosen]), labels[chosen])


def halved(samples: Samples) -> Samples:
    """Return the images at half their size, by averages of 2 x 2 pixels."""
    return Samples(avg_pool2d(samples.inputs, 2), samples.targets)


class Classifier(SampleTask):
    """A network on twenty classes of CIFAR-100. Half of the images of a batch are mirrored."""

    batch_size = 128

    def __init__(self) -> None:
        samples = self.prepared(cifar_part("train"))
        self.train, self.validation = samples.split(len(samples.inputs) - VALIDATION, VALIDATION)
        self.test = self.prepared(cifar_part("test"))

    def prepared(self, samples: Samples) -> Samples:
        return halved(samples)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = super().batch(generator)
        return flip(images, generator), labels


class Cnn(Classifier):
    """The network of :class:`~.cifar.Cifar`, at 16 x 16 pixels."""

    name, steps, measure = "cnn", 200, "test error in %"
    scores = staticmethod(percent_wrong)

    def model(self) -> nn.Module:
        return small_cnn(CLASSES)


class ResNet(Classifier):
    """A residual network with batch norm: seven convolutions of 3 x 3, of widths 32, 64 and 128, at 16 x 16 pixels."""

    name, steps, measure = "resnet", 150, "test error in %"
    batch_size = 64
    scores = staticmethod(percent_wrong)

    def model(self) -> nn.Module:
        return basic_resnet((32, 64, 128), CLASSES, channels=3)


class ViT(Classifier):
    """A vision transformer, 3 layers of width 128, on patches of 8 x 8, or on scikit-learn's digits in 2 x 2."""

    name, steps, warmup, measure = "vit", 140, 10, "test loss"
    batch_size = 64

    def __init__(self) -> None:
        try:
            super().__init__()
            self._sizes = (8, 32, CLASSES, 3)
        except DataMissingError:
            self.train, self.validation, self.test = digit_parts()
            self._sizes = (2, 8, 10, 1)

    def prepared(self, samples: Samples) -> Samples:
        return samples

    def model(self) -> nn.Module:
        return VisionTransformer(128, 4, 3, *self._sizes)


class Denoiser(SampleTask):
    """A U-Net that predicts the noise in images, of any level between 0.05 and 2 times their deviation.

    The input is ``(x + s e) / sqrt(1 + s^2)`` with ``log s`` as one more channel, and the target is the noise e.
    """

    name, steps, warmup, measure = "denoiser", 240, 10, "test mean squared error of the noise"
    batch_size = 32
    lowest, highest = 0.05, 2.0

    def __init__(self) -> None:
        try:
            images, test = halved(cifar_part("train")).inputs, halved(cifar_part("test")).inputs
            self._images, validation = images[:-VALIDATION], images[-VALIDATION:]
        except DataMissingError:
            self._images, validation, test = (part.inputs for part in digit_parts())
        self.validation = self._noisy(validation[:250], torch.Generator().manual_seed(1))
        self.test = self._noisy(test, torch.Generator().manual_seed(2))

    def model(self) -> nn.Module:
        return UNet(32, self._images.shape[1])

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self._images), (self.batch_size,), generator=generator)
        return self._noisy(flip(self._images[chosen], generator), generator)

    def _noisy(self, images: Tensor, generator: torch.Generator) -> Samples:
        share = torch.rand(len(images), 1, 1, 1, generator=generator)
        level = self.lowest * (self.highest / self.lowest) ** share
        noise = torch.randn(images.shape, generator=generator)
        noisy = (images + level * noise) / (1 + level.square()).sqrt()
        return Samples(torch.cat([noisy, level.log().expand_as(images[:, :1])], 1), noise)

    def scores(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().flatten(1).mean(1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scores(output, target).mean()


def digit_parts() -> tuple[Samples, ...]:
    """Return scikit-learn's digits, normalized: 1197 for training, 300 for validation and 300 for tests."""
    images, labels = digits.read()
    order = shuffled(len(images))
    return Samples(digits.RECIPE.normalized(images[order]), labels[order]).split(len(images) - 600, 300, 300)
