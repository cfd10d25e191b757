"""Every iterate is a mixture, and a fit goes on where another ended."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from gnomon import groups as g
from gnomon.mixture import GaussianMixture
from support.marks import slow_where
from support.mixtures import FORMS, blobs, blocks, heisenberg, quiet_fit


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", slow_where([None, 50], lambda batch_size: batch_size is None))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "structure",
    slow_where(
        [g.Dense, g.Arrow, heisenberg, blocks, g.Toeplitz], lambda structure: structure not in (g.Dense, g.Arrow)
    ),
)
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


@pytest.mark.slow
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
