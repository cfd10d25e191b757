"""The suite of unlike tasks: runs that are kept and resumed, times in turns, statistics, the page."""

import inspect
import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from gnomon.experiments.quality import runs, study, suite
from gnomon.experiments.quality.contestants import BEFORE, CONTESTANTS
from gnomon.experiments.quality.report import Report
from gnomon.experiments.quality.run import bench_quality, compact, restore
from gnomon.experiments.quality.runs import Outcome, Run
from gnomon.experiments.quality.samples import Samples, SampleTask
from gnomon.experiments.quality.statistics import (
    Score,
    are_best,
    bootstrap,
    geometric_means,
    mean_ranks,
    steps_to,
    time_to,
)
from gnomon.experiments.quality.study import FULL, QUICK, Study
from gnomon.experiments.quality.task import train
from gnomon.experiments.quality.timing import Times, Timing
from gnomon.optim import INGD


class Tiny(SampleTask):
    """A regression that takes a millisecond a step."""

    name, steps, measure, batch_size = "tiny", 12, "test error", 16

    def __init__(self):
        torch.manual_seed(0)
        x = torch.randn(60, 4)
        samples = Samples(x, x @ torch.randn(4, 2))
        self.train, self.validation, self.test = samples.split(40, 10, 10)

    def model(self):
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def scores(self, output, target):
        return (output - target).square().mean(-1)

    def loss(self, output, target):
        return self.scores(output, target).mean()


@pytest.fixture
def tiny(monkeypatch):
    """A suite of one task; runs are done in this process."""
    monkeypatch.setitem(suite.TASKS, "tiny", Tiny)
    runs.task_of.cache_clear()


def tiny_study(folder, optimizers=("adamw", "muon", "ingd")):
    return Study(folder, {"tiny": Tiny.steps}, list(optimizers), FULL)


def finish(found):
    while left := found.left():
        for run in left:
            run.perform()


# ---------------------------------------------------------------------- runs
PLANNED = "Time to AdamW's measure with a schedule for it"


def test_a_study_has_all_its_runs_and_a_page(tiny, tmp_path):
    found = tiny_study(tmp_path)
    finish(found)
    done = [run for run in found.known() if found.outcome(run) is not None]
    other_rates = sum(len(found.others("tiny", optimizer)) for optimizer in found.optimizers)
    assert len(done) == found.size == 3 * 4 + 3 * (3 + 2 * 2 + 2 * 2) + 3 * other_rates
    report = Report(found, {"tiny": "test error"})
    assert report.sets["all"] == ["tiny"]
    page = report.markdown()
    for title in (
        "Final measure at equal steps",
        "Summary in the time of Muon",
        "Steps and time to AdamW's measure",
        "Sensitivity to the learning rate",
        PLANNED,
    ):
        assert f"## {title}" in page
    assert "nan" not in page


def test_rates_beside_the_best_one_are_run_on_the_further_seeds(tiny, tmp_path):
    found = tiny_study(tmp_path, ("adamw", "ingd"))
    assert found.others("tiny", "ingd") == {}
    finish(found)
    best, usual = found.chosen_rate("tiny", "ingd"), CONTESTANTS["ingd"].usual
    others = found.others("tiny", "ingd")
    assert set(others) == {best / 2, 2 * best, usual} - {best}
    assert [run.seed for run in others[2 * best]] == [1, 2, 3]
    (row,) = [row for row in Report(found, {"tiny": ""}).sensitivity().rows if row[0] == "INGD"]
    at = {rate: np.mean([found.outcome(run).test for run in runs]) for rate, runs in others.items()}
    assert row[1].startswith(f"{at[best / 2] / Score.of(found.final_outcomes('tiny', 'ingd')).mean:.3f}")
    quick = Study(tmp_path, {"tiny": Tiny.steps}, ["ingd"], QUICK)
    assert not any(section.title.startswith("Sensitivity") for section in Report(quick, {"tiny": ""}).sections)


