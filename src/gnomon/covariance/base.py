"""What the covariance estimators share."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import KFold, check_cv
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from ..groups.base import positive_size
from ..groups.moments import SingularMomentsError
from ..manifolds import Gaussian
from .missing import squared_distances
from .model import Model
from .operator import StructuredMatrix
from .sample import LARGEST_DENSE, RunningSums, Sample, Summary, Target
from .selection import Folds, Trial, fit, log_prob

Array = NDArray[Any]
TARGETS: tuple[Target, ...] = ("diagonal", "identity")


def _needs_no_cross_validation(estimator: GaussianEstimator) -> bool:
    """Return whether ``partial_fit`` can be called."""
    searched = ((estimator.shrinkage, "cv"), (getattr(estimator, "structure", None), "auto"))
    if any(isinstance(value, str) and value == search for value, search in searched):
        raise AttributeError(
            "partial_fit keeps no rows for cross-validation; give the shrinkage and the structure, for example "
            "shrinkage=0.1 and structure='arrow:2'"
        )
    return True


class GaussianEstimator(BaseEstimator):  # type: ignore[misc]
    """A Gaussian with a free mean and a covariance from some family, fitted by (shrunk) maximum likelihood.

    Values that are NaN are missing: the likelihood is that of what is observed.

    Attributes:
        gaussian_: the fitted :class:`gnomon.Gaussian`, for torch.
        location_: the mean.
        covariance_, precision_: :class:`~gnomon.covariance.operator.StructuredMatrix`; ``numpy.asarray`` makes them
            dense.
        shrinkage_, target_: what the sample covariance was mixed with; see the arguments.
        n_features_in_, feature_names_in_: as in scikit-learn.
    """

    shrinkage: float | str
    target: str
    assume_centered: bool
    cv: Any
    random_state: Any
    gaussian_: Gaussian
    _sums: RunningSums | None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # ------------------------------------------------------------------ fitting
    def _family(self, k: int) -> Model:
        """Return the family of Gaussians of k features that the arguments ask for."""
        raise NotImplementedError

    def _describe(self, trial: Trial) -> None:
        """Set what an estimator has beside the attributes of all."""

    @available_if(_needs_no_cross_validation)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> GaussianEstimator:
        """Fit to the rows of ``X`` together with those of earlier calls; ``y`` is ignored.

        Only sums of products of the rows are kept, and the fit is that of all rows at once: so large data can be read
        in parts. :meth:`fit` forgets these sums, and its own rows are not among them. No value may be missing, and
        the shrinkage and the structure must be given, because cross-validation needs all rows.
        """
        sums: RunningSums | None = getattr(self, "_sums", None)
        data = validate_data(self, X, dtype=(np.float64, np.float32), ensure_all_finite="allow-nan", reset=sums is None)
        if np.isnan(data).any():
            raise ValueError("X has missing values, which partial_fit cannot sum over; pass all rows to fit")
        if data.shape[1] > LARGEST_DENSE:
            raise ValueError(
                f"partial_fit keeps a matrix of features times features, so that X may have at most {LARGEST_DENSE} "
                f"features, got {data.shape[1]}; use fit"
            )
        model, weights, rows = self._family(data.shape[1]), self._weights(sample_weight, data), _tensor(data)
        if weights is None:
            weights = torch.ones(len(rows), dtype=torch.float64)
        rows, weights = rows[weights > 0], weights[weights > 0]
        sums = (RunningSums.empty(rows, weights, self.assume_centered) if sums is None else sums).plus(rows, weights)
        self._warn_of_constants(sums)
        trial = self._choose(None, model)
        self._keep(sums, trial)
        self._describe(trial)
        self._sums = sums
        return self

    def _weights(self, sample_weight: ArrayLike | None, data: Array) -> Tensor | None:
        if sample_weight is None:
            return None
        checked = _check_sample_weight(sample_weight, data, dtype=np.float64, ensure_non_negative=True)
        return torch.from_numpy(np.array(checked))

    def _read(self, X: ArrayLike, sample_weight: ArrayLike | None) -> Sample:
        data = validate_data(
            self, X, dtype=(np.float64, np.float32), ensure_all_finite="allow-nan", ensure_min_samples=2
        )
        weights = self._weights(sample_weight, data)
        if weights is not None and int((weights > 0).sum()) < 2:
            raise ValueError("sample_weight must be positive for two rows of X or more, got one; give more rows weight")
        sample = Sample.of(_tensor(data), weights, self.assume_centered)
        self._check_features(sample)
        return sample

    def _check_features(self, sample: Sample) -> None:
        names = getattr(self, "feature_names_in_", np.arange(sample.k))
        empty = (~sample.observed.any(0)).numpy()
        if empty.any():
            raise ValueError(f"features {_some(names[empty])} of X have no observed value; remove them")
        self._warn_of_constants(sample, stacklevel=5)

    def _warn_of_constants(self, data: Sample | RunningSums, stacklevel: int = 3) -> None:
        """Warn where features do not vary."""
        lowest, highest = data.extremes
        constant = (lowest == highest).numpy() if not data.centered else ((lowest == 0) & (highest == 0)).numpy()
        if not constant.any():
            return
        if data.count == 1:
            message = "partial_fit has seen one row only, from which no variance can be told; pass more rows"
        else:
            names = getattr(self, "feature_names_in_", np.arange(data.k))
            message = (
                f"features {_some(names[constant])} of X are constant, so that their variances are tiny and the "
                "likelihood says little; remove them"
            )
        warnings.warn(message, UserWarning, stacklevel=stacklevel)

    def _targets(self) -> tuple[Target, ...]:
        if self.target == "auto":
            return TARGETS
        if self.target not in TARGETS:
            raise ValueError(f"target must be 'auto', 'diagonal' or 'identity', got {self.target!r}")
        return (self.target,)

    def _fixed_shrinkage(self) -> float | None:
        """Return the number that was given, or None for cross-validation."""
        if isinstance(self.shrinkage, str) and self.shrinkage == "cv":
            return None
        given: Any = self.shrinkage
        return check_share("shrinkage", given, "'cv' or ")

    def _folds(self, sample: Sample) -> Folds:
        splitter = self.cv
        if isinstance(splitter, numbers.Integral):
            if splitter < 2:
                raise ValueError(f"cv must be at least 2 folds, or a splitter of scikit-learn, got {splitter!r}")
            seed = check_random_state(self.random_state).randint(2**31)
            splitter = KFold(min(int(splitter), len(sample.rows)), shuffle=True, random_state=seed)
        pairs = check_cv(splitter).split(sample.rows)
        return Folds(sample, [(torch.as_tensor(rows), torch.as_tensor(held_out)) for rows, held_out in pairs])

    def _choose(self, folds: Folds | None, model: Model) -> Trial:
        """Return one family with its shrinkage, which was given or is the best by cross-validation."""
        targets, fixed = self._targets(), self._fixed_shrinkage()
        if fixed is None:
            assert folds is not None
            return folds.best_shrinkage(model, targets)
        trials = [
            Trial(model, fixed, target, folds.score(model, fixed, target) if folds else 0.0)
            for target in (targets if folds and fixed > 0 else targets[:1])
        ]
        best = max(trials, key=lambda trial: trial.score)
        if folds:
            folds.trials.append(best)
        return best

    def _keep(self, sample: Summary, trial: Trial) -> None:
        """Set the attributes of all estimators."""
        try:
            self.gaussian_ = fit(sample, trial.model, trial.shrinkage, trial.target)
        except SingularMomentsError as error:
            raise ValueError(
                f"{error}. X has {sample.count} rows and {sample.k} features; pass a positive shrinkage, "
                "shrinkage='cv', or a structure with fewer parameters"
            ) from None
        self.location_: Array = self.gaussian_.loc.detach().numpy()
        self.shrinkage_, self.target_ = trial.shrinkage, trial.target
        self._sums = None

    # ------------------------------------------------------------------ the fitted Gaussian
    @property
    def covariance_(self) -> StructuredMatrix:
        check_is_fitted(self)
        return StructuredMatrix(self.gaussian_, precision=False)

    @property
    def precision_(self) -> StructuredMatrix:
        check_is_fitted(self)
        return StructuredMatrix(self.gaussian_, precision=True)

    def _rows(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        return _tensor(
            validate_data(self, X, dtype=(np.float64, np.float32), ensure_all_finite="allow-nan", reset=False)
        )

    def score_samples(self, X: ArrayLike) -> Array:
        """Return the log-likelihood of each row, of what is observed of it."""
        rows = self._rows(X)
        return log_prob(self.gaussian_, rows).numpy()

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Return the average log-likelihood of the rows; ``y`` is ignored."""
        return float(self.score_samples(X).mean())

    def mahalanobis(self, X: ArrayLike) -> Array:
        """Return the squared Mahalanobis distance of each row, ``(x - mu)^T Sigma^-1 (x - mu)``."""
        rows = self._rows(X)
        if bool(rows.isnan().any()):
            return squared_distances(self.gaussian_, rows).numpy()
        with torch.no_grad():
            return self.gaussian_._standardize(rows.double()).square().sum(-1).numpy()

    def error_norm(
        self,
        comp_cov: ArrayLike,
        norm: Literal["frobenius", "spectral"] = "frobenius",
        scaling: bool = True,
        squared: bool = True,
    ) -> float:
        """Return the distance of a covariance matrix from the fitted one, as in scikit-learn.

        It is the squared norm of the difference, over the number of features with ``scaling``, and its square root
        with ``squared=False``.
        """
        check_is_fitted(self)
        other, shape = np.asarray(comp_cov), self.covariance_.shape
        if other.shape != shape:
            raise ValueError(f"comp_cov must have the shape of the fitted covariance, {shape}, got {other.shape}")
        difference = other - self.covariance_.to_dense()
        if norm not in ("frobenius", "spectral"):
            raise ValueError(f"norm must be 'frobenius' or 'spectral', got {norm!r}")
        value = float(np.linalg.norm(difference, "fro" if norm == "frobenius" else 2) ** 2)
        value = value / len(difference) if scaling else value
        return value if squared else math.sqrt(value)

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Array:
        """Return draws from the fitted Gaussian, one a row."""
        check_is_fitted(self)
        shape = (positive_size("n_samples", n_samples), self.gaussian_.d)
        noise = check_random_state(random_state).standard_normal(shape)
        group, factor, _ = self.gaussian_._parts()
        rows = torch.from_numpy(noise)
        with torch.no_grad():
            rows = (group.matvec if self.gaussian_.form == "covariance" else group.rsolve)(factor, rows)
        return rows.numpy() + self.location_

    def plot(self, axes: Any = None) -> Any:
        """Return a picture of the fitted correlations and partial correlations; see :func:`plot_gaussian`."""
        from .plotting import plot_gaussian

        check_is_fitted(self)
        return plot_gaussian(self, axes)


def check_share(name: str, value: Any, otherwise: str = "") -> float:
    """Return a number between 0 and 1 as a float; raise an error that says what else it may be if it is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"{name} must be {otherwise}a number between 0 and 1, got {value!r}")
    return float(value)


def _tensor(data: Array) -> Tensor:
    """Return data as a tensor, without a copy where torch can read their memory."""
    return torch.from_numpy(np.require(data, requirements=["C", "W"]))


def _some(names: Array) -> str:
    shown = ", ".join(str(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
