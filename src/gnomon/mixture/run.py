"""A mixture on its way: where it starts, and how it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans, kmeans_plusplus
from torch import Tensor, nn

from ..covariance.model import minimize
from ..groups import Element, Group, LowRank
from ..groups.likelihood import Form, has_closed_form, likeliest
from ..groups.moments import DenseMoments
from ..manifolds import Gaussian

Array = NDArray[Any]

INIT_PARAMS = ("kmeans", "k-means++", "random", "random_from_data")


@dataclass
class Run:
    """A mixture, the losses on its way, and what became of it."""

    components: Gaussian
    logits: nn.Parameter
    best: float = math.inf
    """The lowest loss before an iteration."""
    idle: int = 0
    """Idle iterations since the last gain."""
    final: float = math.inf
    """The loss at the end of a fit that this one continues."""
    curve: list[float] = field(default_factory=list)
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
        self.idle = 0 if self.best - loss > tol else self.idle + 1
        self.best = min(self.best, loss)
        self.curve.append(loss)


def as_logits(weights: Array) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(weights).clamp(min=torch.finfo(torch.float64).tiny).log())


# ---------------------------------------------------------------------- factors
def fit_factors(group: Group, form: Form, covariances: Tensor, current: Element | None = None) -> Element:
    """Return the likeliest factors of the structure for one sample covariance or a batch of them: the M-step of EM.

    Of low rank, Newton's method begins where the factors are at present, so that the likelihood cannot decrease.
    """
    if isinstance(group, LowRank) and current is not None:
        fit = group.factor if form == "covariance" else group.inverse_factor
        return fit(covariances, current[1])
    if has_closed_form(group, form):
        return likeliest(group, DenseMoments(covariances), form, minimize)
    flat = covariances.reshape(-1, group.k, group.k)
    parts = [likeliest(group, DenseMoments(matrix), form, minimize) for matrix in flat]
    return tuple(
        torch.stack(blocks).reshape(*covariances.shape[:-2], *blocks[0].shape) for blocks in zip(*parts, strict=True)
    )


def assemble(group: Group, form: Form, factors: Element, means: Tensor) -> Gaussian:
    """Return the Gaussians with these factors and means."""
    components = Gaussian(group, form=form, loc=means, init=1.0, dtype=means.dtype, batch_shape=means.shape[:-1])
    with torch.no_grad():
        components.frame.copy_(components.group.pack(components.affine.join(factors, means)))
    return components


# ---------------------------------------------------------------------- starts
def start(
    z: Array,
    weights: Array,
    group: Group,
    form: Form,
    floor: float,
    shares: Array,
    means: Array | None,
    mixing: Array | None,
    tied: bool,
) -> Run:
    """Return the start in which samples belong to components by shares ``(n, K)``.

    It has their means, and their covariances fitted by the structure. The covariance of a cluster with fewer than ``2
    (d + 1)`` samples is averaged with the pooled one, which counts as the samples that are lacking: small clusters,
    whose own is singular, then start with a sensible shape. Others start as EM does.
    """
    n, d = z.shape
    shares = shares * (n * weights)[:, None]
    counts = shares.sum(0)
    pulled = shares.T @ z / np.maximum(counts, 1e-12)[:, None]
    centres = pulled if means is None else means
    scatters = np.stack([((z - c) * s[:, None]).T @ (z - c) for c, s in zip(centres, shares.T, strict=True)])
    pooled = scatters.sum(0) / n
    lacking = np.maximum(2 * (d + 1) - counts, 0)[:, None, None]
    covariances = (scatters + lacking * pooled) / (counts[:, None, None] + lacking)
    if tied:
        covariances = np.broadcast_to(pooled, covariances.shape)
    matrices = torch.from_numpy(covariances + floor * np.eye(d))
    if has_closed_form(group, form) or tied:
        factors = fit_factors(group, form, matrices[0] if tied else matrices)
        if tied:
            factors = tuple(block.expand(len(centres), *block.shape) for block in factors)
        components = assemble(group, form, factors, torch.from_numpy(np.ascontiguousarray(centres)))
    else:
        components = Gaussian(
            group,
            form=form,
            loc=torch.from_numpy(np.ascontiguousarray(centres)),
            init=matrices,
            project=True,
            batch_shape=(len(centres),),
        )
    return Run(components, as_logits((counts + 1) / (n + len(counts)) if mixing is None else mixing))


def initial_shares(
    z: Array, weights: Array, k: int, how: str, means: Array | None, rng: np.random.RandomState
) -> Array:
    """Return how much of each sample belongs to each component at the start.

    All of it belongs to the nearest one, or the shares are random.
    """
    if means is None and how == "random":
        shares: Array = rng.uniform(size=(len(z), k))
        return shares / shares.sum(1, keepdims=True)
    if means is not None:
        labels = _nearest(z, means)
    elif how == "kmeans":
        labels = KMeans(k, n_init=1, random_state=rng).fit(z, sample_weight=weights * len(z)).labels_
    elif how == "k-means++":
        labels = _nearest(z, kmeans_plusplus(z, k, random_state=rng)[0])
    else:
        labels = _nearest(z, z[rng.choice(len(z), size=k, replace=False)])
    result: Array = np.eye(k)[labels]
    return result


def _nearest(z: Array, means: Array) -> Array:
    squares = (z**2).sum(1)[:, None] - 2 * z @ means.T + (means**2).sum(1)
    nearest: Array = squares.argmin(1)
    return nearest


def collapses(run: Run, n: int, floor: float) -> dict[int, int | None]:
    """Return the components that have collapsed, each with the thinnest feature or None.

    They have one sample or none (None), or a direction in which the floor is most of the variance.
    """
    variances, directions = torch.linalg.eigh(run.components.covariance().detach())
    thinnest = directions[..., 0].abs().argmax(-1)
    found: dict[int, int | None] = {}
    for component, weight in enumerate(run.weights):
        if weight * n < 1.5:
            found[component] = None
        elif variances[component, 0] < 2 * floor:
            found[component] = int(thinnest[component])
    return found


def describe_collapses(run: Run, names: Sequence[Any] | Array, constant: Array, floor: float) -> str:
    """Describe which components have collapsed, why, and what to do."""
    reasons = []
    for component, feature in sorted(run.collapsed.items()):
        if feature is None:
            reason = "it has no more than one sample"
        else:
            note = ", which is constant in the data" if constant[feature] else ""
            reason = f"its variance, mostly along feature {names[feature]}{note}, rests on reg_covar"
        reasons.append(f"component {component} (weight {run.weights[component]:.2g}): {reason}")
    return (
        f"{len(reasons)} of {len(run.weights)} components collapsed. {'; '.join(reasons)}. The fit is finite, but its "
        f"likelihood depends on reg_covar={floor}. Use fewer components, a structure with fewer parameters or a larger "
        "reg_covar, try n_init > 1, or remove duplicate rows, constant features and extreme outliers"
    )