def test_results_in_the_repository_are_taken_and_changed_settings_are_not(tiny, tmp_path, monkeypatch):
    found = tiny_study(tmp_path / "one")
    finish(found)
    kept = tmp_path / "quality.json"
    kept.write_text(compact(Report(found, {"tiny": "test error"})))
    again = tiny_study(tmp_path / "two")
    restore(again, kept)
    assert again.left() == []
    assert [again.outcome(run).test for run in again.known()] == [found.outcome(run).test for run in found.known()]
    monkeypatch.setitem(CONTESTANTS["ingd"].settings, "damping", "another")
    changed = tiny_study(tmp_path / "three")
    restore(changed, kept)
    assert {run.optimizer for run in changed.left()} == {"ingd"}
    assert changed.times("tiny", "ingd") is None
    assert changed.times("tiny", "muon").steps == found.times("tiny", "muon").steps


def test_a_run_is_determined_by_its_seed_and_kept(tiny, tmp_path):
    one, other = (Run(tmp_path / name, "tiny", "ingd", 1e-2, 1, 5) for name in "ab")
    one.perform()
    other.perform()
    assert one.outcome().test == other.outcome().test
    assert Run(tmp_path / "a", "tiny", "ingd", 1e-2, 1, 6).outcome() is None
    one.path.write_text("damaged")
    assert one.outcome() is None


def test_a_run_that_diverges_is_a_result(tiny, tmp_path):
    run = Run(tmp_path, "tiny", "adamw", math.inf, 1, 5)
    run.perform()
    outcome = run.outcome()
    assert outcome.test == math.inf
    assert "nan" in outcome.failure


# ---------------------------------------------------------------------- times
def test_times_in_turns(tiny, tmp_path):
    timing = Timing(tmp_path, "tiny", "ingd", 12)
    timing.perform()
    times = timing.outcome()
    assert times.steps == list(range(1, 13))
    assert all(one < other for one, other in zip(times.shares, times.shares[1:], strict=False))
    assert timing.path.is_file()
    assert Timing(tmp_path, "tiny", "ingd", 13).outcome() is None


def test_steps_that_fit_in_a_time():
    """Early steps take longer: half of the time is less than half of the steps, beyond the end the late pace holds."""
    times = Times([10, 20, 40], [1.0, 1.5, 2.0])
    assert times.until(5) == 0.5
    assert times.until(15) == 1.25
    assert times.steps_in(0.5) == 5
    assert times.steps_in(2.0) == 40
    assert times.steps_in(2.0 + 10 / 30) == 50
    assert times.until(50) == pytest.approx(2.0 + 10 / 30)
    assert times.steps_in(1e-9) == 1
    assert Times([8], [1.0]).steps_in(2.0) == 16


# ---------------------------------------------------------------------- statistics
def outcome(test, curve=()):
    return Outcome(test, test, 1.0, list(curve))


def test_scores_and_which_are_best():
    scores = [
        Score.of([outcome(v) for v in values]) for values in ([1.0, 1.2, 1.1], [1.15, 1.2, 1.25], [9.0, 9.1, 9.2])
    ]
    assert are_best([*scores, None]) == [True, True, False, False]
    assert Score.of([outcome(1.0), outcome(math.inf)]).mean == math.inf
    assert are_best([None, Score(math.inf, math.nan)]) == [False, False]


def test_geometric_means_ranks_and_intervals():
    rows = np.array([[1.0, 2.0, 3.0], [1.0, 8.0, 4.0]])
    np.testing.assert_allclose(geometric_means(rows), [1.0, 4.0, 12**0.5])
    np.testing.assert_allclose(mean_ranks(rows), [1.0, 2.5, 2.5])
    estimates = bootstrap(mean_ranks, rows)
    assert (estimates[1].low, estimates[1].value, estimates[1].high) == (2.0, 2.5, 3.0)


