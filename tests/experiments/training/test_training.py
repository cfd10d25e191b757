"""Training runs: exact resumption, files that survive anything, one-line errors, comparisons."""

import dataclasses
import errno
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments import models
from gnomon.experiments.training import compare
from gnomon.experiments.training.config import (
    OPTIMIZER_NAMES,
    Config,
    TrainingError,
    as_toml,
    completed,
    config_from,
    read_settings,
)
from gnomon.experiments.training.folder import RunFolder
from gnomon.experiments.training.run import train
from gnomon.experiments.training.schedule import rate
from gnomon.experiments.training.trainer import load_data
from support.training import SMALL, StopAt, assert_one_line, command, options, small, written

COMMAND = [sys.executable, "-c", "from gnomon.cli import main; main()", "train"]


def weights(run):
    """All numbers that a run ended with: those of the model and of the optimizer."""
    state = torch.load(RunFolder(run).checkpoint)
    found = {f"model {name}": value for name, value in state["model"].items()}
    for i, of_parameter in state["optimizer"]["state"].items():
        found |= {f"{i} {name}": value for name, value in of_parameter.items() if isinstance(value, torch.Tensor)}
    return found


def assert_equal(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    measured = [
        [dataclasses.replace(e, seconds=0, cpu_seconds=0) for e in RunFolder(run).epochs()] for run in (one, other)
    ]
    assert measured[0] == measured[1]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Drawing takes longer than these runs; that it works is seen where a run has a process of its own."""
    monkeypatch.setattr("gnomon.experiments.training.run.draw_run", lambda epochs, config, path: None)


@pytest.fixture
def every_step(monkeypatch):
    """Reporters are told of each step."""
    monkeypatch.setattr("gnomon.experiments.training.run.CHECK_EVERY", 1)


# ---------------------------------------------------------------------- resumption
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ingd", "kfac", "adamw", "sgd", "lion", "soap", "muon"])
def test_an_interrupted_run_ends_as_one_that_was_not(optimizer, tmp_path, every_step):
    if optimizer in ("lion", "soap", "muon"):
        pytest.importorskip("pytorch_optimizer")
    config = small(optimizer=optimizer, lr=3e-3)
    train(config, tmp_path / "whole")
    stopped = train(config, tmp_path / "parts", reporter=StopAt(steps=13))
    assert stopped.signal == signal.SIGINT
    assert torch.load(tmp_path / "parts" / "checkpoint.pt")["step"] == 3
    train(config, tmp_path / "parts", resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_convolutions_in_channels_last_and_dropout_resume_too(tmp_path, every_step, monkeypatch):
    class Network(nn.Module):
        def __init__(self, classes, channels):
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(6, 6, 1)),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes)),
            )

        def forward(self, x):
            assert x.is_contiguous(memory_format=torch.channels_last)
            return self.layers(x)

    monkeypatch.setattr(models, "build", lambda name, classes, channels: Network(classes, channels))
    config = small(model="cnn", data="digits")
    train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", reporter=StopAt(steps=7))
    torch.randn(3)  # what else draws numbers does not matter
    train(config, tmp_path / "parts", resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.spawns
@pytest.mark.parametrize("optimizer", ["ingd", "kfac", "adamw"])
def test_a_killed_process_is_resumed_exactly(optimizer, tmp_path):
    """``kill -9`` at any moment, also while a checkpoint is being written."""
    config = small(optimizer=optimizer, lr=3e-3)
    train(config, tmp_path / "whole")
    steps = random.randrange(1, 20)
    child = os.fork()  # a process of its own that need not import torch again
    if child == 0:
        try:
            train(config, tmp_path / "parts", save_every=0)
        finally:
            os._exit(0)
    ended = False
    while not ended and _steps_saved(tmp_path / "parts") < steps:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert steps <= _steps_saved(tmp_path / "parts") <= 20
    train(config, tmp_path / "parts", resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "parts")


def _steps_saved(run):
    try:
        state = torch.load(run / "checkpoint.pt")
    except FileNotFoundError:
        return 0
    return 10 * state["epoch"] + state["step"]


@pytest.mark.slow
def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    config = small(epochs=3)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "run", reporter=StopAt(epochs=1))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() * 3 + '{"epoch": 4, "st')
    train(config, tmp_path / "run", resume=True)
    assert [epoch.epoch for epoch in RunFolder(tmp_path / "run").epochs()] == [1, 2, 3]
    assert_equal(tmp_path / "whole", tmp_path / "run")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    config = completed(small(epochs=1))
    RunFolder(tmp_path / "run").begin(config, "cpu")
    outcome = train(config, tmp_path / "run", resume=True)
    assert len(outcome.epochs) == 1


@pytest.mark.slow
def test_epochs_may_be_added_unless_the_schedule_depends_on_them(tmp_path):
    train(small(epochs=3), tmp_path / "whole")
    train(small(epochs=1), tmp_path / "run")
    result = command("train", "--output", tmp_path / "run", "--resume", "--epochs", 3)
    assert result.exit_code == 0, result.output
    assert_equal(tmp_path / "whole", tmp_path / "run")
    train(small(epochs=1, schedule="cosine"), tmp_path / "cosine")
    assert_one_line(
        command("train", "--output", tmp_path / "cosine", "--resume", "--epochs", 3), "epochs = 1", "another --output"
    )


@pytest.mark.spawns
def test_ctrl_c(tmp_path):
    """In a process of its own: a checkpoint, how to go on, and the exit code of the signal."""
    output = tmp_path / "run"
    settings = options(**{**SMALL, "epochs": 500}, output=output, save_every=1000)
    process = subprocess.Popen([*COMMAND, *settings], stderr=subprocess.PIPE, text=True)
    while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.count("\n") == 1
    assert f"gnomon train --output {output} --resume" in errors
    assert _steps_saved(output) >= 10
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------- disks and checkpoints
@pytest.mark.slow
@pytest.mark.parametrize("where", ["os.fsync", "os.replace", "torch.save"])
def test_a_full_disk_leaves_the_last_checkpoint(where, tmp_path, monkeypatch):
    train(small(epochs=1), tmp_path / "run")
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()

    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(where, full)
        result = command("train", "--output", tmp_path / "run", "--resume", "--epochs", 2)
    assert_one_line(result, "No space left on device", "--resume")
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert not list((tmp_path / "run").glob("*.part"))
    train(small(), tmp_path / "whole")
    train(small(), tmp_path / "run", resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_device_that_is_really_full(tmp_path):
    run = RunFolder(tmp_path / "run")
    train(small(epochs=1), run.path)
    before = run.checkpoint.read_bytes()
    run.checkpoint.with_name("checkpoint.pt.part").symlink_to("/dev/full")
    result = command("train", "--output", run.path, "--resume", "--epochs", 2)
    assert_one_line(result, "checkpoint.pt", "No space left on device")
    assert run.checkpoint.read_bytes() == before


@pytest.mark.slow
def test_a_checkpoint_of_another_run(tmp_path):
    train(small(epochs=1), tmp_path / "mlp")
    train(small(epochs=1, optimizer="adamw"), tmp_path / "adamw")
    (tmp_path / "mlp" / "checkpoint.pt").write_bytes((tmp_path / "adamw" / "checkpoint.pt").read_bytes())
    result = command("train", "--output", tmp_path / "mlp", "--resume", "--epochs", 2)
    assert_one_line(result, "checkpoint.pt", "optimizer = adamw instead of ingd", "delete it")
    (tmp_path / "mlp" / "checkpoint.pt").write_bytes(b"not one")
    assert_one_line(command("train", "--output", tmp_path / "mlp", "--resume"), "no checkpoint of a run", "delete it")
    state = torch.load(tmp_path / "adamw" / "checkpoint.pt")
    state["classes"] = 100
    torch.save(state, tmp_path / "adamw" / "checkpoint.pt")
    assert_one_line(command("train", "--output", tmp_path / "adamw", "--resume"), "classes 100", "has 10")
    state["classes"], state["model"] = 10, nn.Linear(2, 2).state_dict()
    torch.save(state, tmp_path / "adamw" / "checkpoint.pt")
    assert_one_line(command("train", "--output", tmp_path / "adamw", "--resume"), "another model")


@pytest.mark.slow
def test_a_folder_with_a_run(tmp_path):
    arguments = ["train", *options(**{**SMALL, "epochs": 1}), "--output", tmp_path / "run"]
    assert command(*arguments).exit_code == 0
    assert_one_line(command(*arguments), "holds a run", "--resume", "--output")
    assert_one_line(command(*arguments, "--resume", "--model", "cnn"), "model = mlp, not cnn", "another --output")
    assert_one_line(command(*arguments, "--resume", "--optimizer", "sgd"), "optimizer = ingd, not sgd")
    assert command(*arguments, "--resume").exit_code == 0
    (tmp_path / "file").touch()
    assert_one_line(command(*arguments[:-1], tmp_path / "file" / "run"), "cannot write", "--output")


def test_a_loss_that_is_not_finite(tmp_path, every_step):
    config = small(optimizer="sgd", lr=1e30, epochs=1)
    assert "not finite" in train(config).failure
    result = command("train", *options(**SMALL, optimizer="sgd", lr=1e30, output=tmp_path / "run", save_every=0))
    assert_one_line(result, "not finite", "--lr")
    checkpoint = RunFolder(tmp_path / "run").checkpoint
    assert checkpoint.exists() == ("checkpoint" in result.output)  # it speaks of one only where there is one
    if checkpoint.exists():  # the weights of the last one are finite
        assert all(value.isfinite().all() for value in torch.load(checkpoint)["model"].values())
    result = command("train", *options(**SMALL, optimizer="sgd", lr=1e30, output=tmp_path / "other"))
    assert_one_line(result, "not finite", "--lr")
    assert "checkpoint" not in result.output


# ---------------------------------------------------------------------- settings
def test_config_files(tmp_path):
    config = completed(Config(model="gpt", data="python-text", data_dir='a "b" \\ ü', lr=1e-5, compile=True))
    (tmp_path / "run.toml").write_text(as_toml(config))
    assert config_from(read_settings(tmp_path / "run.toml")) == config
    assert completed(config) == config
    (tmp_path / "run.toml").write_text(f"{as_toml(small(optimizer='adamw', epochs=1))}lr = 0.5\n")
    result = command("train", *options(config=tmp_path / "run.toml", lr=0.02, output=tmp_path / "run"))
    assert result.exit_code == 0, result.output
    begun = RunFolder(tmp_path / "run").config()
    assert (begun.optimizer, begun.lr, begun.train_limit) == ("adamw", 0.02, 320)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("momentun = 0.9", ["momentun", "momentum"]),
        ("lr = 'much'", ["lr must be a number", "'much'"]),
        ("epochs = true", ["epochs must be an integer"]),
        ("lr = ", ["not a TOML file"]),
        ("epochs = 0", ["epochs must be at least 1"]),
        ("lr = -1.0", ["lr must be positive"]),
        ("optimizer = 'adamw'\ndamping = 0.1", ["damping = 0.1", "adamw", "leave it out"]),
    ],
)
def test_bad_config_files(text, words, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    assert_one_line(command("train", "--config", tmp_path / "run.toml"), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "vgg16"], ["unknown model 'vgg16'", "vgg16-bn"]),
        (["--model", "resnet"], ["unknown model"]),
        (["--optimizer", "adamv"], ["unknown optimizer 'adamv'", "adamw"]),
        (["--data", "cifar"], ["cifar", "cifar100"]),
        (["--data", "cifar100", "--data-dir", "/nowhere"], ["/nowhere"]),
        (["--model", "gpt", "--data", "digits"], ["gpt does not fit the data digits", "another model"]),
        (["--structure", "round"], ["round"]),
        (["--device", "abacus"], ["abacus", "auto"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml", "No such file"]),
        (["--train-limit", "100000"], ["train_limit", "100000"]),
        (["--schedule", "cosinus"], ["cosine"]),
    ],
)
def test_bad_options(arguments, words, tmp_path):
    result = command("train", "--output", tmp_path / "run", *arguments)
    assert_one_line(result, *words)
    assert not (tmp_path / "run").exists()


def test_a_network_with_the_wrong_number_of_classes(monkeypatch):
    monkeypatch.setattr(models, "build", lambda *a, **k: nn.Sequential(nn.Flatten(), nn.Linear(64, 7)))
    with pytest.raises(TrainingError, match=r"\(2, 7\).*10 classes.*another model"):
        train(small())


def test_the_papers_protocol():
    config = completed(Config(model="repvgg-b1g4", preset="paper"))
    assert (config.lr, config.damping, config.update_every) == (2.5e-3, 5e-4, 60)
    assert (config.momentum, config.weight_decay, config.batch_size, config.epochs) == (0.9, 0.01, 128, 120)
    assert completed(Config(model="rexnetr-100", optimizer="kfac", preset="paper")).lr == 7e-4
    decays = {name: completed(Config(optimizer=name)).weight_decay for name in OPTIMIZER_NAMES}
    assert decays == {
        **{"ingd": 0.2, "kfac": 0.2, "sgd": 1e-3, "adam": 1e-3, "adamw": 1e-2, "lion": 0.1},
        **{"soap": 1e-2, "muon": 1e-2},
    }
    rates = {name: completed(Config(model="regnetz-500mf", optimizer=name)).lr for name in ("adamw", "lion", "sgd")}
    assert rates == {"adamw": 4e-3, "lion": 6e-4, "sgd": 6e-3}
    assert completed(Config(model="convmixer180-16")).lr == 1e-2  # the robust preset's units are others


def test_schedules():
    paper = completed(Config())
    assert [rate(paper, epoch * 10, 10) for epoch in (0, 39, 40, 80, 119)] == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    for epochs in (120, 6):
        thirds = completed(Config(schedule="thirds", epochs=epochs))
        factors = [rate(thirds, i * epochs // 12 * 10, 10) for i in (0, 3, 4, 8, 11)]
        assert factors == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    text = completed(Config(model="gpt", epochs=1))
    assert rate(text, 0, 400) == pytest.approx(1 / 20)
    assert rate(text, 20, 400) == pytest.approx(1)
    assert rate(text, 399, 400) < 1e-3
    assert rate(completed(Config(schedule="constant")), 10**6, 10) == 1


@pytest.mark.slow
def test_runs_depend_on_the_seed_alone():
    losses = [train(small(epochs=1, seed=seed)).epochs[-1].loss for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_learning_rates_and_times_are_recorded():
    outcome = train(small(epochs=3, schedule="thirds", optimizer="sgd", lr=0.1))
    assert [epoch.lr for epoch in outcome.epochs] == pytest.approx([0.1, 0.01, 0.001])
    assert [epoch.steps for epoch in outcome.epochs] == [10, 20, 30]
    seconds = [epoch.seconds for epoch in outcome.epochs]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    loss, error = outcome.trainer.measure()
    assert (loss, error) == (outcome.epochs[-1].test_loss, outcome.epochs[-1].test_error)


@pytest.mark.slow
def test_text_and_half_precision():
    text = Config(model="gpt", data="python-text", train_limit=16, test_limit=8, batch_size=8, epochs=1, amp="bf16")
    outcome = train(text)
    assert math.log(256) - 2 < outcome.epochs[0].test_loss < math.log(256) + 2


def test_validation_is_a_part_of_the_training_set():
    parts = load_data(small(validation=0.25))
    assert (parts.train_size, parts.test_size) == (240, 80)
    assert train(small(validation=0.25, epochs=1)).epochs[0].steps == 7


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    arguments = ["train", *options(**{**SMALL, "epochs": 1}), "--output", tmp_path / "run"]
    assert command(*arguments, "--tensorboard").exit_code == 0
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


# ---------------------------------------------------------------------- comparison
@pytest.mark.slow
def test_the_papers_table(tmp_path):
    cnn = Config(model="cnn", data="cifar100", epochs=12)
    runs = [
        written(tmp_path / "a", cnn, [90.0, 90.0] + [30.0] * 10),
        written(tmp_path / "b", dataclasses.replace(cnn, seed=1, data_dir="elsewhere"), [90.0, 90.0] + [32.0] * 10),
        written(tmp_path / "c", dataclasses.replace(cnn, optimizer="sgd", epochs=120), [80.0, 80.0] + [40.0] * 10),
        written(tmp_path / "d", dataclasses.replace(cnn, optimizer="sgd", lr=1.0), [80.0, 80.0] + [50.0] * 10),
    ]
    result = command("compare", *runs, "--output", tmp_path / "curves.png")
    assert result.exit_code == 0, result.output
    assert re.search(r"cifar100\s+INGD\s+31.00 ± 12.71", result.output)  # Student's t with one degree of freedom
    assert re.search(r"SGD, epochs 120, lr 0.05\s+40.00", result.output)
    assert re.search(r"SGD, epochs 12, lr 1.0\s+50.00", result.output)
    assert "12/120" in result.output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    ((by_epoch, by_time),) = compare.charts(compare.read_runs(runs))
    assert by_epoch.whole
    assert [line.color.name for line in by_time.lines] == ["blue", "grey", "grey"]
    assert len({tuple(line.dashes) for line in by_time.lines[1:]}) == 2  # one optimizer, two settings
    assert compare.read_runs(runs[:1])[0].scores(last=11) == pytest.approx([(90 + 300) / 11])
    assert_one_line(command("compare", tmp_path), "nothing to compare", "holds no run")
    assert_one_line(command("compare", written(tmp_path / "e", cnn, [])), "has not finished an epoch")
    assert_one_line(command("compare", *runs, "--output", tmp_path), "cannot write --output")


# ---------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("gnomon tr", "train"),
        ("gnomon train --model convmixer2", "convmixer256-12"),
        ("gnomon train --data cifar1", "cifar100"),
        ("gnomon train --optimizer adam", "adamw"),
        ("gnomon tune --optimizer in", "ingd"),
        ("gnomon train --sched", "--schedule"),
    ],
)
def test_the_shell_completes(typed, wanted):
    words = typed.split()
    environment = {"_GNOMON_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(main, [], env=environment, prog_name="gnomon")
    assert wanted in result.output.split()


@pytest.mark.parametrize("name", ["train", "compare", "tune"])
def test_help_fits_a_terminal(name):
    text = command(name, "--help", COLUMNS="80").output
    assert max(map(len, text.splitlines())) <= 80
    assert "Show this message and exit." in text
