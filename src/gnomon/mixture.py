"""Gaussian mixtures with structured covariances or precisions, as a scikit-learn estimator."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

try:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from sklearn.base import BaseEstimator, DensityMixin
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:  # the library itself needs torch alone
    raise ImportError(
        f"{error.name} is not installed: gnomon.mixture needs the 'mixture' extra; pip install 'gnomon[mixture]'"
    ) from error

from .groups import Affine, Dense, Element, Group
from .groups.base import positive_size
from .linalg import align
from .manifolds import Gaussian
from .optim import LBFGS, moving_frame

Array = NDArray[Any]
Form = Literal["covariance", "precision"]

CHUNK = 2**20
"""Numbers in the largest temporary of a pass over the data, ``rows x components x features``: 8 MiB."""

MEMORY = 20
"""The pairs that L-BFGS remembers."""

MOMENTUM = 0.9
"""Of mini-batch steps."""

WARM_UP_GAIN = 1e-3
"""L-BFGS takes over from natural-gradient steps when one gains less than this."""

ROUNDING = 1e-9
"""An increase of the loss that says nothing."""


class GaussianMixture(DensityMixin, BaseEstimator):  # type: ignore[misc]
    """A mixture ``p(x) = sum_k w_k N(x; mu_k, Sigma_k)`` whose ``Sigma_k`` lie on a structured submanifold.

    The covariances (or precisions) of all components are one batched :class:`gnomon.Gaussian`, and the likelihood is
    maximized over it and over the logits of the weights in moving normal coordinates. Every iterate is a valid mixture
    of the requested structure.

    Args:
        n_components: the number of components K.
        structure: a callable ``d -> Group``: ``gnomon.groups.Dense`` (any covariance), ``gnomon.groups.Arrow``,
            ``lambda d: gnomon.groups.Heisenberg(d, 2, 2)``, ... For pickles use ``functools.partial``, not a lambda.
        form: whether the structure is that of the factor of the covariance, ``Sigma = L L^T``, or of the precision,
            ``Sigma^-1 = P P^T``. For ``Dense``, ``Triangular``, ``BlockDiagonal`` and ``Diagonal`` the two are the same
            family, and the precision is faster, because its density needs no solve.
        reg_covar: the floor of the variances, in units of each feature's variance over the data; see below.
        tol: an iteration (with mini-batches, an epoch) that gains less than this in average log-likelihood is idle.
        n_iter_no_change: the fit has converged after so many idle iterations in a row.
        max_iter: iterations or epochs at most.
        n_init: runs from different k-means starts; the best without a collapsed component is kept.
        batch_size: samples in a mini-batch. None means all, and another optimizer.
        learning_rate: of mini-batch steps, where 1 is the length of a step of EM.
        warm_start: continue from the last fit instead of a k-means start.
        random_state: a seed or a :class:`numpy.random.RandomState`, for k-means, mini-batches and :meth:`sample`.
        verbose: 1 prints every tenth iteration, 2 each one.

    **Optimizer.** A fit begins with natural-gradient steps in the metric of the completed data: each component's
    gradient in normal coordinates, divided by its weight. Such a step moves the means as EM does and the covariances
    to first order, and so heads for the optimum that EM would find; L-BFGS from the start may jump to a worse one.
    Without ``batch_size``, :class:`gnomon.optim.LBFGS` takes over where these steps become slow: it has no
    learning rate and ends fast. With ``batch_size``, the
    natural-gradient steps have momentum, and an idle epoch halves their learning rate.

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
        structure: Callable[[int], Group] = Dense,
        form: Form = "covariance",
        reg_covar: float = 1e-6,
        tol: float = 1e-4,
        n_iter_no_change: int = 3,
        max_iter: int = 200,
        n_init: int = 1,
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
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ fitting
    def fit(self, X: ArrayLike, y: object = None) -> GaussianMixture:
        """Maximize the average log-likelihood of the rows of ``X``; ``y`` is ignored."""
        self._check_parameters()
        goes_on = self.warm_start and hasattr(self, "components_")
        data = validate_data(self, X, dtype=np.float64, ensure_min_samples=2, reset=not goes_on)
        if len(data) < self.n_components:
            raise ValueError(
                f"X has n_samples={len(data)}, fewer than n_components={self.n_components}; give more samples or ask "
                "for fewer components"
            )
        group = self._group(data.shape[1])
        units = _Units.of(data, group)
        z = torch.from_numpy(units.standardize(data))
        rng = check_random_state(self.random_state)
        starts: Iterable[_Run]
        if goes_on:
            starts = [self._last_fit(group, units)]
        else:
            start = partial(_k_means_start, z.numpy(), self.n_components, group, self.form, self.reg_covar)
            starts = (start(rng) for _ in range(self.n_init))
        runs = [self._run(z, start, units, rng) for start in starts]
        self._keep(min(runs, key=lambda run: (len(run.collapsed), run.curve[-1])), units)
        return self

    def fit_predict(self, X: ArrayLike, y: object = None) -> Array:
        """:meth:`fit`, then :meth:`predict` of the same ``X``."""
        return self.fit(X).predict(X)

    def _check_parameters(self) -> None:
        for name in ("n_components", "n_iter_no_change", "max_iter", "n_init"):
            positive_size(name, getattr(self, name))
        if self.batch_size is not None:
            positive_size("batch_size", self.batch_size)
        for name in ("reg_covar", "learning_rate", "tol"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 < float(value) < math.inf):
                raise ValueError(f"{name} must be a positive number, got {value!r}")

    def _group(self, d: int) -> Group:
        group = self.structure(d) if callable(self.structure) else None
        if not isinstance(group, Group) or group.k != d:
            raise ValueError(
                f"structure must be a callable that makes a group from the number of features, such as "
                f"gnomon.groups.Arrow or lambda d: gnomon.groups.Arrow(d, rank=2); for {d} features "
                f"{self.structure!r} gave {group!r}"
            )
        return group

    def _last_fit(self, group: Group, units: _Units) -> _Run:
        """Where the last fit ended, in the units of the new data."""
        components = deepcopy(self.components_)
        expected = Gaussian(group, form=self.form, batch_shape=(self.n_components,), dtype=torch.float64)
        if components.group != expected.group or components.batch_shape != expected.batch_shape:
            raise ValueError(
                f"warm_start=True continues with ({components.extra_repr()}), but the parameters now ask for "
                f"({expected.extra_repr()}); set warm_start=False"
            )
        units.into(components)
        return _Run(components, _logits(self.weights_))

    @torch.enable_grad()
    def _run(self, z: Tensor, start: _Run, units: _Units, rng: np.random.RandomState) -> _Run:
        """One maximization from a start; ``z`` are the data in ``units``."""
        run, objective = start, _Objective(z, start.components, start.logits, self.reg_covar, units.log_volume)
        optimizer: _FullBatch | _MiniBatches
        if self.batch_size is None:
            optimizer = _FullBatch(objective)
        else:
            optimizer = _MiniBatches(objective, self.batch_size, self.learning_rate, rng)
        for iteration in range(self.max_iter):
            run.record(optimizer.iterate(), self.tol)
            if self.verbose > 1 or (self.verbose and iteration % 10 == 0):
                print(f"iteration {iteration}: average log-likelihood {-run.curve[-1]:.6f}")
            if run.idle >= self.n_iter_no_change:
                run.converged = True
                break
            if run.idle:
                optimizer.after_idle_iteration()
        run.curve.append(objective.value())
        run.collapsed = _collapses(run, len(z), self.reg_covar)
        if self.verbose:
            print(
                f"{'converged' if run.converged else 'stopped'} after {run.n_iter} iterations: average log-likelihood "
                f"{-run.curve[-1]:.6f}"
            )
        return run

    def _keep(self, run: _Run, units: _Units) -> None:
        """The fitted attributes, and warnings where something went wrong."""
        units.out_of(run.components)
        self.components_ = run.components
        self.weights_ = run.weights
        self.means_ = run.components.loc.detach().numpy()
        self.converged_, self.n_iter_ = run.converged, run.n_iter
        self.loss_curve_, self.lower_bound_ = run.curve, -run.curve[-1]
        self.collapsed_ = np.array(sorted(run.collapsed), dtype=int)
        if run.collapsed:
            warnings.warn(self._describe(run.collapsed, units), ConvergenceWarning, stacklevel=3)
        if not run.converged:
            gain = "" if len(run.curve) < 3 else f" (the last gain was {run.curve[-3] - run.curve[-2]:.1e})"
            warnings.warn(
                f"the fit has not converged in max_iter={self.max_iter} iterations{gain}; raise max_iter or tol, or go "
                "on with warm_start=True",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _describe(self, collapsed: dict[int, int | None], units: _Units) -> str:
        names = getattr(self, "feature_names_in_", range(self.n_features_in_))
        reasons = []
        for component, feature in sorted(collapsed.items()):
            if feature is None:
                reason = "it has no more than one sample"
            else:
                constant = ", which is constant in the data" if units.constant[feature] else ""
                reason = f"its variance, mostly along feature {names[feature]}{constant}, rests on reg_covar"
            reasons.append(f"component {component} (weight {self.weights_[component]:.2g}): {reason}")
        return (
            f"{len(reasons)} of {self.n_components} components collapsed. {'; '.join(reasons)}. The fit is finite, but "
            f"its likelihood depends on reg_covar={self.reg_covar}. Use fewer components, a structure with fewer "
            "parameters or a larger reg_covar, try n_init > 1, or remove duplicate rows, constant features and extreme "
            "outliers"
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
        """The log-likelihood of each row."""
        return self._joint_log_prob(X).logsumexp(1).numpy()

    def score(self, X: ArrayLike, y: object = None) -> float:
        """The average log-likelihood of the rows; ``y`` is ignored."""
        return float(self.score_samples(X).mean())

    def predict_proba(self, X: ArrayLike) -> Array:
        """The responsibilities ``p(k | x)``, one column a component."""
        return self._joint_log_prob(X).softmax(1).numpy()

    def predict(self, X: ArrayLike) -> Array:
        """The most probable component of each row."""
        return self._joint_log_prob(X).argmax(1).numpy()

    @torch.no_grad()
    def _joint_log_prob(self, X: ArrayLike) -> Tensor:
        """``log w_k + log N(x; mu_k, Sigma_k)``, of shape ``(n_samples, K)``."""
        check_is_fitted(self)
        rows = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))
        log_weights = torch.from_numpy(self.weights_).log()
        return torch.cat(
            [self.components_.log_prob(part.unsqueeze(1)) + log_weights for part in _chunks(rows, self.components_)]
        )

    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """``n_samples`` draws, in the order of their components, and the components that they come from."""
        check_is_fitted(self)
        rng = check_random_state(self.random_state)
        counts = rng.multinomial(positive_size("n_samples", n_samples), self.weights_)
        parts = zip(self.means_, np.linalg.cholesky(self.covariances_), counts, strict=True)
        draws = [mean + rng.standard_normal((count, len(mean))) @ factor.T for mean, factor, count in parts]
        return np.concatenate(draws), np.repeat(np.arange(len(counts)), counts)

    def n_parameters(self) -> int:
        """Free parameters: the structure's degrees of freedom and a mean for each component, and K - 1 weights."""
        check_is_fitted(self)
        return len(self.weights_) * (self.components_.group.dim + 1) - 1

    def bic(self, X: ArrayLike) -> float:
        """The Bayesian information criterion; lower is better."""
        scores = self.score_samples(X)
        return float(self.n_parameters() * math.log(len(scores)) - 2 * scores.sum())

    def aic(self, X: ArrayLike) -> float:
        """The Akaike information criterion; lower is better."""
        return float(2 * self.n_parameters() - 2 * self.score_samples(X).sum())


