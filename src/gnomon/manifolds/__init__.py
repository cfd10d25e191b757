"""Points on SPD submanifolds: modules whose parameters are local coordinates."""

from .gaussian import Gaussian
from .point import Point, all_finite, point_of
from .spd import SPD

__all__ = ["SPD", "Gaussian", "Point", "all_finite", "point_of"]
