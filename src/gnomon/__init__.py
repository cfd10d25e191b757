"""gnomon: momentum-based optimization on symmetric positive-definite matrices and structured submanifolds.

The name stands for *Generalized NOrmal-coordinate MOmentum optimizatioN*; the method is that of Lin et al., ICML
2023, "Simplifying Momentum-based Positive-definite Submanifold Optimization with Applications to Deep Learning".
"""

from importlib import import_module
from types import ModuleType

from . import baselines, groups, optim, problems, riemannian, testing
from .manifolds import SPD, Gaussian
from .optim import moving_frame

__version__ = "0.1.0"

__all__ = [
    "SPD",
    "Gaussian",
    "__version__",
    "baselines",
    "groups",
    "moving_frame",
    "optim",
    "problems",
    "riemannian",
    "testing",
]


def __getattr__(name: str) -> ModuleType:
    """``gnomon.mixture`` when it is asked for: it needs scikit-learn, the rest torch alone."""
    if name == "mixture":
        return import_module(".mixture", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