# ---------------------------------------------------------------------- units
@dataclass
class _Units:
    """Centre and scale of the data, ``z = (x - centre) / scale``, as far as the structure is invariant under them.

    The Gaussian ``N(centre, Diag(scale)^2)`` has the affine map from z to x as its frame, so that a product with that
    frame turns a Gaussian of z into that of x: exactly, and within the structure.
    """

    centre: Array
    scale: Array
    constant: Array
    """Which features are, up to rounding."""

    @classmethod
    def of(cls, data: Array, group: Group) -> _Units:
        spread = data.std(0)
        constant = spread <= 10 * np.finfo(np.float64).eps * np.abs(data).max(0)
        wanted = torch.from_numpy(np.where(constant, 1, spread))
        # What the structure holds of that diagonal: all of it, or a common scale (Toeplitz).
        scale = group.matvec(group.from_diagonal(wanted), torch.ones_like(wanted))
        return cls(data.mean(0), scale.numpy(), constant)

    @property
    def log_volume(self) -> float:
        return float(np.log(self.scale).sum())

    def standardize(self, data: Array) -> Array:
        return (data - self.centre) / self.scale

    def into(self, components: Gaussian) -> None:
        """From the units of the data to these, in place."""
        self._change(components, components.group.ldiv)

    def out_of(self, components: Gaussian) -> None:
        """From these units to those of the data, in place."""
        self._change(components, components.group.mul)

    @torch.no_grad()
    def _change(self, components: Gaussian, operation: Callable[[Element, Element], Element]) -> None:
        assert isinstance(components.group, Affine)
        units = Gaussian(
            components.group.linear,
            form=components.form,
            loc=torch.from_numpy(self.centre),
            init=torch.from_numpy(self.scale**2),
            project=True,
            batch_shape=components.batch_shape,
        )
        components.frame.copy_(components.group.pack(operation(units.element(), components.element())))


