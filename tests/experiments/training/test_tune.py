"""The search for settings: equal budgets, no look at the test set, resumption."""

import math
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

optuna = pytest.importorskip("optuna", reason="gnomon tune needs optuna (extra 'experiments')")

from gnomon.cli import main  # noqa: E402
from gnomon.experiments.training import tune as tuning  # noqa: E402
from gnomon.experiments.training.config import Config, TrainingError, completed, config_from, read_settings  # noqa: E402
from gnomon.experiments.training.run import Outcome, train  # noqa: E402
from gnomon.experiments.training.trainer import Epoch  # noqa: E402

BASE = Config(train_limit=200, batch_size=45, epochs=2)


@pytest.fixture
def runs(monkeypatch):
    """All configs that were trained."""
    seen = []

    def noted(config, data):
        seen.append(config)
        return train(config, data=data)

    monkeypatch.setattr(tuning, "train", noted)
    return seen


@pytest.mark.slow
def test_every_optimizer_has_the_same_budget(runs, tmp_path):
    searches = tuning.tune(BASE, ["adamw", "ingd", "sgd"], 4, tmp_path)
    assert [search.optimizer for search in searches] == ["adamw", "ingd", "sgd"]
    for search in searches:
        mine = [config for config in runs if config.optimizer == search.optimizer]
        assert len(mine) == len(search.trials) == 4
        assert {(c.epochs, c.seed, c.validation, c.train_limit) for c in mine} == {(2, 0, 0.1, 200)}
        assert len({c.lr for c in mine}) == 4
        assert mine[0] == completed(tuning.for_optimizer(mine[0], search.optimizer))
        assert mine[0].lr == completed(Config(optimizer=search.optimizer)).lr  # the default is tried first
        assert all(search.ranges["lr"][0] <= c.lr <= search.ranges["lr"][1] for c in mine)
        assert set(search.ranges) == ({"lr", "damping"} if search.optimizer == "ingd" else {"lr"})
        best = config_from(read_settings(tuning.best_file(tmp_path, search.optimizer)))
        assert best.validation == 0
        assert best.lr == search.best.config.lr
        assert search.best.value == min(trial.value for trial in search.trials)


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_stopped(runs, tmp_path, monkeypatch):
    whole = tuning.tune(BASE, ["adamw"], 4, tmp_path / "whole")[0]
    runs.clear()

    def interrupted(config, data):
        runs.append(config)
        outcome = train(config, data=data)
        return Outcome(config, outcome.trainer, signal=signal.SIGINT) if len(runs) == 3 else outcome

    monkeypatch.setattr(tuning, "train", interrupted)
    with pytest.raises(tuning.InterruptedSearchError):
        tuning.tune(BASE, ["adamw"], 4, tmp_path / "parts")
    parts = tuning.tune(BASE, ["adamw"], 4, tmp_path / "parts")[0]
    assert parts.trials == whole.trials
    assert len(runs) == 5  # the one that was stopped was tried again
    assert len(tuning.tune(BASE, ["adamw"], 5, tmp_path / "parts")[0].trials) == 5
    assert len(runs) == 6


@pytest.mark.slow
def test_a_trial_of_a_process_that_was_killed_is_tried_again(runs, tmp_path, monkeypatch):
    def killed(config, data):
        raise SystemExit  # leaves the trial as a killed process does

    with monkeypatch.context() as patched:
        patched.setattr(tuning, "train", killed)
        with pytest.raises(SystemExit):
            tuning.tune(BASE, ["sgd"], 2, tmp_path)
    assert len(tuning.tune(BASE, ["sgd"], 2, tmp_path)[0].trials) == 2
    assert runs[0].lr == completed(Config(optimizer="sgd")).lr


@pytest.mark.slow
def test_divergence_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SPREAD", 1e30)
    search = tuning.tune(BASE, ["sgd"], 4, tmp_path)[0]
    assert math.inf in [trial.value for trial in search.trials]
    assert math.isfinite(search.best.value)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two = ["--optimizer", "adamw", "--optimizer", "kfac", "--budget", "2"]
    arguments = ["tune", *two, "--epochs", "1", "--train-limit", "200", "--output", "found"]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "120", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    assert re.search(r"AdamW\s+2\s+0\s+0\.\d+\s+error", result.output)
    assert re.search(r"KFAC\s+2\s+0\s+0\.\d+\s+[\d.]+\s+error", result.output)
    assert "gnomon train --config found/best-kfac.toml" in result.output
    other = CliRunner().invoke(main, [*arguments, "--batch-size", "50"])
    assert other.exit_code == 1
    assert "other settings (batch_size = 128)" in other.output
    result = CliRunner().invoke(main, ["train", "--config", "found/best-adamw.toml", "--output", "run"])
    assert result.exit_code == 0, result.output
    unknown = CliRunner().invoke(main, ["tune", "--optimizer", "adamv"])
    assert unknown.exit_code == 1
    assert "did you mean adam or adamw?" in unknown.output


def test_bad_input(tmp_path):
    with pytest.raises(TrainingError, match="budget"):
        tuning.tune(BASE, ["sgd"], 0, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="cannot write to"):
        tuning.tune(BASE, ["sgd"], 1, Path(tmp_path / "file"))


def test_a_tie_of_errors_is_broken_by_the_validation_loss():
    config = completed(Config(optimizer="sgd"))

    def epoch(error, loss):
        return Epoch(1, 1, 1.0, 50.0, loss, error, 0.1, 1.0, 1.0)

    equal, better, worse = (tuning.judged(config, epoch(*last)) for last in ((10.0, 0.4), (10.0, 0.3), (12.0, 0.1)))
    search = tuning.Search("sgd", [tuning.judged(config, None), equal, better, worse], {})
    assert search.best is better


def test_a_damping_that_is_given_is_kept():
    assert set(tuning.ranges(Config(optimizer="kfac", damping=0.5))) == {"lr"}
    assert tuning.ranges(Config(optimizer="kfac"))["damping"] == pytest.approx((0.02, 2))
