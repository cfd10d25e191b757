"""Augmentation of whole batches (count, channels, height, width). All random numbers come from the given generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

PADDING, DEGREES = 4, 20.0
ATTEMPTS = 10
"""The number of shapes that a random resized crop tries before it takes the middle of the image."""


class Part(NamedTuple):
    """A part of a batch. Random numbers are drawn for the whole batch, so that samples do not depend on the part."""

    samples: int
    """The number of samples of the whole batch."""
    chosen: slice = slice(None)


def crop_and_flip(images: Tensor, generator: torch.Generator, part: Part | None = None) -> Tensor:
    """Pad the images with four black pixels and crop them at random to their size. Mirror half of them at random."""
    part = part or Part(len(images))
    height, width = images.shape[-2:]
    padded = pad(images, (PADDING,) * 4)
    corner = torch.randint(2 * PADDING + 1, (2, part.samples, 1), generator=generator, device=generator.device)
    top, left = corner[:, part.chosen].to(images.device)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    mirrored = _half(part, generator, images.device)
    columns = torch.where(mirrored[:, None], columns.flip(-1), columns)
    return _gathered(padded.flatten(2), rows[:, :, None] * padded.shape[-1] + columns[:, None, :])


def rotate_and_flip(images: Tensor, generator: torch.Generator, part: Part | None = None) -> Tensor:
    """Rotate the images about their centre by a random angle within 20 degrees. Mirror half of them at random.

    Pixels are those nearest. The outside is black.
    """
    part = part or Part(len(images))
    height, width = images.shape[-2:]
    turn = torch.rand(part.samples, 1, 1, generator=generator, device=generator.device)[part.chosen].to(images.device)
    angle = (2 * turn - 1) * math.radians(DEGREES)
    mirrored = _half(part, generator, images.device)[:, None, None]
    # A rotated pixel is at most this far outside of the image. With this margin no pixel needs a test.
    margin = math.ceil((max(height, width) - 1) / 2 * math.sin(math.radians(DEGREES)))
    padded = pad(images, (margin,) * 4)
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    y = torch.arange(height, device=images.device)[:, None] - middle_y
    x = torch.arange(width, device=images.device) - middle_x
    x = torch.where(mirrored, -x, x)
    rows = (angle.cos() * y + (margin + middle_y)) - angle.sin() * x
    columns = (angle.cos() * x + (margin + middle_x)) + angle.sin() * y
    pixels = rows.round_().mul_(padded.shape[-1]).add_(columns.round_())
    return _gathered(padded.flatten(2), pixels.long())


def _gathered(flat: Tensor, pixels: Tensor) -> Tensor:
    """Return images whose pixels are taken from flat images (count, channels, pixels), alike in every channel."""
    taken = flat.gather(2, pixels.flatten(1)[:, None].expand(-1, flat.shape[1], -1))
    return taken.unflatten(2, pixels.shape[1:])


def flip(images: Tensor, generator: torch.Generator, part: Part | None = None) -> Tensor:
    """Mirror half of the images at random."""
    mirrored = _half(part or Part(len(images)), generator, images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def _half(part: Part, generator: torch.Generator, device: torch.device) -> Tensor:
    """Choose half of the samples at random."""
    return torch.rand(part.samples, generator=generator, device=generator.device)[part.chosen].to(device) < 0.5


def crop_draws(count: int, generator: torch.Generator) -> list[list[list[float]]]:
    """Draw the random numbers that :func:`resized_crop_box` takes, for every image of a batch of any sizes."""
    return torch.rand(count, ATTEMPTS, 4, generator=generator, device=generator.device).tolist()


def resized_crop_box(width: int, height: int, draws: Sequence[Sequence[float]]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a random part of an image.

    The part has 8 to 100 % of the area, and the ratio of its sides is between 3:4 and 4:3. ``draws`` has four numbers
    in [0, 1) for each attempt: area, ratio, left and top.
    """
    for area, ratio, left, top in draws:
        pixels = width * height * (0.08 + 0.92 * area)
        aspect = (4 / 3) ** (2 * ratio - 1)
        w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h
