"""Structures, data and fits of Gaussian mixtures."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from gnomon import groups as g

heisenberg = partial(g.Heisenberg, head=1, tail=2)
blocks = partial(g.BlockDiagonal, block=2)
toeplitz_after_dense = pytest.param(lambda d: g.BlockTriangular((g.Dense(2), g.Toeplitz(d - 2))), id="BlockTriangular")
STRUCTURES = [g.Dense, g.Triangular, g.Diagonal, g.Arrow, heisenberg, blocks, g.Toeplitz, toeplitz_after_dense]
FORMS = ("covariance", "precision")


def blobs(n=400, d=5, k=3, seed=0, group=None, spread=2.0):
    """Rows of a mixture with random factors in a group, and where they come from."""
    rng = np.random.RandomState(seed)
    group = group or g.Dense(d)
    dense = torch.from_numpy(rng.standard_normal((k, d, d)) + 1.5 * np.eye(d))
    factors = group.to_dense(group.from_dense(dense)).numpy()
    labels = rng.randint(k, size=n)
    means = spread * rng.standard_normal((k, d))
    return means[labels] + np.einsum("nij,nj->ni", factors[labels], rng.standard_normal((n, d))), labels


def quiet_fit(estimator, X):
    """A fit that is stopped early, or that collapses, on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(X)
