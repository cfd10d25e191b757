"""gnomon: momentum-based optimization on symmetric positive-definite matrices and structured submanifolds.

The name stands for *Generalized NOrmal-coordinate MOmentum optimizatioN*; the method is that of Lin et al., ICML
2023, "Simplifying Momentum-based Positive-definite Submanifold Optimization with Applications to Deep Learning".
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import groups, optim, riemannian
from .manifolds import SPD, Gaussian, StructuredNormal, averaged, get_avg_fn, kl_divergence
from .optim import moving_frame

__version__ = "0.2.0"

__all__ = [
    "SPD",
    "Gaussian",
    "StructuredNormal",
    "__version__",
    "averaged",
    "baselines",
    "get_avg_fn",
    "groups",
    "kl_divergence",
    "moving_frame",
    "optim",
    "problems",
    "riemannian",
    "testing",
    "vi",
]


if TYPE_CHECKING:
    from . import baselines, problems, testing, vi

ON_DEMAND = ("baselines", "covariance", "mixture", "problems", "testing", "vi")
"""Modules that are imported when they are asked for, so that ``import gnomon`` is quick.

The modules covariance and mixture need scikit-learn.
"""


def __getattr__(name: str) -> ModuleType:
    if name in ON_DEMAND:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
