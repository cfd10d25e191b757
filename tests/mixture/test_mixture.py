"""The mixture estimator: scikit-learn's conventions, EM as the reference, valid iterates, collapses."""

import os
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.mixture import GaussianMixture as SklearnMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import gnomon
from gnomon import groups as g
from gnomon.mixture import GaussianMixture, _Objective
from gnomon.testing import random_element
from support.repository import ROOT

MAGIC = Path(os.environ.get("GNOMON_DATA", "")) / "magic04.csv"
needs_magic = pytest.mark.skipif(not MAGIC.is_file(), reason="set GNOMON_DATA to a folder with magic04.csv")

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


def magic():
    rows = np.loadtxt(MAGIC, delimiter=",", skiprows=1, usecols=range(10))
    return StandardScaler().fit_transform(rows)


def quiet_fit(estimator, X):
    """A fit that is stopped early, or that collapses, on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(X)


# ---------------------------------------------------------------------- scikit-learn's conventions
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    [
        GaussianMixture(n_components=2, random_state=0),
        GaussianMixture(form="precision", structure=g.Diagonal, batch_size=20, random_state=0),
    ]
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


@pytest.mark.parametrize("batch_size", [None, 100])
def test_is_deterministic_and_leaves_the_global_generators_alone(batch_size):
    X, _ = blobs()
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = (GaussianMixture(3, batch_size=batch_size, random_state=3).fit(X) for _ in range(2))
    first.sample(3)
    np.testing.assert_array_equal(first.covariances_, second.covariances_)
    np.testing.assert_array_equal(first.loss_curve_, second.loss_curve_)
    assert torch.equal(torch.get_rng_state(), torch_before)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


def test_pickles_and_copies():
    X, _ = blobs()
    model = GaussianMixture(3, structure=heisenberg, random_state=0, warm_start=True).fit(X)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.score_samples(X), model.score_samples(X))
    assert repr(clone(model).get_params()) == repr(model.get_params())
    again.fit(X)  # the module can still be moved
    assert again.score(X) >= model.score(X) - 1e-6


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
        ({"form": "other"}, "form must be 'covariance' or 'precision', got 'other'"),
        ({"structure": g.Arrow(5)}, r"structure must be a callable .*Arrow\(5, rank=1\)"),
        ({"structure": lambda d: g.Arrow(d + 1)}, r"for 5 features .* gave Arrow\(6, rank=1\)"),
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


def test_is_loaded_when_asked_for_and_names_its_extra():
    def python(script):
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    lazy = "import sys, gnomon; assert 'sklearn' not in sys.modules; gnomon.mixture.GaussianMixture"
    assert python(lazy).returncode == 0
    blocked = python("import sys; sys.modules['sklearn.base'] = None; import gnomon; gnomon.mixture")
    assert blocked.returncode == 1
    assert "pip install 'gnomon[mixture]'" in blocked.stderr.splitlines()[-1]
    with pytest.raises(AttributeError, match="no attribute 'mixtures'"):
        gnomon.mixtures  # noqa: B018


# ---------------------------------------------------------------------- the objective
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_objective_and_its_gradient(structure, form, monkeypatch):
    """Against the formula with dense matrices, in several parts, and against differences along a random direction."""
    group, k = structure(4), 3
    z = torch.randn(50, 4, dtype=torch.float64)
    factor = group.to_dense(random_element(group, (k,)))
    square = factor @ factor.mT
    covariance = square if form == "covariance" else torch.linalg.inv(square)
    loc = torch.randn(k, 4, dtype=torch.float64)
    components = gnomon.Gaussian(group, form=form, loc=loc, init=covariance, batch_shape=(k,))
    logits = torch.nn.Parameter(torch.randn(k, dtype=torch.float64))
    objective = _Objective(z, components, logits, floor=0.1, log_volume=2.0)

    dense = torch.distributions.MultivariateNormal(loc, covariance)
    trace = torch.linalg.inv(covariance).diagonal(dim1=-2, dim2=-1).sum(-1)
    joint = dense.log_prob(z.unsqueeze(1)) - 0.05 * trace + logits.detach().log_softmax(0)
    assert objective.value() == pytest.approx(2.0 - joint.logsumexp(1).mean().item())

    whole = objective.gradient()
    gradients = [parameter.grad for parameter in objective.parameters]
    monkeypatch.setattr("gnomon.mixture.CHUNK", 7 * k * 4)
    assert objective.gradient() == pytest.approx(whole)
    for parameter, gradient in zip(objective.parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)

    direction = [torch.randn_like(parameter) for parameter in objective.parameters]
    slope = sum((d * gradient).sum().item() for d, gradient in zip(direction, gradients, strict=True))
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, d in zip(objective.parameters, direction, strict=True):
                parameter.add_(d, alpha=step)
        values.append(objective.value())
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_component_reaches_the_stationary_point(structure, form):
    """For one component the optimum is known: the sample mean, and on the full manifold the sample covariance."""
    X, _ = blobs(k=1)
    model = GaussianMixture(structure=structure, form=form, tol=1e-10, random_state=0).fit(X)
    assert model.converged_
    np.testing.assert_allclose(model.means_[0], X.mean(0), atol=1e-3)
    if structure in (g.Dense, g.Triangular):
        expected = np.cov(X.T, bias=True)
        np.testing.assert_allclose(model.covariances_[0], expected + 1e-6 * np.diag(X.var(0)), rtol=1e-3, atol=1e-3)
    if structure is g.Diagonal:
        np.testing.assert_allclose(np.diag(model.covariances_[0]), X.var(0), rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", [g.Dense, g.Arrow, heisenberg, blocks, g.Diagonal])
def test_units_of_features_do_not_matter(structure, form):
    X, _ = blobs()
    units, shift = np.array([1e-6, 1.0, 1e6, 30.0, 1e-2]), np.array([0.0, 1e3, -1e6, 0.0, 1.0])
    plain = GaussianMixture(3, structure=structure, form=form, random_state=0).fit(X)
    other = GaussianMixture(3, structure=structure, form=form, random_state=0).fit(units * X + shift)
    np.testing.assert_array_equal(plain.predict(X), other.predict(units * X + shift))
    scale = np.outer(units, units)
    np.testing.assert_allclose(other.covariances_ / scale, plain.covariances_, rtol=1e-3, atol=1e-4)
    assert other.score(units * X + shift) == pytest.approx(plain.score(X) - np.log(units).sum(), abs=1e-5)


# ---------------------------------------------------------------------- EM as the reference
def assert_not_below_em(model, em, X):
    """Within 0.5% of EM's average log-likelihood, or better."""
    assert model.score(X) >= em.score(X) - 0.005 * abs(em.score(X))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("k", [3, 5, 8])
