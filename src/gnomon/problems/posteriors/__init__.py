"""Posteriors of Bayesian models as log densities over R^d, many with the moments of reference draws.

    posterior = gnomon.problems.posteriors.load("kidiq-kidscore_momiq")
    posterior.log_density(x)          # (draws, dim) -> (draws,), float64
    posterior.to_constrained(x)       # {"beta": (draws, 2), "sigma": (draws,)}
    posterior.error(x)                # the largest error of means and log standard deviations

The models and reference draws are those of posteriordb; the densities are written from the models' definitions. Its
data is read from the folder that the environment variable GNOMON_DATA names.
"""

# The modules register their posteriors when they are imported.
from . import differential_equations, gaussian_process, generated, hierarchical, item_response, markov, regression
from .base import Parameter, Posterior, Reference, Values
from .generated import item_response_model, poisson_mixed_model
from .registry import load, names
from .store import PosteriorDataMissingError, is_available, with_reference
from .transforms import Transform

__all__ = [
    "Parameter",
    "Posterior",
    "PosteriorDataMissingError",
    "Reference",
    "Transform",
    "Values",
    "differential_equations",
    "gaussian_process",
    "generated",
    "hierarchical",
    "is_available",
    "item_response",
    "item_response_model",
    "load",
    "markov",
    "names",
    "poisson_mixed_model",
    "regression",
    "with_reference",
]
