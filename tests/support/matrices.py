"""Matrices beside each other, and in several layouts of memory."""

import torch

F64 = torch.float64


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def all_close(actual, expected, tolerance=1e-10):
    for one, other in zip(actual, expected, strict=True):
        close(one, other, tolerance)


def laid_out(x, layout):
    """The same numbers at other places in memory."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "strided":
        return torch.stack([x, -x], -1).flatten(-2)[..., ::2]
    return x


LAYOUTS = ("plain", "transposed", "strided")
