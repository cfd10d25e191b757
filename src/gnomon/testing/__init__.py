"""Checks that a user can run on a group of their own, and that the project runs on every group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..frames import FORMS
from ..groups import Group
from .algebra import (
    check_congruence,
    check_coordinates,
    check_covectors,
    check_exponentials,
    check_factor,
    check_identity,
    check_inverses,
    check_linearity,
    check_norms,
    check_projections,
    check_representation,
    check_transposes,
)
from .elements import random_algebra, random_element
from .geometry import check_metric, check_pullback, check_transport_order
from .memory import check_batch, check_dtype, check_gradients, check_memory, check_squares
from .storage import check_storage, check_value

__all__ = ["check_group", "random_algebra", "random_element"]


def check_group(
    group: Group,
    *,
    batch_shape: Sequence[int] = (2,),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> None:
    """Hold a group to everything that the library assumes of one.

    An AssertionError says what fails and which method to correct, or to override where it is a default::

        Circulant(5): dual is off by 7.4e-01 (relative; allowed 1e-10); correct `dual`, which Circulant defines

    Use a small member of the family (k up to 8 or so): each operation is compared with its dense twin, and
    derivatives are taken by automatic differentiation. Elements are random and **not symmetric**. A member is checked
    after those that its default is derived from, so that the first complaint is about the cause. Checked are

    - storage: shapes, flattening and packing; equality and hash;
    - every operation against its dense twin or its definition: products, inverses, determinants, projections,
      covectors (``restrict``, ``dual``, ``pullback``, ``gram``, ``trace``), norms within their documented ranges,
      factors, transposes and congruences;
    - orthonormal coordinates, ``dim`` of them;
    - closure under products and under the truncated exponential, and the order of the latter, as a slope;
    - the flags ``is_algebra``, ``has_matrix_exp`` and ``trivial_transport``, where they are claimed;
    - the identity metric at the origin of all three factorizations, and the pull-back of gradients;
    - third order of the corrected transport, as a slope against integrated parallel transport;
    - products with ``A A^T`` in given memory, arguments that stay as they are, gradients through elements;
    - batches against loops, and that float64, float32, bfloat16 and the device are kept.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        check_storage(group, device)
        check_value(group)
        for check in (
            check_representation,
            check_identity,
            check_linearity,
            check_projections,
            check_inverses,
            check_covectors,
            check_coordinates,
            check_norms,
            check_exponentials,
            check_factor,
            check_transposes,
            check_congruence,
            check_squares,
            check_memory,
            check_gradients,
        ):
            check(group, device)
        check_batch(group, tuple(batch_shape), device)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            check_dtype(group, dtype, device)
        for form in FORMS if group.dim else ():  # a point has no coordinates
            check_metric(group, form, device)
            check_pullback(group, form, device)
            check_transport_order(group, form, device)
