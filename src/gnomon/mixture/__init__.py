"""Gaussian mixtures with structured covariances or precisions, as scikit-learn estimators."""

try:
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:  # the library itself needs torch alone
    raise ImportError(
        f"{error.name} is not installed: gnomon.mixture needs the 'mixture' extra; pip install 'gnomon[mixture]'"
    ) from error

from .estimator import GaussianMixture

__all__ = ["GaussianMixture"]