def test_dense_is_as_good_as_em(k, spread, form):
    X = StandardScaler().fit_transform(blobs(n=1000, k=k, spread=spread, seed=k)[0])
    em = SklearnMixture(k, max_iter=1000, random_state=0).fit(X)
    assert_not_below_em(GaussianMixture(k, form=form, random_state=0).fit(X), em, X)


@needs_magic
@pytest.mark.parametrize("k", [3, 5, 8])
def test_dense_is_as_good_as_em_on_magic(k):
    X = magic()
    em = SklearnMixture(k, max_iter=1000, random_state=0).fit(X)
    assert_not_below_em(GaussianMixture(k, form="precision", random_state=0).fit(X), em, X)


@needs_magic
def test_mini_batches_come_near_the_full_batch_on_magic():
    X = magic()
    full = GaussianMixture(3, form="precision", random_state=0).fit(X)
    batches = GaussianMixture(3, form="precision", batch_size=1024, random_state=0).fit(X)
    assert batches.converged_
    assert batches.score(X) >= full.score(X) - 0.002 * abs(full.score(X))


@pytest.mark.parametrize("structure", [g.Arrow, heisenberg, blocks])
def test_structures_beat_diagonal_em_where_data_have_them(structure):
    X, _ = blobs(n=1200, d=8, group=structure(8))
    train, test = X[:600], X[600:]
    diagonal = SklearnMixture(3, covariance_type="diag", random_state=0).fit(train)
    full = SklearnMixture(3, random_state=0).fit(train)
    model = GaussianMixture(3, structure=structure, random_state=0).fit(train)
    assert model.score(test) > diagonal.score(test) + 0.1
    assert model.score(test) > full.score(test)


