"""Gaussian graphical models on a given graph."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..groups import Dense
from ..groups.moments import Moments, SingularMomentsError
from ..manifolds import Gaussian
from .base import GaussianEstimator
from .model import Model, gaussian
from .operator import StructuredMatrix
from .selection import Trial

Array = NDArray[Any]

SWEEPS = 2000
ENOUGH = 1e-10
"""A sweep over the features that changes no covariance by more than this, in units of the variances, is the last."""


class GraphicalModel(GaussianEstimator):
    """A Gaussian whose precision is zero wherever a graph has no edge: features without an edge between them are
    independent given all others.

    It maximizes ``-1/2 (log det Sigma + tr(Sigma^-1 S))`` over these precisions (Dempster's covariance selection),
    where ``S = (1 - shrinkage) S_n + shrinkage T`` as in :class:`~gnomon.covariance.StructuredCovariance`. At the
    maximum Sigma equals S on the edges and on the diagonal. For a chordal graph (a chain, a tree, bands, overlapping
    cliques) that is a formula; for others each feature is regressed on its neighbours in turn until nothing changes.

    Args:
        graph: ``"chain"`` (each feature and the next one), ``"chain:m"`` (the next m), a symmetric matrix that is not
            zero where there are edges (an array or sparse), pairs of indices or of feature names, or a graph of
            networkx over these.
        shrinkage, target, assume_centered, cv, random_state: as in
            :class:`~gnomon.covariance.StructuredCovariance`.

    Attributes:
        graph_: the edges, as a symmetric boolean matrix.

    The other attributes are those of :class:`~gnomon.covariance.base.GaussianEstimator`.
    """

    def __init__(
        self,
        graph: Any = "chain",
        *,
        shrinkage: float | str = "cv",
        target: str = "auto",
        assume_centered: bool = False,
        cv: Any = 5,
        random_state: Any = 0,
    ) -> None:
        self.graph = graph
        self.shrinkage = shrinkage
        self.target = target
        self.assume_centered = assume_centered
        self.cv = cv
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> GraphicalModel:
        """Fit to the rows of ``X``, in which NaN is a missing value; ``y`` is ignored."""
        fixed = self._fixed_shrinkage()
        sample = self._read(X, sample_weight)
        trial = self._choose(self._folds(sample) if fixed is None else None, self._family(sample.k))
        self._keep(sample, trial)
        self._describe(trial)
        return self

    def _family(self, k: int) -> Model:
        names = getattr(self, "feature_names_in_", None)
        return GraphModel(as_graph(self.graph, k, None if names is None else list(names)))

    def _describe(self, trial: Trial) -> None:
        assert isinstance(trial.model, GraphModel)
        self.graph_ = trial.model.graph

    @property
    def precision_(self) -> StructuredMatrix:
        """With exact zeros where the graph has no edge."""
        matrix = super().precision_
        exact = matrix.to_dense()
        exact[~(self.graph_ | np.eye(len(exact), dtype=bool))] = 0
        return StructuredMatrix(self.gaussian_, precision=True, exact=exact)


@dataclass(frozen=True)
class GraphModel:
    """Gaussians whose precision has the zeros of a graph."""

    graph: Array
    name: str = "graph"

    def fit(self, moments: Moments, mean: Tensor, near: Gaussian | None = None) -> Gaussian:
        precision = likeliest_precision(moments.dense().numpy(), self.graph)
        root, info = torch.linalg.cholesky_ex(torch.from_numpy(precision))
        if bool(info) or not bool(root.isfinite().all()):
            raise SingularMomentsError("the likelihood of this graph has no maximum: there are too few samples")
        return gaussian(Dense(len(precision)), "precision", (root,), mean)


# ---------------------------------------------------------------------- the graph
def as_graph(graph: Any, k: int, names: Sequence[str] | None = None) -> Array:
    """Return the edges between k features as a symmetric boolean matrix without a diagonal."""
    if isinstance(graph, str):
        kind, _, width = graph.partition(":")
        if kind != "chain" or not (graph == "chain" or width.isdigit()):
            raise ValueError(f"graph must be 'chain', 'chain:m', a matrix or pairs of features, got {graph!r}")
        distance = np.abs(np.subtract.outer(np.arange(k), np.arange(k)))
        return (distance > 0) & (distance <= int(width or 1))
    if hasattr(graph, "toarray"):
        graph = graph.toarray()
    if hasattr(graph, "edges"):
        graph = list(graph.edges)
    if isinstance(graph, Set):
        graph = sorted(graph, key=str)
    shape = np.shape(graph) if not hasattr(graph, "__array__") else np.asarray(graph).shape
    if shape == (k, k):
        matrix = np.asarray(graph) != 0
        if not (matrix == matrix.T).all():
            raise ValueError("graph must be a symmetric matrix; pass graph | graph.T if edges have no direction")
        return matrix & ~np.eye(k, dtype=bool)
    if (len(shape) == 2 and shape[1] == 2) or shape == (0,):
        return _from_edges(graph, k, names)
    given = f"has shape {shape}" if shape else f"is {graph!r}"
    raise ValueError(f"graph {given}; give a symmetric matrix of shape {(k, k)}, or pairs of features")


def _from_edges(edges: Any, k: int, names: Sequence[str] | None) -> Array:
    places = {name: i for i, name in enumerate(names or ())}
    result = np.zeros((k, k), dtype=bool)
    for edge in edges:
        i, j = (places.get(end, end) for end in edge)
        if not all(isinstance(end, (int, np.integer)) and 0 <= end < k for end in (i, j)) or i == j:
            raise ValueError(f"graph has the edge {tuple(edge)!r}, but edges join two of {k} features by index or name")
        result[i, j] = result[j, i] = True
    return result


def elimination(graph: Array) -> list[tuple[int, Array]] | None:
    """Return each feature with its neighbours among those before it, if these always are neighbours of each other.

    The order is that of maximum cardinality search, which finds such an order if and only if the graph is chordal.
    """
    k = len(graph)
    known = np.zeros(k, dtype=bool)
    counts = np.zeros(k, dtype=int)
    result = []
    for _ in range(k):
        feature = int(np.where(known, -1, counts).argmax())
        neighbours = np.flatnonzero(graph[feature] & known)
        among = graph[np.ix_(neighbours, neighbours)]
        if among.sum() != len(neighbours) * (len(neighbours) - 1):
            return None
        result.append((feature, neighbours))
        known[feature] = True
        counts += graph[feature]
    return result


# ---------------------------------------------------------------------- maximum likelihood
def likeliest_precision(moments: Array, graph: Array) -> Array:
    """Return the precision with the zeros of the graph that minimizes ``tr(Theta S) - log det Theta``."""
    order = elimination(graph)
    try:
        if order is not None:
            return _by_elimination(moments, order)
        return _by_regressions(moments, graph)
    except np.linalg.LinAlgError:
        raise SingularMomentsError("some neighbours in the graph have singular moments: too few samples") from None


def _by_elimination(moments: Array, order: list[tuple[int, Array]]) -> Array:
    """Return ``Theta = sum_i u_i u_i^T / v_i`` with the residuals of regressions.

    ``u_i`` is feature i less its regression on neighbours before it, and ``v_i`` is its variance.
    """
    precision = np.zeros_like(moments)
    for feature, before in order:
        slopes = np.linalg.solve(moments[np.ix_(before, before)], moments[before, feature])
        variance = moments[feature, feature] - slopes @ moments[before, feature]
        if not variance > 1e-14 * moments[feature, feature]:
            raise np.linalg.LinAlgError
        where, vector = np.append(before, feature), np.append(-slopes, 1.0)
        precision[np.ix_(where, where)] += np.outer(vector, vector) / variance
    return precision


def _by_regressions(moments: Array, graph: Array) -> Array:
    """Regress each feature in turn on its neighbours, with the covariances as they are at present.

    (Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, algorithm 17.1.)
    """
    covariance = moments.copy()
    units = np.sqrt(np.outer(moments.diagonal(), moments.diagonal()))
    neighbours = [np.flatnonzero(row) for row in graph]
    slopes = [np.zeros(len(near)) for near in neighbours]
    for _ in range(SWEEPS):
        change = 0.0
        for feature, near in enumerate(neighbours):
            slopes[feature] = np.linalg.solve(covariance[np.ix_(near, near)], moments[near, feature])
            column = covariance[:, near] @ slopes[feature]
            column[feature] = moments[feature, feature]
            change = max(change, float((np.abs(column - covariance[feature]) / units[feature]).max()))
            covariance[feature] = covariance[:, feature] = column
        if change < ENOUGH:
            break
    precision = np.zeros_like(moments)
    for feature, near in enumerate(neighbours):
        inverse = 1 / (moments[feature, feature] - covariance[near, feature] @ slopes[feature])
        precision[feature, feature] = inverse
        precision[near, feature] = -slopes[feature] * inverse
    return (precision + precision.T) / 2
