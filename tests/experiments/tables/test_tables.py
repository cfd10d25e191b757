"""gnomon reproduce for the tables: equal budgets, resumption, equal time, and pages that are honest either way."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("optuna", reason="gnomon reproduce needs optuna (extra 'experiments')")

from gnomon.cli import main
from gnomon.experiments import models
from gnomon.experiments.commands.reproduce import TABLE_NAMES
from gnomon.experiments.tables import published, runs, study, tolerance
from gnomon.experiments.tables.report import Report
from gnomon.experiments.tables.reproduce import reproduce_table
from gnomon.experiments.tables.runs import Result, Run, Timing
from gnomon.experiments.tables.scales import TABLES, Grid, Scale
from gnomon.experiments.tables.section import Section
from gnomon.experiments.tables.study import Method, Study, as_trial, within
from gnomon.experiments.tables.verdict import claim
from gnomon.experiments.training.config import Config, TrainingError, completed
from gnomon.experiments.training.trainer import Epoch
from gnomon.experiments.training.tune import for_optimizer, rate_grid

TASK = Config(train_limit=160, test_limit=100, batch_size=32, epochs=2, schedule="thirds")
TINY = Scale(
    (TASK,),
    ("sgd", "ingd"),
    settings=2,
    last=1,
    seeds=(1, 2),
    grid=Grid(replace(TASK, epochs=1), rates=(0.01, 1e9), dampings=(0.2,), presets=("robust",)),
)


def command(*arguments):
    return CliRunner().invoke(main, ["reproduce", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """A whole table, from nothing to its page."""
    output = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(TABLES, "cifar100", {"small": TINY})
        result = command("cifar100", "--scale", "small", "--jobs", 2, "--output", output)
    assert result.exit_code == 0, result.output
    return output / "cifar100", result.output


def _rank(result):
    trial = as_trial(result)
    return trial.value, trial.tie


# ---------------------------------------------------------------------- the whole
@pytest.mark.spawns
def test_every_optimizer_has_the_same_budget_and_the_test_set_is_not_looked_at(reproduced):
    folder, _ = reproduced
    plan = Study(TINY, folder)
    for name in TINY.optimizers:
        trials, finals = plan.trials(plan.tasks[0], name), plan.finals(plan.tasks[0], name)
        assert len(trials) == TINY.settings
        assert {run.config.validation for run in trials} == {TINY.validation}
        assert {run.config.validation for run in finals} == {0.0}
        assert {(r.config.epochs, r.config.train_limit) for r in (*trials, *finals)} == {(2, 160)}
        assert [run.config.seed for run in finals] == list(TINY.seeds)
        assert TASK.seed not in TINY.seeds
        best = min((plan.result(run) for run in trials), key=_rank)
        assert {run.config.lr for run in finals} == {best.config.lr}
        assert not any((run.folder / "checkpoint.pt").exists() for run in trials)
        assert all((run.folder / "checkpoint.pt").exists() for run in finals)
    assert plan.left() == plan.to_come() == []


@pytest.mark.spawns
def test_what_is_written(reproduced):
    folder, shown = reproduced
    text = (folder / "results.json").read_text()
    data = json.loads(text)
    assert str(folder) not in text
    (task,) = data["tasks"]
    assert [method["optimizer"] for method in task["methods"]] == list(TINY.optimizers)
    assert all(len(method["scores"]) == len(TINY.seeds) for method in task["methods"])
    assert {name: len(tried) for name, tried in task["tried"].items()} == dict.fromkeys(TINY.optimizers, 2)
    assert [(cell["optimizer"], cell["lr"]) for cell in data["grid"]][1:3] == [("ingd", 1e9), ("kfac", 0.01)]
    assert data["grid"][-1]["test error"] is None  # KFAC at that rate
    markdown, page = (folder / "cifar100.md").read_text(), (folder / "index.html").read_text()
    for method in task["methods"]:
        assert f"{method['mean']:.2f} ±" in markdown
        assert f"{method['mean']:.2f} ±" in page
    for name in ("SGD", "INGD"):
        assert len(re.findall(rf"^\| \**(ours \()?{name}", markdown, re.MULTILINE)) == 4  # results, settings, paper's
    assert page.count('<svg class="chart"') == 4  # by epoch, by time, and a grid of INGD and of KFAC
    assert not re.search(r"<(img|script|link)|http-equiv", page)
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(pictures) == 4
    assert all("<svg" in (folder / picture).read_text() for picture in pictures)
    assert page.count("<dt>Verdict</dt>") == 2
    assert "26.06" in markdown  # the paper's
    assert "about 0 minutes" in shown
    assert "At equal epochs" in shown


@pytest.mark.spawns
def test_what_is_finished_is_not_run_again(reproduced, monkeypatch):
    folder, _ = reproduced
    before = (folder / "results.json").read_text()
    monkeypatch.setitem(TABLES, "cifar100", {"small": TINY})
    monkeypatch.setattr(study, "Workers", lambda count: pytest.fail("everything is on disk"))
    reproduce_table("cifar100", folder.parent, "small", console=Console(quiet=True))
    assert (folder / "results.json").read_text() == before
    other = replace(TINY, tasks=(replace(TASK, epochs=3),))
    monkeypatch.setitem(TABLES, "cifar100", {"small": other})
    with pytest.raises(TrainingError, match="begun with epochs = 2, not 3"):
        reproduce_table("cifar100", folder.parent, "small", console=Console(quiet=True))


LONG = Scale((replace(TASK, epochs=500),), ("sgd", "ingd"), settings=1, last=1, seeds=(1,))
FIRST = "gpt/runs/mlp/sgd-lr0.05-seed1"
PROGRAM = """
from gnomon.cli import main
from gnomon.experiments.tables.scales import TABLES, Scale
from gnomon.experiments.training.config import Config
if __name__ == "__main__":
    task = Config(train_limit=160, test_limit=100, batch_size=32, epochs=500)
    TABLES["gpt"] = {"small": Scale((task,), ("sgd", "ingd"), settings=1, last=1, seeds=(1,))}
    main(["reproduce", "gpt", "--scale", "small", "--jobs", "1", "--output", "."])
