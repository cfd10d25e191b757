"""The mixture as an estimator of scikit-learn."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import gnomon
from gnomon import groups as g
from gnomon.mixture import GaussianMixture
from support.marks import slow_where
from support.mixtures import FORMS, blobs, blocks, heisenberg


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    [
        GaussianMixture(n_components=2, random_state=0),
        GaussianMixture(random_state=0),
        GaussianMixture(form="precision", structure="diagonal", batch_size=20, random_state=0),
    ],
    expected_failed_checks=lambda estimator: (
        {"check_sample_weight_equivalence_on_dense_data": "k-means draws its centres by rows, as in scikit-learn"}
        if estimator.n_components > 1
        else {}
    ),
)
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


def test_needs_a_fit():
    model = GaussianMixture()
    X = np.zeros((3, 2))
    for method in (model.predict, model.predict_proba, model.score_samples, model.score, model.bic, model.aic):
        with pytest.raises(NotFittedError):
            method(X)
    with pytest.raises(NotFittedError):
        model.sample()
    assert not hasattr(model, "covariances_")
    assert not hasattr(model, "precisions_")


def test_methods_agree_with_each_other():
    X, _ = blobs()
    model = GaussianMixture(3, random_state=0).fit(X)
    dense = [
        torch.distributions.MultivariateNormal(torch.from_numpy(m), torch.from_numpy(c))
        for m, c in zip(model.means_, model.covariances_, strict=True)
    ]
    joint = torch.stack([q.log_prob(torch.from_numpy(X)) for q in dense], 1).numpy() + np.log(model.weights_)
    likelihood = np.logaddexp.reduce(joint, axis=1)
    np.testing.assert_allclose(model.score_samples(X), likelihood)
    np.testing.assert_allclose(model.predict_proba(X), np.exp(joint - likelihood[:, None]), atol=1e-12)
    np.testing.assert_array_equal(model.predict(X), joint.argmax(1))
    np.testing.assert_array_equal(clone(model).fit_predict(X), model.predict(X))
    np.testing.assert_allclose(model.precisions_ @ model.covariances_, np.eye(5) + np.zeros((3, 1, 1)), atol=1e-8)
    assert model.score(X) == pytest.approx(likelihood.mean())
    assert model.lower_bound_ == pytest.approx(model.score(X), abs=1e-3)
    assert model.lower_bound_ <= model.score(X)
    assert len(model.loss_curve_) == model.n_iter_ + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "dim"), [(g.Dense, 15), (g.Diagonal, 5), (g.Arrow, 9), (heisenberg, 14), (blocks, 7)]
)
def test_information_criteria_count_the_structure(structure, dim):
    X, _ = blobs()
    model = GaussianMixture(3, structure=structure, random_state=0).fit(X)
    count = 3 * (dim + 5) + 2
    assert model.n_parameters() == count
    total = model.score_samples(X).sum()
    assert model.aic(X) == pytest.approx(2 * count - 2 * total)
    assert model.bic(X) == pytest.approx(count * np.log(len(X)) - 2 * total)


@pytest.mark.parametrize("form", FORMS)
def test_samples_have_the_moments_of_the_mixture(form):
    X, _ = blobs(group=g.Arrow(5))
    model = GaussianMixture(3, structure=g.Arrow, form=form, random_state=0).fit(X)
    draws, labels = model.sample(60_000)
    assert draws.shape == (60_000, 5)
    np.testing.assert_allclose(np.bincount(labels) / len(labels), model.weights_, atol=0.01)
    for k in range(3):
        np.testing.assert_allclose(draws[labels == k].mean(0), model.means_[k], atol=0.1)
        scale = np.sqrt(np.diag(model.covariances_[k]))
        error = (np.cov(draws[labels == k].T) - model.covariances_[k]) / np.outer(scale, scale)
        assert np.abs(error).max() < 0.05
    np.testing.assert_array_equal(model.sample(5)[0], model.sample(5)[0])


@pytest.mark.parametrize("batch_size", slow_where([None, 100], lambda batch_size: batch_size is not None))
def test_is_deterministic_and_leaves_the_global_generators_alone(batch_size):
    X, _ = blobs()
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = (GaussianMixture(3, batch_size=batch_size, random_state=3).fit(X) for _ in range(2))
    first.sample(3)
    np.testing.assert_array_equal(first.covariances_, second.covariances_)
    np.testing.assert_array_equal(first.loss_curve_, second.loss_curve_)
    assert torch.equal(torch.get_rng_state(), torch_before)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


@pytest.mark.slow
def test_pickles_and_copies():
    X, _ = blobs()
    model = GaussianMixture(3, structure=heisenberg, random_state=0, warm_start=True).fit(X)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.score_samples(X), model.score_samples(X))
    assert repr(clone(model).get_params()) == repr(model.get_params())
    again.fit(X)  # the module can still be moved
    assert again.score(X) >= model.score(X) - 1e-6


@pytest.mark.slow
def test_grid_search_in_a_pipeline():
    X, _ = blobs(group=g.Arrow(5), n=200)
    pipeline = make_pipeline(StandardScaler(), GaussianMixture(random_state=0))
    grid = {"gaussianmixture__n_components": [1, 3], "gaussianmixture__structure": [g.Diagonal, g.Arrow]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(X)
    assert search.best_params_ == {"gaussianmixture__n_components": 3, "gaussianmixture__structure": g.Arrow}


def test_single_precision_data():
    X, _ = blobs()
    reference = GaussianMixture(3, random_state=0).fit(X)
    single = GaussianMixture(3, random_state=0).fit(X.astype(np.float32))
    assert single.covariances_.dtype == np.float64
    np.testing.assert_allclose(single.covariances_, reference.covariances_, rtol=1e-3, atol=1e-3)


def test_fits_where_gradients_are_turned_off():
    X, _ = blobs()
    with torch.no_grad():
        model = GaussianMixture(2, random_state=0).fit(X)
    assert model.converged_


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "n_components must be a positive integer, got 0"),
        ({"max_iter": 2.5}, r"max_iter must be a positive integer, got 2\.5"),
        ({"batch_size": -1}, "batch_size must be a positive integer, got -1"),
        ({"reg_covar": 0}, "reg_covar must be a positive number, got 0"),
        ({"tol": "small"}, "tol must be a positive number, got 'small'"),
        ({"tied": "yes"}, "tied must be True or False, got 'yes'"),
        ({"form": "other"}, "form must be 'covariance' or 'precision', got 'other'"),
        ({"structure": g.Arrow(4)}, r"structure must be a group of size 5, got Arrow\(4, rank=1\)"),
        ({"structure": lambda d: g.Arrow(d + 1)}, r"structure must be a group of size 5, got Arrow\(6, rank=1\) from"),
        ({"structure": "sparse"}, "structure must be one of dense, .* got 'sparse'"),
        ({"init_params": "zeros"}, r"init_params must be one of kmeans, k-means\+\+, random, .* got 'zeros'"),
        ({"means_init": np.zeros((2, 5))}, r"means_init must be of shape \(1, 5\), got shape \(2, 5\)"),
        ({"means_init": np.full((1, 5), np.nan)}, r"means_init must be finite, got array\(\[\[nan"),
        ({"means_init": "middle"}, r"means_init must be numbers of shape \(1, 5\), got 'middle'"),
        ({"weights_init": [0.5]}, "weights_init must be positive and sum to one"),
        ({"structure": lambda d: g.Kronecker(g.Dense(5), g.Dense(1))}, "needs a matrix algebra"),
        ({"n_components": 500}, "n_samples=400, fewer than n_components=500"),
    ],
)
def test_errors_name_the_argument(options, message):
    X, _ = blobs()
    with pytest.raises(ValueError, match=message):
        GaussianMixture(**options).fit(X)


def test_progress_is_printed_when_asked_for(capsys):
    X, _ = blobs()
    GaussianMixture(2, random_state=0).fit(X)
    assert capsys.readouterr().out == ""
    model = GaussianMixture(2, random_state=0, verbose=2).fit(X)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == model.n_iter_ + 1
    assert lines[-1].startswith(f"converged after {model.n_iter_} iterations")
    GaussianMixture(2, random_state=0, verbose=1).fit(X)
    assert len(capsys.readouterr().out.splitlines()) == 1 + -(-model.n_iter_ // 10)


@pytest.mark.spawns
def test_is_loaded_when_asked_for_and_names_its_extra():
    def python(script):
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    lazy = "import sys, gnomon; assert 'sklearn' not in sys.modules; gnomon.mixture.GaussianMixture"
    assert python(lazy).returncode == 0
    blocked = python("import sys; sys.modules['sklearn'] = None; import gnomon; gnomon.mixture")
    assert blocked.returncode == 1
    assert "pip install 'gnomon[mixture]'" in blocked.stderr.splitlines()[-1]
    with pytest.raises(AttributeError, match="no attribute 'mixtures'"):
        gnomon.mixtures  # noqa: B018
