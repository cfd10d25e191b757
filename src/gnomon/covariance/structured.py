"""Covariances with a structure, given or chosen by cross-validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from ..groups import Group
from ..groups.likelihood import Form
from .base import GaussianEstimator
from .model import Model
from .selection import Trial, candidates, structure_model


class StructuredCovariance(GaussianEstimator):
    """A Gaussian whose covariance (or precision) has a structure, by shrunk maximum likelihood.

    It maximizes ``-1/2 (log det Sigma + tr(Sigma^-1 S))`` over the structure, where
    ``S = (1 - shrinkage) S_n + shrinkage T`` mixes the sample covariance ``S_n`` with a diagonal T. Most structures
    have a closed form; the others are fitted by :class:`gnomon.optim.LBFGS`.

    Args:
        structure: ``"auto"``, or a structure as :func:`gnomon.groups.as_structure` takes it: ``"diagonal"``,
            ``"toeplitz"`` (a time series), ``"block:5"`` (independent groups of five features in a row), ``"arrow:2"``
            (given the first two features the others are independent), ``"lowrank:3"`` (three latent factors and
            noise), ``"heisenberg:1,2"``, ``"dense"``, a group or a function from the number of features to one.
            ``"auto"`` takes the structure with the highest held-out likelihood; ``cv_results_`` has all that it tried.
        form: whether the structure is that of the factor of the covariance, ``Sigma = A A^T``, or of the precision,
            ``Sigma^-1 = A A^T``.
        shrinkage: a number from 0 (maximum likelihood) to 1 (a diagonal), or ``"cv"`` for the one with the highest
            held-out likelihood.
        target: what T is. ``"diagonal"``: the variances of the features, shrunk towards each other as far as they
            differ by chance. ``"identity"``: one common variance, as in :class:`sklearn.covariance.LedoitWolf`.
            ``"auto"`` compares both where there is cross-validation, and is ``"diagonal"`` elsewhere.
        assume_centered: the mean is known to be zero.
        cv: the number of folds, or a splitter of scikit-learn.
        random_state: a seed or a :class:`numpy.random.RandomState` for the folds.

    Attributes:
        structure_: the :class:`gnomon.groups.Group`.
        structure_name_: how one would ask for it.
        cv_results_: for each structure that was tried, ``(name, shrinkage, target, held-out average log-likelihood)``,
            best first; empty without cross-validation.

    The other attributes are those of :class:`~gnomon.covariance.base.GaussianEstimator`. The order of the features
    matters for ``"toeplitz"``, ``"block"``, ``"arrow"`` and ``"heisenberg"``:
    :func:`gnomon.covariance.order_features` finds one.
    """

    def __init__(
        self,
        structure: str | Group | Callable[[int], Group] = "auto",
        *,
        form: Form = "covariance",
        shrinkage: float | str = "cv",
        target: str = "auto",
        assume_centered: bool = False,
        cv: Any = 5,
        random_state: Any = 0,
    ) -> None:
        self.structure = structure
        self.form = form
        self.shrinkage = shrinkage
        self.target = target
        self.assume_centered = assume_centered
        self.cv = cv
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> StructuredCovariance:
        """Fit to the rows of ``X``, in which NaN is a missing value; ``y`` is ignored."""
        if self.form not in ("covariance", "precision"):
            raise ValueError(f"form must be 'covariance' or 'precision', got {self.form!r}")
        fixed = self._fixed_shrinkage()
        sample = self._read(X, sample_weight)
        automatic = isinstance(self.structure, str) and self.structure == "auto"
        folds = self._folds(sample) if automatic or fixed is None else None
        if automatic:
            assert folds is not None
            families = candidates(sample.k, self.form)
            chosen = folds.best_structure(families, lambda model: self._choose(folds, model))
        else:
            chosen = self._choose(folds, self._family(sample.k))
        self._keep(sample, chosen)
        self._describe(chosen)
        trials = sorted(folds.trials, key=lambda trial: -trial.score) if folds else []
        self.cv_results_ = [(t.model.name, t.shrinkage, t.target, t.score) for t in trials]
        return self

    def _family(self, k: int) -> Model:
        if self.form not in ("covariance", "precision"):
            raise ValueError(f"form must be 'covariance' or 'precision', got {self.form!r}")
        return structure_model(self.structure, k, self.form)

    def _describe(self, trial: Trial) -> None:
        self.structure_, self.structure_name_ = self.gaussian_.structure, trial.model.name
        self.cv_results_ = []
