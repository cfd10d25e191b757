"""Starts, weights, tied covariances, names of structures, arrays of any stride."""

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SklearnMixture
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import StandardScaler

from gnomon import groups as g
from gnomon.covariance import StructuredCovariance
from gnomon.mixture import GaussianMixture
from support.mixtures import FORMS, blobs, quiet_fit


@pytest.mark.parametrize(
    "structure", ["dense", "diagonal", "block:2", "arrow:2", "lowrank:1", "heisenberg", "toeplitz"]
)
def test_structures_by_name(structure):
    X, _ = blobs()
    by_name = GaussianMixture(2, structure=structure, random_state=0).fit(X)
    by_function = GaussianMixture(2, structure=g.as_factory(structure), random_state=0).fit(X)
    by_group = GaussianMixture(2, structure=g.as_structure(structure, 5), random_state=0).fit(X)
    for other in (by_function, by_group):
        np.testing.assert_array_equal(by_name.covariances_, other.covariances_)
    assert by_name.components_.structure == g.as_structure(structure, 5)


def test_grid_search_tables_are_readable():
    X, _ = blobs(n=150)
    search = GridSearchCV(GaussianMixture(2, random_state=0), {"structure": ["diagonal", "lowrank:1"]}, cv=2).fit(X)
    assert list(search.cv_results_["param_structure"]) == ["diagonal", "lowrank:1"]


@pytest.mark.parametrize("form", FORMS)
def test_mixtures_of_factor_analysers(form):
    """Where the data have factors, they beat full covariances on held-out rows."""
    rng = np.random.RandomState(0)
    loadings, means = 1.5 * rng.standard_normal((2, 10, 2)), 3 * rng.standard_normal((2, 10))
    labels = rng.randint(2, size=800)
    X = means[labels] + np.einsum("nij,nj->ni", loadings[labels], rng.standard_normal((800, 2)))
    X += 0.5 * rng.standard_normal(X.shape)
    train, test = X[:160], X[160:]
    model = GaussianMixture(2, structure="lowrank:2", form=form, random_state=0).fit(train)
    assert model.converged_
    group, factor, _ = model.components_._parts()
    noise = group.covariance_factors(factor)[1].detach().square().numpy()
    square = model.covariances_ if form == "covariance" else model.precisions_
    for matrix, diagonal in zip(square, noise, strict=True):
        assert np.linalg.matrix_rank(matrix - np.diag(diagonal), tol=1e-6 * np.abs(matrix).max()) == 2
    assert (np.diff(model.loss_curve_) <= 1e-8).all()
    if form == "covariance":
        assert model.score(test) > SklearnMixture(2, random_state=0).fit(train).score(test) + 0.3
        assert model.n_parameters() == 2 * (10 * 3 - 1 + 10) + 1


@pytest.mark.parametrize("structure", ["dense", "arrow:2", "lowrank:1"])
def test_weights_count_as_repetitions(structure):
    X, _ = blobs(n=120, spread=3.0)
    counts = np.random.RandomState(1).randint(0, 4, len(X))
    start = X[[5, 40, 90]]
    options = {"structure": structure, "means_init": start, "tol": 1e-8}
    weighted = GaussianMixture(3, **options).fit(X, sample_weight=0.7 * counts)
    repeated = GaussianMixture(3, **options).fit(np.repeat(X, counts, axis=0))
    np.testing.assert_allclose(weighted.means_, repeated.means_, atol=1e-2)
    assert weighted.lower_bound_ == pytest.approx(repeated.lower_bound_, abs=1e-5)
    assert GaussianMixture(3, random_state=0, **options).fit_predict(X, sample_weight=counts).shape == (120,)
    batches = quiet_fit(GaussianMixture(3, structure=structure, batch_size=40, means_init=start, max_iter=3), X)
    assert np.isfinite(batches.score(X))


@pytest.mark.parametrize("init_params", ["kmeans", "k-means++", "random", "random_from_data"])
def test_ways_to_start(init_params):
    X, _ = blobs(spread=4.0)
    first, second = (GaussianMixture(3, init_params=init_params, random_state=1).fit(X) for _ in range(2))
    np.testing.assert_array_equal(first.means_, second.means_)
    assert first.converged_
    best = GaussianMixture(3, random_state=0).fit(X).score(X)
    assert first.score(X) > best - 1.0


