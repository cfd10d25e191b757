"""Objectives with data generators and known optima, and :func:`solve`, which minimizes them."""

from . import posteriors
from .base import Matrix, Problem, SPDProblem
from .dictionary import Dictionary, DictionaryLearning
from .graphical import GraphicalModel
from .logdet import LogDet
from .metric_learning import MetricLearning
from .mixture_likelihood import Mixture, MixtureLikelihood
from .nearness import MetricNearness
from .random import random_spd
from .rosenbrock import Rosenbrock
from .solve import Solution, solve
from .trace_regression import TraceRegression

__all__ = [
    "Dictionary",
    "DictionaryLearning",
    "GraphicalModel",
    "LogDet",
    "Matrix",
    "MetricLearning",
    "MetricNearness",
    "Mixture",
    "MixtureLikelihood",
    "Problem",
    "Rosenbrock",
    "SPDProblem",
    "Solution",
    "TraceRegression",
    "posteriors",
    "random_spd",
    "solve",
]