"""


@pytest.fixture
def ctrl_c_interrupts():
    """Python's own reaction to Ctrl-C, which background jobs of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.spawns
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_saves(tmp_path, monkeypatch):
    monkeypatch.setitem(TABLES, "gpt", {"small": LONG})

    def interrupt():
        _until(lambda: _epochs(tmp_path) > 3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    result = command("gpt", "--scale", "small", "--jobs", 1, "--output", tmp_path)
    assert result.exit_code == 130
    assert "Interrupted. Finished runs are kept. Run the same command again to continue." in result.output
    assert (tmp_path / FIRST / "checkpoint.pt").exists()  # within a minute, so at the interruption
    assert not multiprocessing.active_children()


@pytest.mark.spawns
def test_a_command_that_is_killed_leaves_nobody_behind(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=output, stderr=output)
    _until(lambda: _epochs(tmp_path) > 3)
    children = _children(process.pid)
    assert children
    process.kill()
    process.wait()
    _until(lambda: not any(map(_alive, children)))
    assert (tmp_path / FIRST / "checkpoint.pt").exists()


def _epochs(folder):
    metrics = folder / FIRST / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def _until(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def _children(parent):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


# ---------------------------------------------------------------------- the parts
def epochs(errors, seconds=1.0):
    return [
        Epoch(i + 1, 10 * (i + 1), 1.0, 50.0, error / 10, error, 0.1, 2 * seconds * (i + 1), seconds * (i + 1))
        for i, error in enumerate(errors)
    ]


def method(optimizer, *runs, seconds=1.0, last=1):
    config = completed(for_optimizer(Config(model="cnn", data="cifar100", epochs=len(runs[0])), optimizer))
    return Method(config, [Result(config, epochs(errors, seconds)) for errors in runs], last)


def test_equal_time():
    slow = method("ingd", [60.0, 50.0, 40.0, 30.0], [62.0, 52.0, 42.0, 32.0], seconds=1.5)
    fast = method("sgd", [70.0, 60.0, 50.0, 45.0], [70.0, 60.0, 50.0, 45.0])
    assert fast.seconds("cpu") == 4.0
    assert fast.seconds("wall") == 8.0
    assert slow.scores_in_time_of(fast, "cpu") == [50.0, 52.0]  # 1.5 and 3.0 of 4.0 seconds
    assert slow.scores_in_time_of(fast, "wall") == [50.0, 52.0]
    assert slow.scores_in_time_of(slow, "cpu") == slow.scores() == [30.0, 32.0]
    assert fast.scores_in_time_of(slow, "cpu") == fast.scores() == [45.0, 45.0]
    assert slow.scores_in_time_of(method("sgd", [9.0], [9.0]), "cpu") is None
    assert [epoch.epoch for epoch in within(epochs([3.0, 2.0, 1.0]), 2.0, "cpu")] == [1, 2]  # one that ends just then
    assert method("sgd", [4.0, 2.0, 1.0], last=2).scores() == [1.5]


def section(*methods, shorter=None):
    plan = Study(Scale((TASK,), tuple(m.optimizer for m in methods), settings=5, last=1), None)
    return Section(Config(model="cnn", data="cifar100"), list(methods), [], shorter, plan)


def test_words_follow_the_numbers():
    sgd = method("sgd", [60.0, 45.0], [60.0, 46.0])
    ahead = section(sgd, method("ingd", [50.0, 40.0], [50.0, 40.5], seconds=2.0))
    text = " ".join(ahead.findings())
    assert "INGD has the lowest mean, 40.25 %, at or below that of SGD." in text
    assert "INGD stood at 50.00 %, above SGD's 45.50 %" in text
    behind = section(sgd, method("ingd", [50.0, 48.0], [50.0, 48.5], seconds=0.5))
    text = " ".join(behind.findings())
    assert "SGD has the lowest mean, 45.50 %. INGD has 48.25 %; SGD has less." in text
    assert "INGD stood at 48.25 %, above SGD's" in text
    assert behind.table().rows[0][3] == "+2.75 ± 3.18"
    config = sgd.config
    lost = Method(config, [Result(config, [], True), sgd.results[0]], 1)
    torn = section(lost, method("ingd", [50.0, 40.0]))
    assert torn.table().rows[0][2] == "diverged in 1 of 2"
    assert "Runs of SGD diverged" in " ".join(torn.findings())


def test_the_verdict_follows_the_numbers():
    def words(ingd, kfac, sgd):
        found = claim("cifar100", [section(method("sgd", *sgd), method("kfac", *kfac), method("ingd", *ingd))])
        return found.verdict

    assert "INGD has a lower test error than KFAC on 4, and the lowest one of all on 3." in claim("cifar100", []).paper
    best = words(ingd=([40.0], [40.5]), kfac=([45.0], [45.6]), sgd=([50.0], [50.0]))
    assert "better than KFAC holds" in best
    assert "competitive with the others holds" in best
    close = words(ingd=([40.0], [44.0]), kfac=([43.0], [43.0]), sgd=([41.5], [41.5]))
    assert "not by more than the interval" in close
    assert "SGD has less, but within the interval" in close
    worst = words(ingd=([60.0], [60.0]), kfac=([43.0], [43.1]), sgd=([50.0], [50.1]))
    assert "better than KFAC does not hold" in worst
    assert "does not hold: SGD has less" in worst
    assert "cannot be compared" in claim("gpt", [section(method("sgd", [5.0]))]).verdict
    assert "no language model" in claim("gpt", []).paper


@pytest.mark.spawns
def test_pages_of_runs_that_go_on(reproduced, tmp_path):
    """First no optimizer has finished, then one has."""
    folder, _ = reproduced
    for optimizers in ((), ("sgd",)):
        part = tmp_path / str(len(optimizers))
        for run in folder.glob("*/mlp/*"):
            if run.name.startswith(optimizers or "nobody"):
                shutil.copytree(run, part / run.relative_to(folder))
        plan = Study(TINY, part)
        left, to_come = plan.left(), plan.to_come()
        ended, total = plan.progress
        assert total == ended + len(left) + len(to_come)
        page = Report("cifar100", "small", plan).document(plan.progress).html()
        assert f"{ended} of {total} runs are finished" in page
        assert 'http-equiv="refresh"' in page
        assert "Verdict" not in page
        assert ("<svg" in page) == bool(optimizers)
        assert ("No optimizer has finished" in page) == (not optimizers)


def test_a_shorter_run_fits_into_the_rivals_time(tmp_path, monkeypatch):
    plan = Study(replace(TINY, optimizers=("sgd", "adamw", "ingd")), tmp_path)
    task = plan.tasks[0]
    found = {
        "sgd": method("sgd", [5.0] * 10, seconds=1.0),
        "adamw": method("adamw", [5.0] * 10, seconds=0.9),
        "ingd": method("ingd", [5.0] * 10, seconds=1.3),
    }
    monkeypatch.setattr(plan, "method", lambda task, name: found[name])
    assert [(run.config.epochs, run.config.seed) for run in plan.shorter(task)] == [(6, 1), (6, 2)]
    found["ingd"] = method("ingd", [5.0] * 10, seconds=0.8)
    assert plan.shorter(task) == []


@pytest.mark.parametrize(("kfac", "verdict"), [(20.0, "no difference"), (90.0, "holds in"), (None, "holds in")])
def test_what_is_borne(kfac, verdict):
    grid = Grid(TASK, rates=(0.01, 0.1), dampings=(0.2,), presets=("paper",))
    ours = tolerance.Map("ingd", "paper", {(0.01, 0.2): 20.0, (0.1, 0.2): 29.0})
    theirs = tolerance.Map("kfac", "paper", {(0.01, 0.2): 21.0, (0.1, 0.2): kfac})
    assert verdict in tolerance.comparison(ours, theirs, grid).verdict
    if kfac != 20.0:
        worse = tolerance.comparison(replace(ours, errors=theirs.errors), replace(theirs, errors=ours.errors), grid)
        assert "does not hold" in worse.verdict
    assert tolerance.Map("ingd", "paper", {(0.01, 0.2): None}).tolerated == set()


def test_the_grid_of_rates_is_centred_on_the_default():
    for name in ("sgd", "ingd"):
        one = for_optimizer(TASK, name)
        rates = [config.lr for config in rate_grid(one, 5)]
        default = completed(one).lr
        assert rates == pytest.approx([default * 10 ** (i / 2 - 1) for i in range(5)], rel=1e-2)
        assert [config.lr for config in rate_grid(one, 1)] == [default]
        assert {config.damping for config in rate_grid(one, 5)} == {completed(one).damping}


def test_time_of_a_run():
    timing = Timing(0.1, train_size=1000, test_size=300)
    assert timing.of(Config(batch_size=10, epochs=2)) == pytest.approx(2 * 0.1 * (1000 + 100) / 10)
    assert timing.of(Config(batch_size=10, epochs=1, validation=0.1)) == pytest.approx(0.1 * (900 + 100 / 3) / 10)
    assert runs.rehearse(replace(TASK, lr=1e-6), steps=2).train_size == 160


def test_a_run_that_diverges_is_a_result(tmp_path):
    run = Run(completed(replace(TASK, optimizer="sgd", lr=1e12)), tmp_path / "run")
    assert run.result() is None
    run.perform()
    assert run.result().diverged
    assert as_trial(run.result()).value == float("inf")


# ---------------------------------------------------------------------- names and scales
def test_tables_and_scales():
    assert {name.value for name in TABLE_NAMES} == set(TABLES)
    for name, scales in TABLES.items():
        assert set(scales) == {"full", "small", "tiny"}
        for scale in scales.values():
            assert {"ingd", "sgd", "adamw"} <= set(scale.optimizers)
            assert all(task.seed not in scale.seeds for task in scale.tasks)
        if name in published.ERRORS:
            (first, *_) = scales["full"].tasks
            done = completed(first)
            assert (done.epochs, done.batch_size, done.schedule, done.damping) == (120, 128, "step", 0.005)
            assert [task.model for task in scales["full"].tasks] == list(published.ERRORS[name])
            assert all(model in models.MODELS for model in published.ERRORS[name])
    assert asdict(TABLES["imagenet-100"]["full"])["settings"] == 1


def test_what_is_not_installed_is_left_out_and_said(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "ELSEWHERE", {"lion": "no_such_package"})
    plan = Study(replace(TINY, optimizers=("sgd", "lion", "ingd")), tmp_path)
    assert plan.scale.optimizers == ("sgd", "ingd")
    assert plan.absent == ["Lion (no_such_package is not installed)"]


def test_bad_input(tmp_path):
    for arguments, message in (
        (["cifar1000"], "cifar1000"),
        (["cifar100", "--quick"], "is a table and has no --quick"),
        (["log-det", "--jobs", "2"], "is a figure and has no --jobs"),
        (["cifar100", "--scale", "large"], "large"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2
        assert message in result.output
    result = command("cifar100", "--scale", "small", "--data-dir", tmp_path, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1
    with pytest.raises(TrainingError, match="unknown table 'cifar'; did you mean cifar100"):
        reproduce_table("cifar", tmp_path)
    with pytest.raises(TrainingError, match="unknown scale 'big'; there are full, small, tiny"):
        reproduce_table("gpt", tmp_path, "big")
    with pytest.raises(TrainingError, match="jobs must be at least 1, got 0"):
        reproduce_table("gpt", tmp_path, "small", jobs=0)
