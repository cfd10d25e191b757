"""Forms of factors for structures, and the tangents of a pair of them."""

import math

from gnomon import groups
from gnomon.optim.kronecker.dense_factor import DenseFactor
from gnomon.optim.kronecker.factor_forms import FactorPair
from gnomon.optim.kronecker.structured_factor import StructuredFactor


def form_of(group):
    """The form of a factor with this structure that stores the factor itself."""
    return DenseFactor(group.k) if isinstance(group, groups.Dense) else StructuredFactor(group)


def pair_of(left, right):
    return FactorPair(form_of(left), form_of(right))


def tangents(pair, k, c, curvature, damping, limit=math.inf, rate=1.0):
    """``rate/2 P( tr(H_C)/d H_K + damping tr(C^T C)/d K^T K - I )`` and its twin, of a curvature in no unit."""
    size_k, size_c = pair.left.mean_square(k), pair.right.mean_square(c)
    return (
        pair.left.tangent(k, curvature.in_k, curvature.weight_k, damping * size_c, limit, rate),
        pair.right.tangent(c, curvature.in_c, curvature.weight_c, damping * size_k, limit, rate),
    )