def test_steps_to_a_level():
    curve = [(5, 1.0, 3.0), (10, 2.0, 2.0), (15, 3.0, 1.0)]
    assert steps_to(2.0, [outcome(1.0, curve)]) == 10
    assert steps_to(0.5, [outcome(1.0, curve)]) == math.inf
    assert steps_to(9.0, [Outcome(1.0, 1.0, 0.0, failure="ValueError")]) == math.inf


def test_the_time_for_which_a_run_must_be_planned():
    by_time = {0.25: [outcome(4.0)], 0.5: [outcome(2.0)], 1.0: [outcome(1.0)]}
    assert time_to(2.0, by_time) == pytest.approx(0.5)
    assert time_to(math.sqrt(2), by_time) == pytest.approx(math.sqrt(0.5))  # linear in the logarithms of both
    assert time_to(5.0, by_time) == 0.25
    assert time_to(0.9, by_time) == math.inf
    assert time_to(2.0, {0.5: [Outcome(1.0, math.inf, 0.0, failure="ValueError")], 1.0: [outcome(1.0)]}) == 1.0


# ---------------------------------------------------------------------- tasks and contestants
def test_development_and_judgement_are_apart():
    assert not set(suite.DEVELOPMENT) & set(suite.JUDGEMENT)
    assert len(suite.DEVELOPMENT) + len(suite.JUDGEMENT) >= 10


def test_ingd_before_is_as_it_was():
    """No default of today changes it: all that determines a step is given."""
    given = set(BEFORE) | {"model", "lr", "preset"}
    other = {"convention", "precond_dtype", "memory", "compile", "fallback_lr", "groups", "precondition_only"}
    assert BEFORE["polar"] is False
    assert given | other | {"scaler", "shard", "seed"} == set(inspect.signature(INGD).parameters)


def test_every_optimizer_has_as_many_rates_at_even_ratios():
    for one in CONTESTANTS.values():
        assert len(one.rates) == len(FULL.rates)
        assert all(b / a == 2 for a, b in zip(one.rates, one.rates[1:], strict=False))
        assert one.usual in one.rates


@pytest.mark.slow
@pytest.mark.parametrize("name", ["equation", "regression", "lstm", "gpt", "autoencoder", "llama", "english"])
def test_tasks_train(name):
    """Tasks whose data are everywhere take steps with INGD, and their measures are finite and positive."""
    task = suite.TASKS[name]()
    history = train(task, lambda model: CONTESTANTS["ingd"].build(model, 1e-2), steps=3)
    assert math.isfinite(history.final)
    assert history.final > 0


def test_the_study_prints_a_line_for_each_run(tiny, tmp_path, monkeypatch):
    class Now:
        """Runs at once what is submitted."""

        def __init__(self, _):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function):
            future = study.Future()
            future.set_result(function())
            return future

    monkeypatch.setattr(study, "Workers", Now)
    found = tiny_study(tmp_path, ("adamw", "ingd"))
    console = Console(record=True, width=200, file=io.StringIO())
    found.finish(1, console)
    text = console.export_text()
    assert "tiny, INGD, rate 0.01, seed 0, 12 steps (steps)" in text
    assert "times AdamW's time" in text
    assert json.loads((tmp_path / "tiny" / "ingd" / "times.json").read_text())["timing"]["steps"] == 12


def test_an_interrupted_study_shows_what_has_ended(tiny, tmp_path, monkeypatch):
    def interrupted(self, workers, console):
        for run in self.tried("tiny", "adamw").values():
            run.perform()
        raise KeyboardInterrupt

    monkeypatch.setattr(study.Study, "finish", interrupted)
    monkeypatch.chdir(tmp_path)
    console = Console(width=200, file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        bench_quality(tmp_path / "out", tasks=["tiny"], optimizers=["adamw", "ingd"], console=console)
    assert "runs are missing" in (tmp_path / "out" / "full" / "quality.md").read_text()
    assert len(json.loads((tmp_path / "out" / "full" / "quality.json").read_text())["runs"]) == 4