# ---------------------------------------------------------------------- start
@dataclass
class _Run:
    """A mixture on its way, and how it went."""

    components: Gaussian
    logits: nn.Parameter
    curve: list[float] = field(default_factory=list)
    idle: int = 0
    """Idle iterations since the last gain."""
    converged: bool = False
    collapsed: dict[int, int | None] = field(default_factory=dict)
    """The collapsed components, with the feature of the thinnest direction, or None where there are no samples."""

    @property
    def n_iter(self) -> int:
        return len(self.curve) - 1

    @property
    def weights(self) -> Array:
        return self.logits.detach().softmax(0).numpy()

    def record(self, loss: float, tol: float) -> None:
        gain = min(self.curve, default=math.inf) - loss
        self.idle = 0 if gain > tol else self.idle + 1
        self.curve.append(loss)


def _logits(weights: Array) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(weights).clamp(min=torch.finfo(torch.float64).tiny).log())


def _k_means_start(z: Array, k: int, group: Group, form: Form, floor: float, rng: np.random.RandomState) -> _Run:
    """Means and covariances of the clusters of k-means, projected onto the structure.

    Each covariance is averaged with the pooled one, which counts as ``d + 1`` samples: small clusters, whose own is
    singular, then start with a sensible shape.
    """
    n, d = z.shape
    clusters = KMeans(k, n_init=1, random_state=rng).fit(z)
    residuals = z - clusters.cluster_centers_[clusters.labels_]
    counts = np.bincount(clusters.labels_, minlength=k)
    scatters = np.stack([rows.T @ rows for rows in (residuals[clusters.labels_ == i] for i in range(k))])
    pooled = scatters.sum(0) / n
    shares = (counts + d + 1)[:, None, None]
    covariances = (scatters + (d + 1) * pooled) / shares + floor * np.eye(d)
    components = Gaussian(
        group,
        form=form,
        loc=torch.from_numpy(clusters.cluster_centers_),
        init=torch.from_numpy(covariances),
        project=True,
        batch_shape=(k,),
    )
    return _Run(components, _logits((counts + 1) / (n + k)))


