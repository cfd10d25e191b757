"""The benchmark of variational inference: when a target is reached, the best of several runs, and the best Gaussian."""

import json

import pytest
import torch
import vi_methods as methods
import vi_page
import vi_picture

from gnomon.problems.posteriors import Parameter, Posterior, Reference
from gnomon.problems.posteriors.transforms import POSITIVE


@pytest.fixture
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def normal_posterior():
    """A normal pair with a correlation, and a lognormal scale; its reference is exact."""
    covariance = torch.tensor([[2.0, 1.2], [1.2, 1.0]]).double()
    precision, loc = torch.linalg.inv(covariance), torch.tensor([1.0, -1.0]).double()

    def log_joint(v):
        off = v["b"] - loc
        log_scale = v["s"].log()
        return -0.5 * (off @ precision * off).sum(-1) - 0.5 * (log_scale / 0.3).square() - log_scale

    mean, variance = torch.tensor([0.045]).exp(), torch.tensor([0.09]).exp() * torch.tensor([0.09]).expm1()
    means = torch.cat([loc, mean])
    sds = torch.cat([covariance.diagonal(), variance]).sqrt()
    reference = Reference(("b[1]", "b[2]", "s"), means.double(), sds.double())
    return Posterior("toy", [Parameter("b", (2,)), Parameter("s", (), POSITIVE)], log_joint, reference=reference)


def test_a_target_is_reached_at_the_first_of_two_checks_in_a_row():
    hits = methods.Hits()
    for error, evaluations in ((0.5, 10), (0.1, 20), (0.3, 30), (0.15, 40), (0.1, 50), (0.9, 60)):
        hits.add(error, evaluations, evaluations / 10)
    assert hits.record() == {"evaluations_to_target": 40, "seconds_to_target": 4.0}
    once = methods.Hits()
    once.add(0.1, 10, 1.0)
    assert once.record() == {"evaluations_to_target": None, "seconds_to_target": None}


@pytest.mark.usefixtures("_double")
def test_batch_and_match_reaches_a_gaussian():
    record = methods.batch_and_match(normal_posterior(), seed=0, from_mode=True)
    assert record["evaluations_to_target"] is not None
    assert record["error"] < 0.05
    assert record["failure"] is None
    json.dumps(record)


@pytest.mark.usefixtures("_double")
def test_the_mode_near_the_reference_and_the_best_gaussian():
    import vi_ours as ours

    posterior = normal_posterior()
    start = ours.near_reference(posterior)
    assert torch.allclose(start, torch.tensor([[1.0, -1.0, 0.045]]).double(), atol=1e-3)
    loc, covariance, gradients = methods.laplace(posterior, start)
    assert gradients > 6
    q = ours.ascend(posterior, loc + 1, torch.linalg.cholesky(2 * covariance))
    assert torch.allclose(q.mean, torch.tensor([1.0, -1.0, 0.0]).double(), atol=1e-2)
    assert torch.allclose(q.covariance_matrix, covariance, atol=0.05)


def record(method, error, reached, **more):
    parts = {"evaluations_to_target": reached, "seconds_to_target": None if reached is None else reached / 1000}
    ends = {"evaluations": 20000, "seconds": 20.0, "elbo": -1.0, "elbo_error": 0.1, "khat": 0.5, "seed": 0}
    return {"posterior": "a-x", "method": method, "error": error, **parts, **ends, **more}


def test_the_page_has_the_best_rate_and_lower_bounds_for_what_was_never_reached():
    records = [
        record("gnomon.vi", 0.1, 200, evaluations=1000, seconds=2.0),
        record("AutoMultivariateNormal", 0.3, None, rate=0.1),
        record("AutoMultivariateNormal", 0.1, 4000, rate=0.01),
        record("batch and match", 5.0, None),
    ]
    page = vi_page.page(records, ["a-x"], [], {"a-x": 3})
    assert "| gnomon.vi | 1 of 1 | 1 and 0 | 200 | 1.0 | 0.2 | 1.0 | 0.1 |" in page
    assert "| gnomon.vi, to the end | 1 of 1 | 1 and 0 | 1,000 | 5.0 | 1.0 | 10.0 | 1.0 |" in page
    assert "| AutoMultivariateNormal | 1 of 1 | 1 and 0 | 4,000 | 20.0 | 4.0 | 20.0 | 2.0 |" in page
    never = "at least 100.0 | at least 20.0 | at least 100.0 | at least 10.0"
    assert f"| batch and match | 0 of 1 | 0 and 0 | - | {never} |" in page
    assert "| a-x | d | 3 | 0.10 | 200 | 1,000 | 0.20 | 0.50 | -1.00 | -1.00 | 4,000 | (5.0) |  |" in page


def test_the_page_has_bounds_of_hierarchical_models_and_times_of_steps():
    step = {"structure": "arrow", "gradients": "path", "evaluations_a_step": 4, "milliseconds": 12.34, "error": None}
    records = [
        record("gnomon.vi", None, None, elbo=-3.0, structure="Arrow", steps=7),
        record("gnomon.vi", None, None, elbo=-2.0, structure="Arrow", steps=9, seed=1),
        {"posterior": "a-x", "method": "gnomon.vi, a step", "seed": 0, **step},
    ]
    page = vi_page.page(records, [], ["a-x"], {"a-x": 3})
    assert "| a-x | 3 | gnomon.vi | Arrow | 7 | 20,000 | 20.0 | -3.00 \u00b1 0.10 | 0.50 |" in page
    assert "| arrow | path | 4 | 12.3 |" in page


def test_the_picture_has_what_a_method_took_where_it_reached_the_target(tmp_path):
    records = [
        *(record("gnomon.vi", 0.1, reached, seed=seed) for seed, reached in enumerate((100, 300, 200))),
        record("AutoMultivariateNormal", 0.3, None, rate=0.1),
        record("AutoMultivariateNormal", 0.1, 4000, rate=0.01),
        record("batch and match", 5.0, None),
    ]
    spent = vi_page.spent_to_target(vi_page.by_posterior_and_method(records), ["a-x"])
    assert spent == {
        "gnomon.vi": {"evaluations_to_target": [200], "seconds_to_target": [0.2]},
        "AutoMultivariateNormal": {"evaluations_to_target": [4000], "seconds_to_target": [4.0]},
        "batch and match": {"evaluations_to_target": [], "seconds_to_target": []},
    }
    vi_picture.draw(spent, 1, tmp_path / "vi.png")
    assert (tmp_path / "vi.png").stat().st_size > 1000
