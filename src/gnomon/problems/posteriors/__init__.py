"""Posteriors of Bayesian models as log densities over R^d, many with the moments of reference draws.

    posterior = gnomon.problems.posteriors.load("kidiq-kidscore_momiq")
    posterior.log_density(x)          # (draws, dim) -> (draws,), float64
    posterior.to_constrained(x)       # {"beta": (draws, 2), "sigma": (draws,)}
    posterior.error(x)                # the largest error of means and log standard deviations

The models and reference draws are those of posteriordb; the densities are written from the models' definitions. Its
data is read from the folder that the environment variable GNOMON_DATA names.
"""

from . import differential_equations, gaussian_process, hierarchical, markov, regression  # registers its posteriors
from .base import Parameter, Posterior, Reference
from .registry import load, names
from .store import PosteriorDataMissingError, is_available, with_reference

__all__ = [
    "Parameter",
    "Posterior",
    "PosteriorDataMissingError",
    "Reference",
    "is_available",
    "load",
    "names",
    "regression",
    "with_reference",
]
