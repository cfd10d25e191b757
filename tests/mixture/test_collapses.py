"""Components that collapse are finite and reported."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from gnomon import groups as g
from gnomon.mixture import GaussianMixture
from support.marks import slow_where
from support.mixtures import blobs, quiet_fit


def normal_rows(n=200):
    return np.random.RandomState(0).standard_normal((n, 4))


DEGENERATE = {
    "duplicates": np.concatenate([normal_rows(), np.repeat(normal_rows()[:1] + 5, 50, 0)]),
    "constant feature": np.column_stack([normal_rows(), np.full(200, 3.0)]),
    "copied feature": np.column_stack([normal_rows(), normal_rows()[:, 0]]),
    "no variance": np.ones((30, 4)),
    "few samples": normal_rows(6),
    "a sample each": normal_rows(3),
    "far outlier": np.concatenate([normal_rows(), [[1e6] * 4]]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Number of distinct clusters")  # k-means says so too
@pytest.mark.parametrize(
    "options",
    slow_where(
        [{}, {"form": "precision"}, {"structure": g.Arrow}, {"batch_size": 32}],
        bool,
    ),
)
@pytest.mark.parametrize("name", DEGENERATE)
def test_collapses_are_finite_and_reported(name, options):
    X = DEGENERATE[name]
    with pytest.warns(ConvergenceWarning, match="components collapsed. component"):
        model = GaussianMixture(3, random_state=0, **options).fit(X)
    assert len(model.collapsed_)
    values = (model.means_, model.covariances_, model.precisions_, model.score_samples(X), model.sample(10)[0])
    assert all(np.isfinite(value).all() for value in (*values, model.weights_, model.loss_curve_))
    assert (model.covariances_.diagonal(axis1=1, axis2=2) > 0).all()


def test_the_report_says_which_component_and_why():
    with pytest.warns(ConvergenceWarning) as caught:
        GaussianMixture(2, random_state=0).fit(DEGENERATE["constant feature"])
    message = str(caught[0].message)
    assert "2 of 2 components collapsed" in message
    assert "along feature 4, which is constant in the data" in message
    assert "reg_covar=1e-06" in message
    assert caught[0].filename == __file__


def test_a_start_without_collapse_is_preferred(monkeypatch):
    """The collapsed fit has the higher likelihood, but one that only reg_covar bounds means little."""
    X, _ = blobs(n=100)
    collapses = iter([{0: 1}, {}, {1: None}])
    monkeypatch.setattr("gnomon.mixture.estimator.collapses", lambda *_: next(collapses))
    model = quiet_fit(GaussianMixture(3, n_init=3, max_iter=5, random_state=0), X)
    assert len(model.collapsed_) == 0


def test_ordinary_data_raise_no_warning():
    X, _ = blobs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = GaussianMixture(3, random_state=0).fit(X)
    assert model.converged_
    assert len(model.collapsed_) == 0
