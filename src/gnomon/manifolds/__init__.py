"""Points on SPD submanifolds: modules whose parameters are local coordinates."""

from .averaging import averaged
from .divergence import kl_divergence
from .gaussian import Gaussian
from .point import Point, all_finite, point_of
from .spd import SPD

__all__ = ["SPD", "Gaussian", "Point", "all_finite", "averaged", "kl_divergence", "point_of"]
