"""Random elements of a group, and their matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import jvp

from ..groups import Element, Group


def random_algebra(
    group: Group,
    batch_shape: Sequence[int] = (),
    *,
    size: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Element:
    """Return a random algebra element of Frobenius norm about ``size``, not symmetric."""
    blocks = random_blocks(group, batch_shape, device)
    frozen = group.scale(group.unflatten(torch.ones(group.numel, dtype=torch.float64, device=device)))
    blocks = tuple(b * (f != 0) for b, f in zip(blocks, frozen, strict=True))
    return tuple((b * (size / math.sqrt(group.k))).to(dtype) for b in blocks)


def random_element(
    group: Group,
    batch_shape: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Element:
    """Return a random, well-conditioned group element, not symmetric."""
    n = random_algebra(group, batch_shape, size=0.5, device=device)
    return tuple(block.to(dtype) for block in group.exp(n))


def random_blocks(group: Group, batch_shape: Sequence[int], device: torch.device | str) -> Element:
    """Return random numbers in the shapes of the blocks."""
    return tuple(torch.randn(*batch_shape, *s, dtype=torch.float64, device=device) for s in group.shapes)


def near_identity(group: Group, batch_shape: Sequence[int] = (), device: torch.device | str = "cpu") -> Element:
    """Return a random element that is not symmetric.

    It takes ``identity`` but not ``exp``, which may be what is wrong.
    """
    n = random_algebra(group, batch_shape, size=0.4, device=device)
    one = group.identity(batch_shape, dtype=torch.float64, device=device)
    return tuple(x + y for x, y in zip(one, n, strict=True))


def random_coordinates(group: Group, device: torch.device | str) -> Element:
    return group.unscale(group.scale(random_algebra(group, device=device)))


def dense_algebra(group: Group, n: Element) -> Tensor:
    """Return the matrix of an algebra element: the derivative of ``to_dense`` at the identity, whatever the storage."""
    one = group.identity_like(n)
    return jvp(lambda *blocks: group.to_dense(blocks), one, n)[1]


def pair(group: Group, covector: Element, n: Element) -> Tensor:
    """Return a covector's value for an algebra element."""
    return torch.stack([(c * x).sum() for c, x in zip(covector, n, strict=True)]).sum()


def pieces(group: Group, n: Element) -> list[Element]:
    """Return n with all but one coordinate set zeroed, for each set."""
    return [
        tuple(b if i in blocks else torch.zeros_like(b) for i, b in enumerate(n)) for blocks in group.coordinate_sets
    ]
