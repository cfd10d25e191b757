"""Covariance estimators with structure, as scikit-learn estimators."""

try:
    import scipy  # noqa: F401
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:  # the library itself needs torch alone
    raise ImportError(
        f"{error.name} is not installed: gnomon.covariance needs the 'mixture' extra; pip install 'gnomon[mixture]'"
    ) from error

from .base import GaussianEstimator
from .factor_analysis import FactorAnalysis
from .graphical import GraphicalModel
from .operator import StructuredMatrix
from .ordering import FeatureOrder, order_features
from .plotting import plot_gaussian
from .structured import StructuredCovariance

__all__ = [
    "FactorAnalysis",
    "FeatureOrder",
    "GaussianEstimator",
    "GraphicalModel",
    "StructuredCovariance",
    "StructuredMatrix",
    "order_features",
    "plot_gaussian",
]
