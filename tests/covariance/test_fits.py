"""Fits are maxima of the likelihood, with missing values and without."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from sklearn.decomposition import FactorAnalysis as SklearnFactorAnalysis
from sklearn.model_selection import KFold

import gnomon
from gnomon import groups as g
from gnomon.covariance import FactorAnalysis, GraphicalModel, StructuredCovariance, order_features
from gnomon.covariance.graphical import _by_regressions, elimination, likeliest_precision
from gnomon.covariance.model import StructureModel, minimize
from gnomon.covariance.sample import Sample
from gnomon.covariance.selection import Folds
from gnomon.groups.likelihood import has_closed_form, likeliest
from gnomon.groups.moments import DenseMoments, RowMoments, SingularMomentsError

FORMS = ("covariance", "precision")
CLOSED = [
    g.Dense(6),
    g.Triangular(6),
    g.Triangular(6, upper=True),
    g.Diagonal(6),
    g.BlockDiagonal(6, 4),
    g.Arrow(6, 2),
    g.Heisenberg(6, 1, 2),
    g.BlockTriangular((g.Dense(2), g.BlockDiagonal(4, 2))),
    g.Toeplitz(6),
    g.Toeplitz(6, upper=True),
    g.BlockTriangular((g.Dense(2), g.Toeplitz(4))),
    g.LowRank(6, 2),
]


def moments_of(batch=(), k=6, n=30, seed=0):
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn(*batch, n, k, generator=rng, dtype=torch.float64)
    rows = rows @ (torch.eye(k) + 0.5 * torch.randn(*batch, k, k, generator=rng)).double()
    return rows.mT @ rows / n


def energy(group, form, a, S):
    """``log det Sigma + tr(Sigma^-1 S)``"""
    square = group.to_dense(a) @ group.to_dense(a).mT
    precision = square if form == "precision" else torch.linalg.inv(square)
    return (precision * S).sum((-2, -1)) - torch.logdet(precision)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", CLOSED, ids=repr)
def test_closed_forms_are_minima(group, form):
    """No worse than the minimum that L-BFGS finds, and stationary."""
    S = moments_of()
    if isinstance(group, g.LowRank):
        S = S + 2 * torch.eye(6)  # so that no noise vanishes
        S = S if form == "covariance" else torch.linalg.inv(S)
    assert has_closed_form(group, form)
    a = likeliest(group, DenseMoments(S), form, minimize)
    found = minimize(group, DenseMoments(S), form)
    assert energy(group, form, a, S) <= energy(group, form, found, S) + 1e-9
    assert energy(group, form, a, S) == pytest.approx(float(energy(group, form, found, S)), abs=1e-3)
    point = gnomon.SPD(group, factor="outer" if form == "covariance" else "inverse", dtype=torch.float64)
    point.frame.copy_(group.pack(a))
    root = torch.linalg.cholesky(S)
    (point.inv_quad(root.mT).sum() + point.logdet()).backward()
    assert float(point.eta.grad.norm()) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", CLOSED, ids=repr)
def test_batches_and_rows_give_the_same(group, form):
    S = moments_of((2,))
    batch = likeliest(group, DenseMoments(S), form, minimize)
    for i in range(2):
        single = likeliest(group, DenseMoments(S[i]), form, minimize)
        added = torch.full((6,), 0.1, dtype=torch.float64)
        root = torch.linalg.cholesky(S[i]).mT
        few = root[:4]
        by_rows = likeliest(group, RowMoments(few, added), form, minimize)
        by_matrix = likeliest(group, DenseMoments(few.mT @ few + torch.diag(added)), form, minimize)
        for one, other in ((tuple(b[i] for b in batch), single), (by_rows, by_matrix)):
            dense, twin = group.to_dense(one), group.to_dense(other)
            torch.testing.assert_close(dense @ dense.mT, twin @ twin.mT, rtol=1e-5, atol=1e-6)


def test_singular_moments_are_refused():
    S = moments_of(n=3)
    refused = (
        (g.Dense(6), "covariance"),
        (g.Arrow(6), "precision"),
        (g.Triangular(6), "covariance"),
        (g.LowRank(6), "precision"),
    )
    for group, form in refused:
        with pytest.raises(SingularMomentsError, match="too few samples"):
            likeliest(group, DenseMoments(S), form, minimize)
    likeliest(g.Arrow(6), DenseMoments(S), "covariance", minimize)  # one regressor: three samples suffice
    with pytest.raises(SingularMomentsError, match="no variance"):
        likeliest(g.Diagonal(6), DenseMoments(0 * S), "covariance", minimize)


def test_precisions_of_low_rank_whose_diagonal_vanishes():
    """A Heywood case: the diagonal rests on its bound, and L-BFGS from there gains nothing to speak of."""
    X = load_breast_cancer().data
    S = torch.from_numpy(np.corrcoef(X.T))
    for rank in (1, 2, 3):
        group = g.LowRank(30, rank)
        a = likeliest(group, DenseMoments(S), "precision", minimize)
        found = minimize(group, DenseMoments(S), "precision")
        assert a[1].min() == pytest.approx(1e-5**0.5)
        assert energy(group, "precision", a, S) <= energy(group, "precision", found, S) + 1e-4
        again = group.inverse_factor(S, a[1])  # from the maximum
        torch.testing.assert_close(energy(group, "precision", again, S), energy(group, "precision", a, S))


# ---------------------------------------------------------------------- factor analysis
def digits():
    X = load_digits().data
    return X[:, X.std(0) > 0.5]


DATA = {
    "wine": (lambda: load_wine().data, 3),
    "diabetes": (lambda: load_diabetes().data, 2),
    "iris": (lambda: load_iris().data, 1),
    "digits": (digits, 8),
    "breast cancer": (lambda: load_breast_cancer().data, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_factor_analysis_is_not_below_scikit_learn(name):
    make, rank = DATA[name]
    X = make()
    ours = FactorAnalysis(rank).fit(X)
    theirs = SklearnFactorAnalysis(rank, tol=1e-8, max_iter=2000, svd_method="lapack").fit(X)
    assert ours.score(X) >= theirs.score(X) - 1e-6


def test_factor_analysis_agrees_with_scikit_learn():
    rng = np.random.RandomState(1)
    X = rng.standard_normal((300, 2)) @ rng.standard_normal((2, 9)) + rng.standard_normal((300, 9))
    ours = FactorAnalysis(2).fit(X)
    theirs = SklearnFactorAnalysis(2, tol=1e-10, max_iter=10000, svd_method="lapack").fit(X)
    assert ours.score(X) == pytest.approx(theirs.score(X), abs=1e-4)
    np.testing.assert_allclose(ours.noise_variance_, theirs.noise_variance_, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(ours.covariance_), theirs.get_covariance(), atol=1e-3)
    np.testing.assert_allclose(np.asarray(ours.precision_), theirs.get_precision(), atol=1e-3)
    np.testing.assert_allclose(ours.mean_, theirs.mean_)
    scores, reference = ours.transform(X), theirs.transform(X)
    np.testing.assert_allclose(np.abs(scores), np.abs(reference), atol=2e-3)
    sigma = np.asarray(ours.covariance_)
    np.testing.assert_allclose(scores, (X - ours.mean_) @ np.linalg.solve(sigma, ours.components_.T))
    assert list(ours.get_feature_names_out()) == ["factoranalysis0", "factoranalysis1"]
    assert (ours.components_[np.arange(2), np.abs(ours.components_).argmax(1)] > 0).all()


# ---------------------------------------------------------------------- graphs
def random_graph(k, edges, seed):
    rng = np.random.RandomState(seed)
    graph = np.zeros((k, k), dtype=bool)
    upper = np.triu_indices(k, 1)
    chosen = rng.choice(len(upper[0]), edges, replace=False)
    graph[upper[0][chosen], upper[1][chosen]] = True
    return graph | graph.T


CYCLE = np.roll(np.eye(6, dtype=bool), 1, 1) | np.roll(np.eye(6, dtype=bool), -1, 1)


@pytest.mark.parametrize("graph", [CYCLE, *[random_graph(6, edges, edges) for edges in (0, 3, 6, 9, 15)]])
def test_the_precision_of_a_graph_satisfies_the_equations_of_likelihood(graph):
    S = moments_of().numpy()
    precision = likeliest_precision(S, graph)
    edges = graph | np.eye(6, dtype=bool)
    np.testing.assert_allclose(np.linalg.inv(precision)[edges], S[edges], atol=1e-8)
    assert (precision[~edges] == 0).all()
    np.testing.assert_allclose(_by_regressions(S, graph), precision, atol=1e-7)


def test_chordal_graphs_are_recognized():
    assert elimination(CYCLE) is None
    assert elimination(random_graph(6, 15, 0)) is not None
    chorded = CYCLE.copy()
    for i, j in ((0, 2), (0, 3), (0, 4)):
        chorded[i, j] = chorded[j, i] = True
    assert elimination(chorded) is not None


def test_ways_to_give_a_graph():
    X = np.random.RandomState(0).standard_normal((50, 4))
    chain = np.abs(np.subtract.outer(np.arange(4), np.arange(4))) == 1
    edges = [(0, 1), (1, 2), (3, 2)]
    for graph in ("chain", "chain:1", chain, chain.astype(float) + np.eye(4), edges, set(edges)):
        model = GraphicalModel(graph, shrinkage=0.1).fit(X)
        assert (model.graph_ == chain).all()
        assert (np.asarray(model.precision_) != 0).sum() == 10
        np.testing.assert_allclose(model.precision_ @ np.asarray(model.covariance_), np.eye(4), atol=1e-12)
    assert (GraphicalModel("chain:3", shrinkage=0.1).fit(X).graph_ == ~np.eye(4, dtype=bool)).all()


# ---------------------------------------------------------------------- missing values
def with_holes(X, share=0.15, seed=0):
    result = X.copy()
    result[np.random.RandomState(seed).uniform(size=X.shape) < share] = np.nan
    return result


@pytest.mark.parametrize("structure", ["dense", "arrow:2", "lowrank:1", "diagonal", "toeplitz"])
def test_missing_values_maximize_the_marginal_likelihood(structure):
    """The gradient of the likelihood of what is observed vanishes in the coordinates of the structure."""
    rng = np.random.RandomState(0)
    X = with_holes(rng.standard_normal((60, 5)) @ (np.eye(5) + 0.4 * rng.standard_normal((5, 5))))
    X[3] = np.nan
    model = StructuredCovariance(structure, shrinkage=0.0).fit(X)
    q = model.gaussian_
    loss = torch.zeros((), dtype=torch.float64)
    for row in torch.from_numpy(X):
        seen = (~row.isnan()).nonzero().squeeze(-1)
        if len(seen):
            part = torch.distributions.MultivariateNormal(q.loc[seen], q.covariance()[seen][:, seen])
            loss = loss - part.log_prob(row[seen]) / len(X)
    loss.backward()
    assert float(q.eta.grad.norm()) < 2e-3
    assert model.score(X) == pytest.approx(-float(loss.detach()))
    assert model.score_samples(X)[3] == 0
    assert np.isfinite(model.mahalanobis(X)).all()


def test_few_missing_values_change_little():
    rng = np.random.RandomState(0)
    X = rng.standard_normal((400, 2)) @ rng.standard_normal((2, 6)) + rng.standard_normal((400, 6))
    whole, holes = FactorAnalysis(2).fit(X), FactorAnalysis(2).fit(with_holes(X, 0.05))
    np.testing.assert_allclose(np.asarray(whole.covariance_), np.asarray(holes.covariance_), atol=0.3)
    assert np.corrcoef(whole.transform(X)[:, 0], holes.transform(with_holes(X, 0.05))[:, 0])[0, 1] > 0.95
    assert holes.score(X) > whole.score(X) - 0.05
    shrunk = StructuredCovariance("dense", cv=3).fit(with_holes(X[:40], 0.1))
    assert np.isfinite(shrunk.score(X))


def test_factors_are_expected_given_what_is_observed():
    """Against the conditional mean of a joint Gaussian of factors and observed features, row by row."""
    rng = np.random.RandomState(0)
    X = with_holes(rng.standard_normal((40, 2)) @ rng.standard_normal((2, 6)) + 0.5 * rng.standard_normal((40, 6)), 0.3)
    X[5] = np.nan
    model = FactorAnalysis(2).fit(X)
    covariance, loadings = np.asarray(model.covariance_), model.components_.T
    for row, factors in zip(X, model.transform(X), strict=True):
        seen = ~np.isnan(row)
        weights = np.linalg.solve(covariance[np.ix_(seen, seen)], row[seen] - model.mean_[seen])
        np.testing.assert_allclose(factors, loadings[seen].T @ weights, atol=1e-8)


def test_low_rank_with_missing_values_converges():
    """Each M-step begins where the last one ended: from elsewhere it jumps between maxima of one likelihood."""
    rng = np.random.RandomState(0)
    X = np.cumsum(rng.standard_normal((60, 10)), 1)
    X[rng.rand(60, 10) < 0.1] = np.nan
    seed = np.random.RandomState(0).randint(2**31)
    for rows, _ in KFold(3, shuffle=True, random_state=seed).split(X):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            StructuredCovariance("lowrank:5", shrinkage=0.7, target="identity").fit(X[rows])


@pytest.mark.slow
def test_time_series_with_missing_values_are_found():
    series = with_holes(np.cumsum(np.random.RandomState(0).standard_normal((30, 6)), 1), 0.05)
    names = [name for name, *_ in StructuredCovariance(cv=2).fit(series).cv_results_]
    assert names.index("toeplitz") < names.index("arrow:1")


def test_too_many_features_for_missing_values(monkeypatch):
    monkeypatch.setattr("gnomon.covariance.missing.LARGEST_DENSE", 3)
    with pytest.raises(ValueError, match="X has missing values and 4 features, but they are handled for at most 3"):
        StructuredCovariance("arrow", shrinkage=0.1).fit(with_holes(np.random.RandomState(0).randn(20, 4)))


# ---------------------------------------------------------------------- orders
def test_orders_are_found_again():
    rng = np.random.RandomState(0)
    n, k = 80, 12
    hubs = rng.standard_normal((n, 2))
    arrow = np.hstack([hubs, hubs @ rng.standard_normal((2, k - 2)) + rng.standard_normal((n, k - 2))])
    blocks = np.repeat(rng.standard_normal((n, 3)), 4, axis=1) + 0.6 * rng.standard_normal((n, k))
    walk = np.cumsum(rng.standard_normal((n, k)), axis=1)
    shuffle = rng.permutation(k)
    for X, structure in ((arrow, "arrow:2"), (blocks, "block:4"), (walk, "toeplitz"), (arrow, "heisenberg:1,2")):
        found = order_features(X[:, shuffle], structure)
        assert sorted(found.order) == list(range(k))
        assert found.gain > 1, structure
        assert "nats a sample" in str(found)
        if structure == "block:4":
            assert [sorted(shuffle[found.order][i : i + 4] // 4) for i in (0, 4, 8)] in [
                [[a] * 4, [b] * 4, [c] * 4] for a in range(3) for b in range(3) for c in range(3)
            ]
        if structure == "arrow:2":
            assert set(shuffle[found.order][:2]) == {0, 1}
    same = order_features(arrow, "lowrank:2")
    assert list(same.order) == list(range(k))
    assert same.gain == 0
    for structure in ("toeplitz", "block:2"):
        assert list(order_features(arrow[:, :1], structure).order) == [0]
    with pytest.raises(ValueError, match="no rule to order features"):
        order_features(arrow, lambda k: g.BlockTriangular((g.Dense(2), g.Toeplitz(k - 2))))
    with pytest.raises(ValueError, match="X has missing values"):
        order_features(with_holes(arrow), "arrow")
    with pytest.raises(ValueError, match="shrinkage must be a number between 0 and 1, got 'cv'"):
        order_features(arrow, "arrow", shrinkage="cv")


def test_pictures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    X = np.random.RandomState(0).standard_normal((40, 5))
    axes = StructuredCovariance("arrow:2", shrinkage=0.1).fit(X).plot()
    assert [ax.get_title() for ax in axes] == ["correlations", "partial correlations"]
    image = axes[1].images[0].get_array()
    assert image.shape == (5, 5)
    np.testing.assert_allclose(image[2:, 2:], np.eye(3), atol=1e-12)  # given the first two, independent
    assert "arrow:2" in axes[0].figure._suptitle.get_text()
    matplotlib.pyplot.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_automatic_structure_is_never_far_below_ledoit_wolf(seed):
    """On a covariance that has none of the structures."""
    rng = np.random.RandomState(seed)
    root = rng.standard_normal((40, 40)) / np.sqrt(40) + np.eye(40)
    X, held_out = rng.standard_normal((30, 40)) @ root, rng.standard_normal((1000, 40)) @ root
    model = StructuredCovariance().fit(X)
    assert model.score(held_out) > LedoitWolf().fit(X).score(held_out) - 2


@pytest.mark.parametrize("holes", [0.0, 0.1])
def test_cross_validation_begins_fits_near_others(holes):
    """Scores are those of fits from the start."""
    rng = np.random.RandomState(0)
    X = with_holes(rng.standard_normal((40, 1)) @ rng.standard_normal((1, 6)) + rng.standard_normal((40, 6)), holes)
    sample = Sample.of(torch.from_numpy(X), None, False)
    splits = [(torch.arange(20), torch.arange(20, 40)), (torch.arange(20, 40), torch.arange(20))]
    model, folds = StructureModel(g.LowRank(6, 1), "covariance", "lowrank:1"), Folds(sample, splits)
    near = []
    folds.score(model, 0.3, "identity", near)
    first = [gaussian.covariance() for gaussian in near]
    scores = [folds.score(model, 0.4, "identity", start) for start in (near, None)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3 if holes else 1e-9)  # EM ends before its limit
    assert not any(torch.equal(a, b.covariance()) for a, b in zip(first, near, strict=True))