def test_given_starts_are_starts():
    X, labels = blobs(spread=4.0)
    means = np.stack([X[labels == i].mean(0) for i in (2, 0, 1)])
    model = GaussianMixture(3, means_init=means, weights_init=[0.2, 0.3, 0.5]).fit(X)
    np.testing.assert_allclose(model.means_, means, atol=0.5)  # in the given order
    one = quiet_fit(GaussianMixture(3, means_init=means, max_iter=1), X)
    assert (
        one.loss_curve_[0] < quiet_fit(GaussianMixture(3, means_init=0 * means + X[:3], max_iter=1), X).loss_curve_[0]
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["dense", "arrow:2", "lowrank:1", "toeplitz", "heisenberg:1,1"])
def test_tied_covariances(structure, form):
    X = StandardScaler().fit_transform(blobs(n=200, spread=4.0)[0])  # as k-means sees them inside
    options = {"structure": structure, "form": form, "tied": True, "random_state": 0}
    model = GaussianMixture(3, tol=1e-7, max_iter=1000, **options).fit(X)
    np.testing.assert_allclose(model.covariances_[0], model.covariances_[2], rtol=1e-9)
    group = g.as_structure(structure, 5)
    assert model.n_parameters() == group.dim + 3 * 5 + 2
    assert (np.diff(model.loss_curve_) <= 1e-8).all()
    if structure == "dense":
        em = SklearnMixture(3, covariance_type="tied", tol=1e-9, max_iter=1000, random_state=0).fit(X)
        assert model.score(X) == pytest.approx(em.score(X), abs=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["dense", "arrow:2", "lowrank:1"])
def test_tied_covariances_by_mini_batches(structure, form):
    X = StandardScaler().fit_transform(blobs(n=1000, spread=4.0)[0])
    options = {"structure": structure, "form": form, "tied": True, "random_state": 0}
    batches = quiet_fit(GaussianMixture(3, batch_size=100, **options), X)
    np.testing.assert_allclose(batches.covariances_[0], batches.covariances_[2], rtol=1e-9)
    assert batches.score(X) > GaussianMixture(3, **options).fit(X).score(X) - 0.01


@pytest.mark.parametrize("change", [lambda X: X[:, ::-1], lambda X: X[::-1], lambda X: X[::2], np.asfortranarray])
def test_arrays_of_any_stride(change):
    X, _ = blobs()
    model = GaussianMixture(2, random_state=0).fit(change(X))
    plain = np.array(change(X), order="C")
    np.testing.assert_array_equal(model.predict(change(X)), model.predict(plain))
    assert model.score(change(X)) == model.score(plain)
    assert model.predict_proba(change(X)).shape == (len(plain), 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["dense", "arrow", "lowrank"])
def test_one_iteration_at_a_time_converges(structure, form):
    X, _ = blobs(n=150, spread=4.0)
    model = GaussianMixture(2, structure=structure, form=form, warm_start=True, max_iter=1, random_state=0)
    fits = 0
    while not quiet_fit(model, X).converged_:
        fits += 1
        assert fits < 200
    other, _ = blobs(n=150, spread=4.0, seed=5)
    assert not quiet_fit(model, other).converged_  # other data begin anew


def test_heisenberg_on_breast_cancer_converges():
    X = load_breast_cancer().data
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = GaussianMixture(2, structure="heisenberg:2,2", random_state=0).fit(X)
    assert model.converged_
    assert model.n_iter_ < 100


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("n_components", [2, 3])
def test_low_rank_precisions_converge_on_breast_cancer(rank, n_components):
    X = load_breast_cancer().data
    model = GaussianMixture(n_components, structure=f"lowrank:{rank}", form="precision", random_state=0).fit(X)
    assert model.converged_
    assert model.n_iter_ < 100
    assert (np.diff(model.loss_curve_) <= 1e-8).all()


@pytest.mark.parametrize("form", ["covariance", "precision"])
def test_toeplitz_mixtures_are_filters(form):
    """At the end each component is the likeliest filter for its shares of the rows."""
    rng = np.random.RandomState(0)
    X = np.concatenate([np.cumsum(rng.standard_normal((40, 5)), 1), 9 + rng.standard_normal((40, 5))])
    model = GaussianMixture(2, structure="toeplitz", form=form, random_state=0).fit(X)
    assert model.converged_
    shares = model.predict_proba(X)
    for share, covariance in zip(shares.T, model.covariances_, strict=True):
        single = StructuredCovariance("toeplitz", form=form, shrinkage=0.0).fit(X, sample_weight=share)
        np.testing.assert_allclose(np.asarray(single.covariance_), covariance, rtol=0.02, atol=0.02)