@pytest.mark.parametrize("structure", [g.Dense, heisenberg])
def test_mini_batches_come_near_the_full_batch(structure):
    X, _ = blobs(n=600)
    full = GaussianMixture(3, structure=structure, random_state=0).fit(X)
    batches = GaussianMixture(3, structure=structure, batch_size=120, random_state=0).fit(X)
    assert batches.converged_
    assert batches.score(X) >= full.score(X) - 0.005 * abs(full.score(X))


def test_more_starts_are_not_worse():
    X, _ = blobs(k=4, spread=1.0)
    scores = [GaussianMixture(4, n_init=n, random_state=0).fit(X).lower_bound_ for n in (1, 4)]
    assert scores[1] >= scores[0]


# ---------------------------------------------------------------------- iterates
@pytest.mark.parametrize("batch_size", [None, 50])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", [g.Dense, g.Arrow, heisenberg, blocks, g.Toeplitz])
def test_every_iterate_is_a_valid_mixture_of_the_structure(structure, form, batch_size):
    """The fit is deterministic, so that stopping after n iterations shows its n-th iterate."""
    X, _ = blobs(n=150, d=4)
    group = structure(4)
    last = None
    for n in (1, 2, 3, 6, 11, 20) if batch_size is None else (1, 2, 5):
        model = quiet_fit(
            GaussianMixture(3, structure=structure, form=form, batch_size=batch_size, max_iter=n, random_state=0), X
        )
        assert model.weights_.sum() == pytest.approx(1)
        assert (model.weights_ > 0).all()
        assert (np.linalg.eigvalsh(model.covariances_) > 0).all()
        np.testing.assert_allclose(model.covariances_, model.covariances_.transpose(0, 2, 1))
        factor = model.components_.factor_matrix().detach()
        torch.testing.assert_close(group.to_dense(group.from_dense(factor)), factor)
        tau = torch.from_numpy(model.covariances_ if form == "covariance" else model.precisions_)
        torch.testing.assert_close(factor @ factor.mT, tau)
        assert np.isfinite(model.loss_curve_).all()
        if last is not None:
            np.testing.assert_array_equal(model.loss_curve_[: last.n_iter_], last.loss_curve_[:-1])
        last = model
    if batch_size is None:
        assert (np.diff(last.loss_curve_) <= 1e-8).all()  # each step is checked, or a line search's


def test_warm_start_goes_on_where_the_last_fit_ended():
    X, _ = blobs(spread=1.0)
    model = GaussianMixture(3, structure=g.Arrow, max_iter=1, warm_start=True, random_state=0)
    bounds = [quiet_fit(model, X).lower_bound_ for _ in range(30)]
    assert (np.diff(bounds) >= -1e-8).all()
    assert bounds[-1] > bounds[0] + 0.05
    model.set_params(max_iter=100)
    before = model.lower_bound_
    assert model.fit(X).loss_curve_[0] == pytest.approx(-before)
    model.set_params(n_components=4)
    with pytest.raises(ValueError, match="set warm_start=False"):
        model.fit(X)


def test_a_fit_that_is_cut_short_says_so():
    X, _ = blobs(spread=0.5)
    with pytest.warns(ConvergenceWarning, match="not converged in max_iter=2 iterations"):
        model = GaussianMixture(3, max_iter=2, random_state=0).fit(X)
    assert not model.converged_
    assert model.n_iter_ == 2


# ---------------------------------------------------------------------- collapses
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


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")  # k-means says so too
@pytest.mark.parametrize("options", [{}, {"form": "precision"}, {"structure": g.Arrow}, {"batch_size": 32}])
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
    monkeypatch.setattr("gnomon.mixture._collapses", lambda *_: next(collapses))
    model = quiet_fit(GaussianMixture(3, n_init=3, max_iter=5, random_state=0), X)
    assert len(model.collapsed_) == 0


def test_ordinary_data_raise_no_warning():
    X, _ = blobs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = GaussianMixture(3, random_state=0).fit(X)
    assert model.converged_
    assert len(model.collapsed_) == 0


# ---------------------------------------------------------------------- the benchmark
def test_the_benchmark_runs_in_a_small_form():
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import mixture;"
        "text, records = mixture.synthetic_part(60, 6, range(1)); print(text)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "above diagonal EM" in result.stdout
