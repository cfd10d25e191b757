"""Objectives with data generators and known optima."""

from .logdet import LogDet
from .nearness import MetricNearness
from .random import random_spd

__all__ = ["LogDet", "MetricNearness", "random_spd"]
