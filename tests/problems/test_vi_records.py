"""What the records in benchmarks/vi.jsonl say about the defaults of gnomon.vi, and that the page is made from them."""

import json
from pathlib import Path
from statistics import median

import pytest
import vi_methods as methods
import vi_page

RECORDS = [json.loads(line) for line in (Path(vi_page.__file__).parent / "vi.jsonl").read_text().splitlines()]
TABLE = vi_page.by_posterior_and_method(RECORDS)
OURS = [record for record in RECORDS if record["method"] == vi_page.MAIN]
NAMES = sorted({record["posterior"] for record in OURS if record["error"] is not None})
SMALL_RADON = "radon_mn-radon_hierarchical_intercept_centered"


def ours(name):
    return TABLE[name, vi_page.MAIN]


def ratio(method, what):
    """The geometric mean of what a baseline spends, as a multiple of what ours does until it is within 0.2."""
    chosen = {name: records for name in NAMES if (records := vi_page._chosen(TABLE, name, method))}
    assert len(chosen) == len(NAMES)
    return float(vi_page._ratio(TABLE, chosen, method, f"{what}_to_target", what, "_to_target").split()[-1])


def test_no_run_of_ours_has_failed_and_every_posterior_has_five_seeds():
    assert len(NAMES) == 33
    assert all(sorted(record["seed"] for record in ours(name)) == [0, 1, 2, 3, 4] for name in NAMES)
    for record in OURS:
        assert record["failure"] is None
        assert None not in (record["elbo"], record["elbo_error"], record["khat"])


def test_most_posteriors_are_within_the_target_and_others_near_the_best_gaussian():
    within = [name for name in NAMES if vi_page.worst(ours(name)) <= methods.WITHIN]
    assert len(within) >= 0.8 * len(NAMES)
    for name in set(NAMES) - set(within):
        (best,) = TABLE[name, vi_page.BEST]
        assert [record["error"] for record in ours(name)] == pytest.approx([best["error"]] * 5, abs=0.1)


def test_gradient_evaluations_are_few():
    assert median(vi_page.median(ours(name), "evaluations") for name in NAMES) <= 1000


@pytest.mark.parametrize("method", vi_page.BASELINES)
def test_ours_takes_fewer_evaluations_than_each_baseline(method):
    assert ratio(method, "evaluations") > 1


def test_ours_is_faster_than_the_full_rank_guide_of_pyro():
    assert ratio("AutoMultivariateNormal", "seconds") >= 5


def test_radon_models():
    assert all(record["elbo"] >= -114.5 and record["steps"] <= 300 for record in ours(SMALL_RADON))
    slowest = max(record["seconds"] for record in ours(vi_page.RADON))
    worst = min(record["elbo"] for record in ours(vi_page.RADON))
    for mean_field in (f"{vi_page.MAIN}, diagonal", "AutoDiagonalNormal"):
        assert all(worst > record["elbo"] for record in TABLE[vi_page.RADON, mean_field])
    for full in (f"{vi_page.MAIN}, full", "AutoMultivariateNormal"):
        assert all(record["seconds"] > 5 * slowest for record in TABLE[vi_page.RADON, full])


def test_steps_with_many_unknowns():
    times = {r["variant"]: r["milliseconds"] for r in RECORDS if "milliseconds" in r}
    assert times["arrow, path"] <= 20
    assert times["low_rank, path"] <= 60


def test_the_page_has_the_summary_of_the_records():
    assert vi_page.summary(TABLE, NAMES) in vi_page.PAGE.read_text()
