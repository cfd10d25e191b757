"""Points at random frames."""

import torch

import gnomon
from gnomon.testing import random_element

FORMS = ("outer", "inner", "inverse")


def random_point(group, form="outer", batch=(), dtype=torch.float64, **options):
    point = gnomon.SPD(group, factor=form, batch_shape=batch, dtype=dtype, **options)
    point.frame.copy_(group.pack(random_element(group, batch, dtype=dtype)))
    return point
