"""The covariance estimators as estimators of scikit-learn."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from sklearn.base import clone
from sklearn.covariance import EmpiricalCovariance, ShrunkCovariance
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from gnomon import groups as g
from gnomon.covariance import FactorAnalysis, GraphicalModel, StructuredCovariance
from support.repository import ROOT

FORMS = ("covariance", "precision")
STRUCTURES = ["dense", "triangular", "diagonal", "block:4", "arrow:2", "lowrank:2", "heisenberg:1,2", "toeplitz"]


def rows(n=80, k=6, seed=0):
    rng = np.random.RandomState(seed)
    return rng.standard_normal((n, k)) @ (np.eye(k) + 0.4 * rng.standard_normal((k, k))) + rng.standard_normal(k)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:features .* of X are constant")
@parametrize_with_checks(
    [
        StructuredCovariance("arrow", shrinkage=0.1),
        StructuredCovariance(cv=2),
        FactorAnalysis(),
        GraphicalModel(cv=2),
    ]
)
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_methods_agree_with_dense_matrices(structure, form):
    X = rows()
    model = StructuredCovariance(structure, form=form, shrinkage=0.2).fit(X)
    sigma = np.asarray(model.covariance_)
    dense = torch.distributions.MultivariateNormal(torch.from_numpy(model.location_), torch.from_numpy(sigma))
    np.testing.assert_allclose(model.score_samples(X), dense.log_prob(torch.from_numpy(X)))
    assert model.score(X) == pytest.approx(model.score_samples(X).mean())
    deviations = X - model.location_
    np.testing.assert_allclose(
        model.mahalanobis(X), np.einsum("ni,ij,nj->n", deviations, np.linalg.inv(sigma), deviations)
    )
    np.testing.assert_allclose(model.location_, X.mean(0))
    reference = EmpiricalCovariance().fit(X)
    reference.covariance_ = sigma
    other = np.cov(X.T)
    for norm in ("frobenius", "spectral"):
        for scaling in (True, False):
            for squared in (True, False):
                expected = reference.error_norm(other, norm=norm, scaling=scaling, squared=squared)
                assert model.error_norm(other, norm, scaling, squared) == pytest.approx(expected)
    draws = model.sample(40_000, random_state=0)
    scale = np.sqrt(np.outer(sigma.diagonal(), sigma.diagonal()))
    np.testing.assert_allclose((np.cov(draws.T) - sigma) / scale, 0, atol=0.05)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["dense", "arrow:2", "lowrank:2", "toeplitz", "heisenberg:1,2", "block:2"])
def test_matrices_are_operators(structure, form):
    model = StructuredCovariance(structure, form=form, shrinkage=0.2).fit(rows())
    x = np.random.RandomState(1).standard_normal((6, 3))[::-1]
    for matrix, inverse in ((model.covariance_, model.precision_), (model.precision_, model.covariance_)):
        dense = matrix.to_dense()
        np.testing.assert_allclose(matrix @ x, dense @ x)
        np.testing.assert_allclose(matrix @ x[:, 0], dense @ x[:, 0])
        np.testing.assert_allclose(matrix.T @ x, dense @ x)
        np.testing.assert_allclose(matrix.solve(x), np.linalg.solve(dense, x))
        np.testing.assert_allclose(matrix.solve(x[:, 0]), np.linalg.solve(dense, x[:, 0]))
        np.testing.assert_allclose(matrix.diagonal(), dense.diagonal())
        np.testing.assert_allclose(np.asarray(inverse), np.linalg.inv(dense), atol=1e-12)
        assert matrix.logdet() == pytest.approx(np.linalg.slogdet(dense)[1])
        np.testing.assert_allclose(eigsh(matrix, 2)[0], np.linalg.eigvalsh(dense)[-2:])
        assert matrix.shape == (6, 6)
        assert "numpy.asarray(.) makes it dense" in repr(matrix)
    with pytest.raises(ValueError, match=r"x has shape \(5,\), expected \(6,\) or \(6, n\)"):
        model.covariance_.solve(np.ones(5))


@pytest.mark.parametrize("form", FORMS)
def test_a_large_diagonal_costs_what_the_structure_costs(form):
    X = np.random.RandomState(0).standard_normal((10, 50_000)).astype(np.float32)
    model = StructuredCovariance("diagonal", form=form, shrinkage=0.1).fit(X)
    np.testing.assert_allclose(model.covariance_.diagonal() * model.precision_.diagonal(), np.ones(50_000))
    np.testing.assert_allclose(
        FactorAnalysis(1).fit(X).covariance_.diagonal().mean(), X.var(0, dtype=np.float64).mean(), rtol=0.1
    )


def test_dense_is_the_shrunk_covariance_of_scikit_learn():
    X = rows()
    ours = StructuredCovariance("dense", shrinkage=0.3, target="identity").fit(X)
    theirs = ShrunkCovariance(shrinkage=0.3).fit(X)
    np.testing.assert_allclose(np.asarray(ours.covariance_), theirs.covariance_)
    assert ours.score(X) == pytest.approx(theirs.score(X))
    centred = StructuredCovariance("dense", shrinkage=0.0, assume_centered=True).fit(X)
    np.testing.assert_allclose(np.asarray(centred.covariance_), X.T @ X / len(X))


@pytest.mark.parametrize(
    "estimator",
    [
        StructuredCovariance("arrow:2", shrinkage=0.1),
        StructuredCovariance("toeplitz", form="precision", shrinkage=0.0),
        FactorAnalysis(2),
        GraphicalModel(shrinkage=0.1),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_weights_count_as_repetitions(estimator):
    X, counts = rows(n=30), np.random.RandomState(3).randint(0, 4, 30)
    weighted = clone(estimator).set_params(target="identity").fit(X, sample_weight=2.5 * counts)
    repeated = clone(estimator).set_params(target="identity").fit(np.repeat(X, counts, axis=0))
    np.testing.assert_allclose(weighted.location_, repeated.location_)
    np.testing.assert_allclose(np.asarray(weighted.covariance_), np.asarray(repeated.covariance_), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "estimator",
    [
        StructuredCovariance("arrow", shrinkage=0.1),
        StructuredCovariance("toeplitz", shrinkage=0.1, target="identity", form="precision"),
        StructuredCovariance("dense", shrinkage=0.2, assume_centered=True),
        FactorAnalysis(2),
        GraphicalModel(shrinkage=0.0),
    ],
)
def test_rows_that_come_in_parts_are_fitted_as_all_at_once(estimator):
    X, weights = rows(90) + 1e3, np.random.RandomState(1).uniform(size=90)
    whole, parts = clone(estimator).fit(X, sample_weight=weights), clone(estimator)
    for _ in range(2):  # fit forgets what was there before
        parts.fit(rows(20, seed=3))
        for part in (slice(0, 30), slice(30, 80), slice(80, 90)):
            parts.partial_fit(X[part], sample_weight=weights[part])
        np.testing.assert_allclose(parts.location_, whole.location_)
        np.testing.assert_allclose(np.asarray(parts.covariance_), np.asarray(whole.covariance_), rtol=1e-5, atol=1e-6)
        # The score is without weights, and so not at its maximum: it is as near as the covariances are.
        assert parts.score(X) == pytest.approx(whole.score(X), abs=1e-7)


def test_parts_need_all_that_cross_validation_would_find():
    for estimator in (StructuredCovariance(), StructuredCovariance("dense"), GraphicalModel()):
        assert not hasattr(estimator, "partial_fit")
    with pytest.raises(AttributeError) as error:
        StructuredCovariance().partial_fit(rows())
    assert "give the shrinkage and the structure" in str(error.value.__cause__)
    model = StructuredCovariance("dense", shrinkage=0.0).partial_fit(rows())
    fitted = model.covariance_.to_dense()
    with pytest.raises(ValueError, match="missing values, which partial_fit cannot sum over; pass all rows to fit"):
        model.partial_fit(np.full((2, 6), np.nan))
    np.testing.assert_array_equal(model.covariance_.to_dense(), fitted)


def test_parts_that_say_too_little_are_named():
    X = rows(20)
    model = StructuredCovariance("arrow:1", shrinkage=0.1)
    with pytest.warns(UserWarning, match="partial_fit has seen one row only, from which no variance can be told"):
        model.partial_fit(X, sample_weight=np.eye(20)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.partial_fit(X[1:])
    whole = clone(model).fit(X)
    np.testing.assert_allclose(np.asarray(model.covariance_), np.asarray(whole.covariance_), rtol=1e-8, atol=1e-10)
    X[:, 2] = 3
    with pytest.warns(UserWarning, match="features 2 of X are constant") as caught:
        clone(model).partial_fit(X)
    assert caught[0].filename == __file__


def test_cross_validation_prefers_what_is_true():
    rng = np.random.RandomState(0)
    hub = rng.standard_normal((60, 1))
    X = np.hstack([hub, hub @ rng.standard_normal((1, 11)) + 0.5 * rng.standard_normal((60, 11))])
    model = StructuredCovariance(cv=3).fit(X)
    assert model.structure_name_.startswith(("arrow", "lowrank"))
    names = [name for name, *_ in model.cv_results_]
    assert {"diagonal", "dense", "toeplitz", "block:2", "arrow:1", "lowrank:1"} <= set(names)
    scores = [score for *_, score in model.cv_results_]
    assert scores == sorted(scores, reverse=True)
    assert names[0] == model.structure_name_
    assert model.shrinkage_ == model.cv_results_[0][1]


def test_cross_validation_of_the_shrinkage_is_not_worse_than_its_neighbours():
    X, held_out = np.split(rows(n=425, k=15), [25])
    best = StructuredCovariance("dense").fit(X)
    assert 0 < best.shrinkage_ < 1
    fixed = [StructuredCovariance("dense", shrinkage=s).fit(X).score(held_out) for s in (0.01, 0.99)]
    assert best.score(held_out) > max(fixed)
    assert clone(best).fit(X).shrinkage_ == best.shrinkage_


def test_grid_search_shows_readable_structures():
    search = GridSearchCV(
        StructuredCovariance(shrinkage=0.1), {"structure": ["diagonal", "arrow:2", "lowrank:1"]}, cv=3
    ).fit(rows())
    assert list(search.cv_results_["param_structure"]) == ["diagonal", "arrow:2", "lowrank:1"]


@pytest.mark.parametrize("change", [lambda X: X[:, ::-1], lambda X: X[::2], np.asfortranarray, np.float32])
def test_arrays_of_any_stride(change):
    X = change(rows())
    plain = np.array(X, dtype=np.float64, order="C")
    model = StructuredCovariance("arrow:2", shrinkage=0.1).fit(X)
    again = StructuredCovariance("arrow:2", shrinkage=0.1).fit(plain)
    np.testing.assert_allclose(model.score_samples(X), again.score_samples(plain), rtol=1e-5)


def test_pickles():
    model = StructuredCovariance("lowrank:2", shrinkage=0.1).fit(rows())
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.score_samples(rows()), model.score_samples(rows()))


def test_many_features_need_no_square_matrix(monkeypatch):
    """The same results from rows as from a matrix of moments."""
    X = rows(n=10, k=12)
    structures = ["diagonal", "block:5", "arrow:2", "heisenberg:1,2", "lowrank:2"]
    dense = [StructuredCovariance(s, form=f, shrinkage=0.2).fit(X) for s in structures for f in FORMS]
    monkeypatch.setattr("gnomon.covariance.sample.LARGEST_DENSE", 5)
    monkeypatch.setattr("gnomon.covariance.model.LARGEST_DENSE", 5)
    by_rows = [StructuredCovariance(s, form=f, shrinkage=0.2).fit(X) for s in structures for f in FORMS]
    for one, other in zip(dense, by_rows, strict=True):
        assert other.score(X) == pytest.approx(one.score(X), abs=1e-4), one
        np.testing.assert_allclose(np.asarray(other.covariance_), np.asarray(one.covariance_), atol=0.02)
    with pytest.raises(ValueError, match=r"shrinkage must be 0 for Toeplitz\(12\) of more than 5 features"):
        StructuredCovariance("toeplitz", shrinkage=0.2).fit(X)


def test_needs_a_fit():
    for estimator in (StructuredCovariance(), FactorAnalysis(), GraphicalModel()):
        for method in (estimator.score, estimator.mahalanobis):
            with pytest.raises(NotFittedError):
                method(rows())
        assert not hasattr(estimator, "covariance_")


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (StructuredCovariance(form="both"), "form must be 'covariance' or 'precision', got 'both'"),
        (StructuredCovariance(shrinkage=1.5), r"shrinkage must be 'cv' or a number between 0 and 1, got 1\.5"),
        (StructuredCovariance(shrinkage="no"), "shrinkage must be 'cv' or a number between 0 and 1, got 'no'"),
        (StructuredCovariance(shrinkage=True), "shrinkage must be 'cv' or a number between 0 and 1, got True"),
        (StructuredCovariance("arrow", cv=1), "cv must be at least 2 folds, or a splitter of scikit-learn, got 1"),
        (GraphicalModel(3), r"graph is 3; give a symmetric matrix of shape \(6, 6\), or pairs of features"),
        (StructuredCovariance(target="mean"), "target must be 'auto', 'diagonal' or 'identity', got 'mean'"),
        (StructuredCovariance("sparse", shrinkage=0.1), "structure must be one of dense, .* got 'sparse'"),
        (StructuredCovariance(g.Arrow(5), shrinkage=0.1), r"structure must be a group of size 6, got Arrow\(5"),
        (FactorAnalysis(0), "n_components must be a positive integer, got 0"),
        (FactorAnalysis(6), "n_components=6 must be below the number of features, n_features=6"),
        (GraphicalModel("star"), "graph must be 'chain', 'chain:m', a matrix or pairs of features, got 'star'"),
        (GraphicalModel([(0, 9)]), r"graph has the edge \(0, 9\), but edges join two of 6 features"),
        (GraphicalModel(np.triu(np.ones((6, 6)))), "graph must be a symmetric matrix"),
        (GraphicalModel(np.ones((5, 5))), r"graph has shape \(5, 5\); give a symmetric matrix of shape \(6, 6\)"),
    ],
)
def test_errors_name_the_argument(estimator, message):
    with pytest.raises(ValueError, match=message):
        estimator.fit(rows())


def test_errors_of_methods_name_the_argument():
    model = StructuredCovariance("arrow", shrinkage=0.1).fit(rows())
    with pytest.raises(ValueError, match="n_samples must be a positive integer, got -1"):
        model.sample(-1)
    with pytest.raises(ValueError, match=r"comp_cov must have the shape of .* \(6, 6\), got \(3, 3\)"):
        model.error_norm(np.eye(3))
    for use in (lambda matrix: matrix - np.eye(6), lambda matrix: matrix[0, 0]):
        with pytest.raises(TypeError, match=r"numpy\.asarray\(\.\) makes it dense"):
            use(model.covariance_)


def test_data_that_determine_nothing():
    with pytest.raises(ValueError, match=r"are singular: there are too few samples .* shrinkage"):
        StructuredCovariance("dense", shrinkage=0.0).fit(rows(n=5))
    X = rows()
    X[:, 2] = 3.0
    with pytest.warns(UserWarning, match="features 2 of X are constant"):
        model = StructuredCovariance("arrow", shrinkage=0.1).fit(X)
    assert np.isfinite(model.score(X))
    X[:, 2] = np.nan
    with pytest.raises(ValueError, match="features 2 of X have no observed value; remove them"):
        StructuredCovariance("arrow", shrinkage=0.1).fit(X)
    with pytest.raises(ValueError, match="weights must contain at least one non-zero"):
        StructuredCovariance("arrow", shrinkage=0.1).fit(rows(), sample_weight=np.zeros(80))
    with pytest.raises(ValueError, match="sample_weight must be positive for two rows of X or more, got one"):
        StructuredCovariance("arrow", shrinkage=0.1).fit(rows(), sample_weight=np.eye(80)[3])


@pytest.mark.spawns
def test_is_loaded_when_asked_for_and_names_its_extra():
    def python(script):
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)

    lazy = "import sys, gnomon; assert 'sklearn' not in sys.modules; gnomon.covariance.FactorAnalysis"
    assert python(lazy).returncode == 0
    blocked = python("import sys; sys.modules['sklearn'] = None; import gnomon; gnomon.covariance")
    assert "pip install 'gnomon[mixture]'" in blocked.stderr.splitlines()[-1]
