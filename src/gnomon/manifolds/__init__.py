"""Points on SPD submanifolds: modules whose parameters are local coordinates."""

from .averaging import averaged, get_avg_fn
from .divergence import kl_divergence
from .gaussian import Gaussian
from .normal import StructuredNormal
from .point import Point, all_finite, point_of
from .spd import SPD

__all__ = [
    "SPD",
    "Gaussian",
    "Point",
    "StructuredNormal",
    "all_finite",
    "averaged",
    "get_avg_fn",
    "kl_divergence",
    "point_of",
]
