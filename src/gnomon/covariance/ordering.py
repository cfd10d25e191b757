"""An order of the features in which a structure fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..groups import Arrow, BlockDiagonal, Dense, Diagonal, Group, Heisenberg, LowRank, Toeplitz, Triangular
from ..groups.likelihood import Form
from .base import GaussianEstimator, check_share
from .sample import Sample
from .selection import Folds, fit, log_prob, structure_model

Array = NDArray[Any]

RIDGE = 0.1
"""The share of the identity in the correlations that an order is found from, so that few samples will do."""


@dataclass(frozen=True)
class FeatureOrder:
    """An order of features for a structure, and what it gains.

    Use it as ``X[:, result.order]``, or ``frame.iloc[:, result.order]``.
    """

    order: Array
    """The features, first to last, as indices of the columns of X."""
    names: list[str]
    """Their names, in this order."""
    structure: str
    before: float
    """The held-out average log-likelihood in the given order."""
    after: float
    """The same in an order that is found from the other rows alone."""

    @property
    def gain(self) -> float:
        """In nats a sample."""
        return self.after - self.before

    def __str__(self) -> str:
        shown = ", ".join(self.names[:10]) + (", ..." if len(self.names) > 10 else "")
        return (
            f"order for {self.structure!r}: {shown}\n"
            f"held-out average log-likelihood {self.before:.2f} -> {self.after:.2f} ({self.gain:+.2f} nats a sample)"
        )


class _Reader(GaussianEstimator):
    """Reads and splits data as the estimators do."""

    def __init__(self, cv: Any, random_state: Any) -> None:
        self.cv, self.random_state, self.assume_centered = cv, random_state, False


def order_features(
    X: ArrayLike,
    structure: str | Group | Callable[[int], Group],
    *,
    form: Form = "covariance",
    shrinkage: float = 0.1,
    cv: Any = 5,
    random_state: Any = 0,
) -> FeatureOrder:
    """Return an order of the columns of ``X`` in which the structure fits better, and what it gains on held-out rows.

    - ``arrow``: the features that explain the others best come first, each chosen given those before it.
    - ``heisenberg``: such features come last; those that all others together explain best come first.
    - ``block``: features are merged into blocks, the most correlated first.
    - ``toeplitz``: along the Fiedler vector of the squared correlations, which puts correlated features side by side.
    - ``dense``, ``triangular``, ``diagonal`` and ``lowrank`` do not depend on the order.

    Args:
        X: the data, complete.
        structure, form: as in :class:`~gnomon.covariance.StructuredCovariance`.
        shrinkage: of the fits that are compared, a number from 0 to 1.
        cv, random_state: the folds that are held out.
    """
    shrinkage = check_share("shrinkage", shrinkage)
    reader = _Reader(cv, random_state)
    sample = reader._read(X, None)
    if not sample.complete:
        raise ValueError("X has missing values; pass rows or features that are complete")
    model = structure_model(structure, sample.k, form)
    group = model.group  # type: ignore[attr-defined]
    folds = reader._folds(sample)
    before, after = 0.0, 0.0
    for rows, held_out in folds.splits:
        part = sample.subset(rows)
        found = torch.from_numpy(_order(group, form, part).copy())
        weight = len(held_out) / len(sample.rows)
        before += weight * _held_out(folds, model, part, held_out, torch.arange(sample.k), shrinkage)
        after += weight * _held_out(folds, model, part, held_out, found, shrinkage)
    order = _order(group, form, sample)
    names = getattr(reader, "feature_names_in_", np.arange(sample.k))
    return FeatureOrder(order, [str(name) for name in names[order]], model.name, before, after)


def _held_out(
    folds: Folds, model: Any, part: Sample, held_out: torch.Tensor, order: torch.Tensor, shrinkage: float
) -> float:
    ordered = Sample(part.rows[:, order], part.weights, part.centered)
    gaussian = fit(ordered, model, shrinkage, "diagonal")
    return float(log_prob(gaussian, folds.sample.rows[held_out][:, order]).mean())


def _order(group: Group, form: Form, sample: Sample) -> Array:
    covariance = sample.matrix.numpy()
    scale = np.sqrt(covariance.diagonal())
    correlations = (1 - RIDGE) * covariance / np.outer(scale, scale) + RIDGE * np.eye(sample.k)
    if isinstance(group, (Dense, Triangular, Diagonal, LowRank)):
        return np.arange(sample.k)
    if isinstance(group, BlockDiagonal):
        return _in_blocks(correlations, group.block)
    if isinstance(group, Toeplitz):
        return _side_by_side(correlations)
    if isinstance(group, Arrow):
        if form == "covariance":
            return _with_first(_drivers(correlations, group.rank), sample.k)
        return _with_first(_driven(correlations, [], group.rank), sample.k)
    if isinstance(group, Heisenberg) and form == "covariance":
        tail = _drivers(correlations, group.tail)
        head = _driven(correlations, tail, group.head)
        return np.append(_with_first(head, sample.k, without=tail), tail)
    raise ValueError(f"there is no rule to order features for {group} in {form} form; order them by hand")


def _with_first(first: list[int], k: int, without: list[int] | None = None) -> Array:
    rest = [i for i in range(k) if i not in {*first, *(without or ())}]
    return np.array([*first, *rest])


def _drivers(correlations: Array, count: int) -> list[int]:
    """Return features given which the others vary least, each chosen given those before it."""
    left = correlations.copy()
    chosen: list[int] = []
    for _ in range(count):
        variances = left.diagonal().copy()
        variances[chosen] = 1.0
        after = variances[:, None] - left**2 / variances  # of i, given j as well
        np.fill_diagonal(after, variances)
        after[chosen] = 1.0
        total = np.log(np.maximum(after, 1e-12)).sum(0)
        total[chosen] = np.inf
        best = int(total.argmin())
        chosen.append(best)
        left = left - np.outer(left[best], left[best]) / left[best, best]
        left[best], left[:, best] = 0.0, 0.0
    return chosen


def _driven(correlations: Array, drivers: list[int], count: int) -> list[int]:
    """Return the features that all others explain best, beyond what the drivers do."""
    given_all = 1 / np.linalg.inv(correlations).diagonal()
    explained = correlations.diagonal().copy()
    if drivers:
        among = correlations[np.ix_(drivers, drivers)]
        explained -= (correlations[:, drivers] * np.linalg.solve(among, correlations[drivers]).T).sum(1)
    gain = np.log(np.maximum(explained, 1e-12)) - np.log(given_all)
    gain[drivers] = -np.inf
    return [int(i) for i in np.argsort(-gain)[:count]]


def _side_by_side(correlations: Array) -> Array:
    """Return the features along the Fiedler vector of the squared correlations."""
    if len(correlations) == 1:  # a graph of one vertex has no such vector
        return np.arange(1)
    weights = correlations**2
    np.fill_diagonal(weights, 0)
    laplacian = np.diag(weights.sum(1)) - weights
    order = np.argsort(np.linalg.eigh(laplacian)[1][:, 1], kind="stable")
    return order if order[0] <= order[-1] else order[::-1].copy()


def _in_blocks(correlations: Array, size: int) -> Array:
    """Return an order of the features in which blocks of one size hold correlated ones.

    Features are merged into clusters of at most ``size`` by average squared correlation, which are then packed into
    blocks.
    """
    k = len(correlations)
    clusters = [[i] for i in range(k)]
    nearness = correlations**2
    np.fill_diagonal(nearness, -1)
    counts = np.ones(k)
    while True:
        allowed = np.where(counts[:, None] + counts <= size, nearness, -1)
        np.fill_diagonal(allowed, -1)
        i, j = np.unravel_index(allowed.argmax(), allowed.shape)
        if allowed[i, j] < 0:
            break
        merged = (counts[i] * nearness[i] + counts[j] * nearness[j]) / (counts[i] + counts[j])
        nearness[i], nearness[:, i] = merged, merged
        nearness[j], nearness[:, j] = -1, -1
        counts[i] += counts[j]
        counts[j] = np.inf
        clusters[i] += clusters[j]
        clusters[j] = []
    return _packed([sorted(cluster) for cluster in clusters if cluster], k, size)


def _packed(clusters: list[list[int]], k: int, size: int) -> Array:
    """Arrange clusters in blocks of a size, the last one smaller; divide those that fit in no block."""
    room = [size] * (k // size) + ([k % size] if k % size else [])
    blocks: list[list[int]] = [[] for _ in room]
    for cluster in sorted(clusters, key=len, reverse=True):
        fitting = [b for b, block in enumerate(blocks) if len(block) + len(cluster) <= room[b]]
        if fitting:
            blocks[fitting[0]] += cluster
            continue
        for feature in cluster:
            next(block for b, block in enumerate(blocks) if len(block) < room[b]).append(feature)
    return np.array([feature for block in blocks for feature in block])
