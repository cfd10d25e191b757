"""Mixtures of Gaussians by maximum likelihood."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from ..groups import Group, as_structure
from ..groups.base import positive_size
from ..groups.likelihood import Form
from ..linalg import as_tensor
from ..manifolds import Gaussian
from .objective import CHUNK, Objective
from .optimizers import FullBatch, MiniBatches, Optimizer
from .run import INIT_PARAMS, Run, as_logits, collapses, describe_collapses, initial_shares, start
from .units import Units

Array = NDArray[Any]
Structure = str | Group | Callable[[int], Group]


class GaussianMixture(DensityMixin, BaseEstimator):  # type: ignore[misc]
    """A mixture ``p(x) = sum_k w_k N(x; mu_k, Sigma_k)`` whose ``Sigma_k`` lie on a structured submanifold.

    The covariances (or precisions) of all components are one batched :class:`gnomon.Gaussian`, and the likelihood is
    maximized over it and over the logits of the weights in moving normal coordinates. Every iterate is a valid mixture
    of the requested structure.

    Args:
        n_components: the number of components K.
        structure: of the covariances, as :func:`gnomon.groups.as_structure` takes it: ``"dense"`` (any),
            ``"lowrank:2"`` (a mixture of factor analysers with two factors each), ``"arrow:2"``, ``"heisenberg:2,2"``,
            ``"block:5"``, ``"diagonal"``, ``"toeplitz"``, a group, or a function from the number of features to one.
        form: whether the structure is that of the factor of the covariance, ``Sigma = L L^T``, or of the precision,
            ``Sigma^-1 = P P^T``. For ``Dense``, ``Triangular``, ``BlockDiagonal`` and ``Diagonal`` the two are the same
            family, and the precision is faster, because its density needs no solve.
        reg_covar: the floor of the variances, in units of each feature's variance over the data; see below.
        tol: an iteration (with mini-batches, an epoch) that gains less than this in average log-likelihood is idle.
        n_iter_no_change: the fit has converged after so many idle iterations in a row, or where EM comes to rest.
        max_iter: iterations or epochs at most.
        n_init: runs from different starts; the best without a collapsed component is kept.
        init_params: how samples are assigned at the start: ``"kmeans"``, ``"k-means++"`` and ``"random_from_data"`` (to
            the nearest of K samples) or ``"random"`` (at random).
        means_init: ``(K, d)``, means to start from; samples are then assigned to the nearest. None leaves them to
            ``init_params``.
        weights_init: ``(K,)``, mixing weights to start from.
        tied: all components have the same covariance. In precision form the fit is then by EM or natural gradients
            alone.
        batch_size: samples in a mini-batch. None means all, and another optimizer.
        learning_rate: of mini-batch steps, where 1 is the length of a step of EM.
        warm_start: continue from the last fit; idle iterations of it count.
        random_state: a seed or a :class:`numpy.random.RandomState`, for k-means, mini-batches and :meth:`sample`.
        verbose: 1 prints every tenth iteration, 2 each one.

    **Optimizer.** A fit begins with EM: the structure is fitted to the weighted moments of each component, in closed
    form where there is one. For other structures it begins with natural-gradient steps in the metric of the completed
    data, which move the means as EM does and the covariances to first order; L-BFGS from the start may jump to a worse
    optimum. Where this becomes slow, :class:`gnomon.optim.LBFGS` takes over: it has no learning rate and ends fast.
    Its gradients come from the same moments (Fisher's identity), so that an evaluation costs what an iteration of EM
    does. With ``batch_size``, there are natural-gradient steps with momentum alone, and an idle epoch halves their
    learning rate.

    **Scale.** Structures that hold the diagonal matrices (all but ``Toeplitz``) are invariant under a change of each
    feature's unit, and so are the steps. k-means and ``reg_covar`` are not: they see standardized features (for other
    structures, features divided by one common scale).

    **Floor.** The likelihood of a mixture is unbounded: a component can shrink onto a few points. So each density is
    that of data blurred by noise of variance ``reg_covar``, ``log N(x; mu, Sigma) - reg_covar/2 tr Sigma^-1``, which
    bounds the objective and, as in EM with the same ``reg_covar``, adds it to the variances at the optimum. A component
    of which some direction rests on this floor, or which has no more than one sample, has collapsed: a
    ``ConvergenceWarning`` says which and along which feature, and ``collapsed_`` lists them.

    Attributes:
        weights_, means_: ``(K,)`` and ``(K, d)``.
        covariances_, precisions_: ``(K, d, d)``, dense, made when asked for.
        components_: the :class:`gnomon.Gaussian` of batch shape ``(K,)``, in the units of the data.
        converged_, n_iter_: whether and after how many iterations the fit has converged.
        loss_curve_: the negative objective before each iteration (with mini-batches, its average over each epoch),
            and at the end.
        lower_bound_: the objective at the end, an average log-likelihood just below that of :meth:`score`.
        collapsed_: the indices of collapsed components.
        n_features_in_, feature_names_in_: as in scikit-learn.
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        structure: Structure = "dense",
        form: Form = "covariance",
        reg_covar: float = 1e-6,
        tol: float = 1e-4,
        n_iter_no_change: int = 3,
        max_iter: int = 200,
        n_init: int = 1,
        init_params: str = "kmeans",
        means_init: ArrayLike | None = None,
        weights_init: ArrayLike | None = None,
        tied: bool = False,
        batch_size: int | None = None,
        learning_rate: float = 0.2,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.structure = structure
        self.form = form
        self.reg_covar = reg_covar
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.means_init = means_init
        self.weights_init = weights_init
        self.tied = tied
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ fitting
    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> GaussianMixture:
        """Maximize the average log-likelihood of the rows of ``X``, by their weights; ``y`` is ignored."""
        self._check_parameters()
        goes_on = self.warm_start and hasattr(self, "components_")
        data = validate_data(self, X, dtype=np.float64, ensure_min_samples=2, reset=not goes_on)
        weights = np.full(len(data), 1 / len(data))
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, data, dtype=np.float64, ensure_non_negative=True)
            data, weights = data[weights > 0], weights[weights > 0] / weights.sum()
        if len(data) < self.n_components:
            raise ValueError(
                f"X has n_samples={len(data)}, fewer than n_components={self.n_components}; give more samples or ask "
                "for fewer components"
            )
        group = as_structure(self.structure, data.shape[1])
        units = Units.of(data, weights, group)
        z = units.standardize(data)
        rng = check_random_state(self.random_state)
        starts: Iterable[Run]
        if goes_on:
            starts = [self._last_fit(group, units)]
        else:
            starts = (self._start(z, weights, group, units, rng) for _ in range(self.n_init))
        runs = [self._run(torch.from_numpy(z), torch.from_numpy(weights), one, units, rng) for one in starts]
        self._keep(min(runs, key=lambda run: (len(run.collapsed), run.curve[-1])), units)
        return self

    def fit_predict(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> Array:
        """Return :meth:`predict` of ``X`` after :meth:`fit` to the same ``X``."""
        return self.fit(X, sample_weight=sample_weight).predict(X)

    def _check_parameters(self) -> None:
        for name in ("n_components", "n_iter_no_change", "max_iter", "n_init"):
            positive_size(name, getattr(self, name))
        if self.batch_size is not None:
            positive_size("batch_size", self.batch_size)
        for name in ("reg_covar", "learning_rate", "tol"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 < float(value) < math.inf):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for name in ("tied", "warm_start"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.form not in ("covariance", "precision"):
            raise ValueError(f"form must be 'covariance' or 'precision', got {self.form!r}")
        if self.init_params not in INIT_PARAMS:
            raise ValueError(f"init_params must be one of {', '.join(INIT_PARAMS)}, got {self.init_params!r}")

    def _given(self, name: str, shape: tuple[int, ...]) -> Array | None:
        """Return an array of the start, or None if it was not given."""
        given = getattr(self, name)
        if given is None:
            return None
        try:
            values = np.array(given, dtype=np.float64, order="C")
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be numbers of shape {shape}, got {given!r}") from None
        if values.shape != shape:
            raise ValueError(f"{name} must be of shape {shape}, got shape {values.shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"{name} must be finite, got {given!r}")
        return values

    def _start(self, z: Array, weights: Array, group: Group, units: Units, rng: np.random.RandomState) -> Run:
        k, d = self.n_components, z.shape[1]
        means, mixing = self._given("means_init", (k, d)), self._given("weights_init", (k,))
        if mixing is not None and not ((mixing > 0).all() and math.isclose(mixing.sum(), 1, rel_tol=1e-6)):
            raise ValueError(f"weights_init must be positive and sum to one, got {self.weights_init!r}")
        means = None if means is None else units.standardize(means)
        shares = initial_shares(z, weights, k, self.init_params, means, rng)
        return start(z, weights, group, self.form, self.reg_covar, shares, means, mixing, self.tied)

    def _last_fit(self, group: Group, units: Units) -> Run:
        """Return where the last fit ended, in the units of the new data."""
        components = deepcopy(self.components_)
        expected = Gaussian(group, form=self.form, batch_shape=(self.n_components,), dtype=torch.float64)
        if components.group != expected.group or components.batch_shape != expected.batch_shape:
            raise ValueError(
                f"warm_start=True continues with ({components.extra_repr()}), but the parameters now ask for "
                f"({expected.extra_repr()}); set warm_start=False"
            )
        units.into(components)
        return Run(components, as_logits(self.weights_), *self._progress)

    @torch.enable_grad()
    def _run(self, z: Tensor, weights: Tensor, run: Run, units: Units, rng: np.random.RandomState) -> Run:
        """Maximize the likelihood once from a start; ``z`` are the data in ``units``."""
        objective = Objective(z, weights, run.components, run.logits, self.reg_covar, units.log_volume, self.tied)
        if run.idle and abs(objective.value() - run.final) > self.tol:  # other data than those of the last fit
            run.best, run.idle = math.inf, 0
        optimizer: Optimizer
        if self.batch_size is None:
            optimizer = FullBatch(objective)
        else:
            optimizer = MiniBatches(objective, self.batch_size, self.learning_rate, rng)
        for iteration in range(self.max_iter):
            run.record(optimizer.iterate(), self.tol)
            if self.verbose > 1 or (self.verbose and iteration % 10 == 0):
                print(f"iteration {iteration}: average log-likelihood {-run.curve[-1]:.6f}")
            if run.idle >= self.n_iter_no_change or optimizer.settled:
                run.converged = True
                break
            if run.idle:
                optimizer.after_idle_iteration()
        run.curve.append(optimizer.loss())
        run.collapsed = collapses(run, len(z), self.reg_covar)
        if self.verbose:
            print(
                f"{'converged' if run.converged else 'stopped'} after {run.n_iter} iterations: average log-likelihood "
                f"{-run.curve[-1]:.6f}"
            )
        return run

    def _keep(self, run: Run, units: Units) -> None:
        """Set the fitted attributes, and warn where something went wrong."""
        units.out_of(run.components)
        self.components_ = run.components
        self.weights_ = run.weights
        self.means_ = run.components.loc.detach().numpy()
        self.converged_, self.n_iter_ = run.converged, run.n_iter
        self.loss_curve_, self.lower_bound_ = run.curve, -run.curve[-1]
        self._progress = (run.best, run.idle, run.curve[-1])
        self.collapsed_ = np.array(sorted(run.collapsed), dtype=int)
        if run.collapsed:
            names = getattr(self, "feature_names_in_", range(self.n_features_in_))
            warnings.warn(
                describe_collapses(run, names, units.constant, self.reg_covar), ConvergenceWarning, stacklevel=3
            )
        if not run.converged:
            gain = "" if len(run.curve) < 3 else f" (the last gain was {run.curve[-3] - run.curve[-2]:.1e})"
            warnings.warn(
                f"the fit has not converged in max_iter={self.max_iter} iterations{gain}; raise max_iter or tol, or go "
                "on with warm_start=True",
                ConvergenceWarning,
                stacklevel=3,
            )

    # ------------------------------------------------------------------ the fitted mixture
    @property
    def covariances_(self) -> Array:
        check_is_fitted(self)
        return self.components_.covariance().detach().numpy()

    @property
    def precisions_(self) -> Array:
        check_is_fitted(self)
        return self.components_.precision().detach().numpy()

    def score_samples(self, X: ArrayLike) -> Array:
        """Return the log-likelihood of each row."""
        return self._joint_log_prob(X).logsumexp(1).numpy()

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Return the average log-likelihood of the rows; ``y`` is ignored."""
        return float(self.score_samples(X).mean())

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the responsibilities ``p(k | x)``, one column a component."""
        return self._joint_log_prob(X).softmax(1).numpy()

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable component of each row."""
        return self._joint_log_prob(X).argmax(1).numpy()

    @torch.no_grad()
    def _joint_log_prob(self, X: ArrayLike) -> Tensor:
        """Return ``log w_k + log N(x; mu_k, Sigma_k)``, of shape ``(n_samples, K)``."""
        check_is_fitted(self)
        rows = as_tensor("X", validate_data(self, X, dtype=np.float64, reset=False))
        log_weights = torch.from_numpy(self.weights_).log()
        parts = rows.split(max(1, CHUNK // self.components_.frame.shape[0] // rows.shape[1]))
        return torch.cat([self.components_.log_prob(part.unsqueeze(1)) + log_weights for part in parts])

    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """Return ``n_samples`` draws in the order of their components, and the components that they come from."""
        check_is_fitted(self)
        rng = check_random_state(self.random_state)
        counts = rng.multinomial(positive_size("n_samples", n_samples), self.weights_)
        parts = zip(self.means_, np.linalg.cholesky(self.covariances_), counts, strict=True)
        draws = [mean + rng.standard_normal((count, len(mean))) @ factor.T for mean, factor, count in parts]
        return np.concatenate(draws), np.repeat(np.arange(len(counts)), counts)

    def n_parameters(self) -> int:
        """Free parameters: those of the covariance and the mean of each component, and K - 1 weights."""
        check_is_fitted(self)
        k, structure = len(self.weights_), self.components_.structure
        return (1 if self.tied else k) * structure.dim + k * structure.k + k - 1

    def bic(self, X: ArrayLike) -> float:
        """Return the Bayesian information criterion; lower is better."""
        scores = self.score_samples(X)
        return float(self.n_parameters() * math.log(len(scores)) - 2 * scores.sum())

    def aic(self, X: ArrayLike) -> float:
        """Return the Akaike information criterion; lower is better."""
        return float(2 * self.n_parameters() - 2 * self.score_samples(X).sum())
