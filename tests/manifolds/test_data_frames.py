"""Data frames of pandas, where a person would pass them."""

import numpy as np
import pytest
import torch

import gnomon
from gnomon import problems, riemannian
from gnomon.covariance import FactorAnalysis, GraphicalModel, StructuredCovariance
from gnomon.mixture import GaussianMixture

pandas = pytest.importorskip("pandas")


@pytest.fixture
def frame():
    rng = np.random.RandomState(0)
    return pandas.DataFrame(
        rng.standard_normal((40, 4)) @ (np.eye(4) + 0.3 * rng.standard_normal((4, 4))), columns=[*"abcd"]
    )


def test_points(frame):
    q = gnomon.Gaussian("dense", init=frame.cov(), loc=frame.mean(), dtype=torch.float64)
    np.testing.assert_allclose(q.covariance().detach(), frame.cov())
    np.testing.assert_allclose(
        q.log_prob(frame).detach(), q.log_prob(torch.from_numpy(frame.to_numpy().copy())).detach()
    )
    S = gnomon.SPD("arrow:2", init=frame.cov(), project=True, dtype=torch.float64)
    np.testing.assert_allclose(S.quad(frame.iloc[0]).detach(), S.quad(frame.iloc[:1].values).detach()[0])
    S.assign_(np.diag(frame.var()))
    np.testing.assert_allclose(
        S.inv_quad(frame[["d", "c", "b", "a"]]).detach(), S.inv_quad(frame.values[:, ::-1]).detach()
    )


def test_exact_maps(frame):
    a, b = frame.cov(), frame.cov() + np.eye(4)
    tensors = torch.tensor(a.to_numpy()), torch.tensor(b.to_numpy())
    torch.testing.assert_close(riemannian.distance(a, b), riemannian.distance(*tensors))
    torch.testing.assert_close(riemannian.geodesic(a, b=b, t=0.3), riemannian.geodesic(*tensors, 0.3))
    torch.testing.assert_close(
        riemannian.mean(np.stack([a, b])[:, ::-1, ::-1]), riemannian.mean(torch.stack(tensors)).flip(-1, -2)
    )


@pytest.mark.parametrize(
    "estimator",
    [
        StructuredCovariance("arrow", shrinkage=0.1),
        FactorAnalysis(),
        GraphicalModel([("a", "b"), ("b", "d")], shrinkage=0.0),
        GaussianMixture(2, structure="lowrank:1", random_state=0),
    ],
)
def test_estimators(estimator, frame):
    weights = pandas.Series(np.arange(1.0, 41.0))
    score = estimator.fit(frame, sample_weight=weights).score(frame)
    assert list(estimator.feature_names_in_) == [*"abcd"]
    if not isinstance(estimator, GraphicalModel):
        assert estimator.fit(frame.to_numpy(), sample_weight=weights.to_numpy()).score(frame.to_numpy()) == score


def test_missing_values(frame):
    holes = frame.mask(np.random.RandomState(1).uniform(size=frame.shape) < 0.1)
    scores = [StructuredCovariance("dense", shrinkage=0.1).fit(x).score(x) for x in (holes, holes.convert_dtypes())]
    assert scores[0] == scores[1] == StructuredCovariance("dense", shrinkage=0.1).fit(holes.values).score(holes.values)


def test_problems(frame):
    rows, covariance = frame.to_numpy(), frame.cov()
    y, labels = frame["a"], pandas.Series(np.arange(40) % 2)
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (rows, covariance, y, labels)]
    point = gnomon.SPD(4, init=2.0, dtype=torch.float64)

    def losses(rows, covariance, y, labels):
        seeded = torch.Generator().manual_seed(0)
        for problem in (
            problems.LogDet(covariance),
            problems.GraphicalModel(covariance),
            problems.MetricNearness(covariance, rows),
            problems.TraceRegression(rows, y),
            problems.MetricLearning(rows[:20], rows[20:]),
            problems.MetricLearning.from_labels(rows, labels, pairs=20, generator=seeded),
        ):
            yield problem(point)
        for problem in (
            problems.MixtureLikelihood(rows, 2, means=rows[:2]),
            problems.DictionaryLearning(np.stack([np.asarray(covariance)] * 4), 2),
        ):
            yield problem(problem.start())

    wanted = list(losses(*tensors))
    torch.testing.assert_close(list(losses(rows[:, ::-1][:, ::-1], covariance, y, labels)), wanted)
    torch.testing.assert_close(list(losses(frame, covariance.to_numpy(), y, labels.to_numpy())), wanted)