# ---------------------------------------------------------------------- objective
def _chunks(rows: Tensor, components: Gaussian) -> tuple[Tensor, ...]:
    """The rows in parts that bound the memory of a pass."""
    return rows.split(max(1, CHUNK // (components.d * components.batch_shape.numel())))


class _Objective:
    """``-1/n sum_x log sum_k w_k exp( log N(x; mu_k, Sigma_k) - floor/2 tr Sigma_k^-1 )``, in the units of the data."""

    def __init__(self, z: Tensor, components: Gaussian, logits: nn.Parameter, floor: float, log_volume: float) -> None:
        self.z, self.components, self.logits = z, components, logits
        self._floor, self._log_volume = floor, log_volume

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.components.eta, self.logits]  # type: ignore[list-item]

    def gradient(self, rows: Tensor | None = None) -> float:
        """Sets the gradients and returns the loss, on all data or on some rows."""
        for parameter in self.parameters:
            parameter.grad = None
        prior = self._prior()
        # A leaf of its own, so that the parts can be differentiated one by one and the prior only once.
        leaf = prior.detach().requires_grad_()
        loss = self._loss(self.z if rows is None else rows, leaf, torch.Tensor.backward)
        prior.backward(leaf.grad)
        return loss

    @torch.no_grad()
    def value(self) -> float:
        """The loss on all data."""
        return self._loss(self.z, self._prior(), lambda part: None)

    def _loss(self, rows: Tensor, prior: Tensor, each: Callable[[Tensor], None]) -> float:
        total = self._log_volume
        for chunk in _chunks(rows, self.components):
            part = -(self.components.log_prob(chunk.unsqueeze(1)) + prior).logsumexp(1).sum() / len(rows)
            each(part)
            total += part.item()
        return total

    def _prior(self) -> Tensor:
        """``log w_k - floor/2 tr Sigma_k^-1``, of shape ``(K,)``."""
        assert isinstance(self.components.group, Affine)
        linear = self.components.group.linear
        factor = self.components.element()[: len(linear.shapes)]
        if self.components.form == "covariance":
            factor = linear.ldiv(factor, linear.identity_like(factor))
        return self.logits.log_softmax(0) - 0.5 * self._floor * linear.squared_norm(factor)


def _collapses(run: _Run, n: int, floor: float) -> dict[int, int | None]:
    """Components with one sample or none, and those with a direction in which the floor is most of the variance."""
    variances, directions = torch.linalg.eigh(run.components.covariance().detach())
    thinnest = directions[..., 0].abs().argmax(-1)
    found: dict[int, int | None] = {}
    for component, weight in enumerate(run.weights):
        if weight * n < 1.5:
            found[component] = None
        elif variances[component, 0] < 2 * floor:
            found[component] = int(thinnest[component])
    return found


# ---------------------------------------------------------------------- optimizers
class _NaturalGradient:
    """Natural-gradient descent in the metric of the completed data (samples with their components).

    In that metric component k counts with its weight, so that its natural gradient is the gradient in normal
    coordinates over ``w_k``, here at least one sample. Twice the learning rate turns the affine-invariant metric of the
    coordinates into Fisher's. A step of length 1 moves the means to the averages of their samples, as EM does, and
    the covariances to first order.
    """

    def __init__(self, objective: _Objective, learning_rate: float, momentum: float = 0) -> None:
        self._objective = objective
        coordinates, logits = objective.parameters
        self._optimizer = moving_frame(
            torch.optim.SGD(
                [{"params": [coordinates], "lr": 2 * learning_rate}, {"params": [logits], "lr": learning_rate}],
                momentum=momentum,
                dampening=momentum,  # an average of gradients, no longer than a gradient is
            ),
            max_step=1.0,  # a factor e in each direction
        )

    def evaluate(self, rows: Tensor) -> float:
        """Sets the natural gradient of some rows and returns their loss."""
        loss = self._objective.gradient(rows)
        weights = self._objective.logits.detach().softmax(0).clamp(min=1 / len(rows))
        for parameter in self._objective.parameters:
            assert parameter.grad is not None
            parameter.grad.div_(align(weights, parameter.grad))
        return loss

    def step(self) -> None:
        self._optimizer.step()

    def halve(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] /= 2


class _FullBatch:
    """Natural-gradient steps as long as they gain much, then L-BFGS."""

    def __init__(self, objective: _Objective) -> None:
        self._objective = objective
        self._descent = _NaturalGradient(objective, learning_rate=1)
        self._warm = False
        self._loss: float | None = None  # at the current point
        self._lbfgs = LBFGS(objective.parameters, history_size=MEMORY)

    def iterate(self) -> float:
        """One iteration; the loss before it."""
        z = self._objective.z
        loss = self._descent.evaluate(z) if self._loss is None else self._loss
        if self._warm:
            self._loss = float(self._lbfgs.step(self._objective.gradient))
            return loss
        before = [tensor.clone() for tensor in self._state()]
        self._descent.step()
        self._loss = self._descent.evaluate(z)
        while not self._loss <= loss + ROUNDING:  # at times asymmetric structures need shorter steps than EM's
            for tensor, value in zip(self._state(), before, strict=True):
                tensor.copy_(value)
            self._descent.halve()
            self._descent.step()
            self._loss = self._descent.evaluate(z)
        self._warm = loss - self._loss < WARM_UP_GAIN
        return loss

    def _state(self) -> list[Tensor]:
        """What a step starts from: the point and its gradient."""
        parameters = self._objective.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [self._objective.components.frame, self._objective.logits.detach(), *gradients]

    def after_idle_iteration(self) -> None:
        """Nothing: the line search has found its step."""


class _MiniBatches:
    """Natural-gradient steps with momentum, an epoch an iteration."""

    def __init__(
        self, objective: _Objective, batch_size: int, learning_rate: float, rng: np.random.RandomState
    ) -> None:
        self._z, self._batch_size, self._rng = objective.z, batch_size, rng
        self._descent = _NaturalGradient(objective, learning_rate, MOMENTUM)

    def iterate(self) -> float:
        """One epoch; the average of the losses before its steps."""
        order = torch.from_numpy(self._rng.permutation(len(self._z)))
        batches = order.tensor_split(math.ceil(len(order) / self._batch_size))
        total = 0.0
        for rows in batches:
            total += len(rows) * self._descent.evaluate(self._z[rows])
            self._descent.step()
        return total / len(order)

    def after_idle_iteration(self) -> None:
        """Shorter steps: what they see is noise."""
        self._descent.halve()
