"""Fits are as good as those of EM."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.mixture import GaussianMixture as SklearnMixture
from sklearn.preprocessing import StandardScaler

from gnomon import groups as g
from gnomon.mixture import GaussianMixture
from support.marks import slow_where
from support.mixtures import FORMS, blobs, blocks, heisenberg
from support.repository import ROOT

MAGIC = Path(os.environ.get("GNOMON_DATA", "")) / "magic04.csv"
needs_magic = pytest.mark.skipif(not MAGIC.is_file(), reason="set GNOMON_DATA to a folder with magic04.csv")


def magic():
    rows = np.loadtxt(MAGIC, delimiter=",", skiprows=1, usecols=range(10))
    return StandardScaler().fit_transform(rows)


def assert_not_below_em(model, em, X):
    """Within 0.5% of EM's average log-likelihood, or better."""
    assert model.score(X) >= em.score(X) - 0.005 * abs(em.score(X))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("k", slow_where([3, 5, 8], lambda k: k > 3))
def test_dense_is_as_good_as_em(k, spread, form):
    X = StandardScaler().fit_transform(blobs(n=1000, k=k, spread=spread, seed=k)[0])
    em = SklearnMixture(k, max_iter=1000, random_state=0).fit(X)
    assert_not_below_em(GaussianMixture(k, form=form, random_state=0).fit(X), em, X)


@pytest.mark.slow
@needs_magic
@pytest.mark.parametrize("k", [3, 5, 8])
def test_dense_is_as_good_as_em_on_magic(k):
    X = magic()
    em = SklearnMixture(k, max_iter=1000, random_state=0).fit(X)
    assert_not_below_em(GaussianMixture(k, form="precision", random_state=0).fit(X), em, X)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("structure", [g.Dense, heisenberg])
def test_mini_batches_come_near_the_full_batch(structure):
    X, _ = blobs(n=600)
    full = GaussianMixture(3, structure=structure, random_state=0).fit(X)
    batches = GaussianMixture(3, structure=structure, batch_size=120, random_state=0).fit(X)
    assert batches.converged_
    assert batches.score(X) >= full.score(X) - 0.005 * abs(full.score(X))


@pytest.mark.slow
def test_more_starts_are_not_worse():
    X, _ = blobs(k=4, spread=1.0)
    scores = [GaussianMixture(4, n_init=n, random_state=0).fit(X).lower_bound_ for n in (1, 4)]
    assert scores[1] >= scores[0]


@pytest.mark.spawns
def test_the_benchmark_runs_in_a_small_form():
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import mixture;"
        "text, records = mixture.synthetic_part(60, 6, range(1)); print(text)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "above diagonal EM" in result.stdout


@pytest.mark.parametrize("form", FORMS)
def test_low_rank_converges_on_features_that_are_nearly_collinear(form):
    X = StandardScaler().fit_transform(load_breast_cancer().data)
    model = GaussianMixture(2, structure="lowrank:2", form=form, max_iter=50, random_state=0).fit(X)
    assert model.converged_
