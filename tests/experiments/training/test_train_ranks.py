"""Training in several processes: the same weights as in one, one voice, and what follows when one of them is gone."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback

import pytest
import torch
from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments.training.config import Config, TrainingError
from gnomon.experiments.training.folder import RunFolder
from gnomon.experiments.training.ranks import ALONE, Ranks, together
from gnomon.experiments.training.report import Silent
from gnomon.experiments.training.run import train
from gnomon.experiments.training.trainer import Trainer, chosen_device, load_data

SMALL = {"train_limit": 330, "test_limit": 101, "batch_size": 32, "epochs": 2}
GNOMON = [sys.executable, "-m", "gnomon", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gnomon", "train"]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")


def options(**settings):
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def environment(rank, size, port):
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_ranks(size, work):
    """Do ``work(ranks)`` in so many forked processes, which need not import torch again."""
    port, children = free_port(), []
    for rank in range(size):
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.environ.update(environment(rank, size, port))
                torch.set_num_threads(1)
                with together(60) as ranks:
                    work(ranks)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * size


def saved(run):
    return torch.load(RunFolder(run).checkpoint)


def assert_close(one, other):
    """Weights and measures; the sums of floating-point numbers are taken in another order."""
    first, second = saved(one)["model"], saved(other)["model"]
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    for a, b in zip(RunFolder(one).epochs(), RunFolder(other).epochs(), strict=True):
        assert a.steps == b.steps
        assert (a.loss, a.test_loss) == pytest.approx((b.loss, b.test_loss), rel=1e-3, abs=1e-4)
        assert (a.train_error, a.test_error) == pytest.approx((b.train_error, b.test_error), abs=1e-4)


class StopAt(Silent):
    """A signal to this process alone."""

    def __init__(self, steps):
        self.steps = steps

    def step(self, trainer):
        if trainer.steps == self.steps:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr("gnomon.experiments.training.run.draw_run", lambda epochs, config, path: None)


# ---------------------------------------------------------------------- the same steps
@pytest.mark.spawns
@needs_fork
@pytest.mark.parametrize("optimizer", ["ingd", "kfac", "adamw"])
def test_any_number_of_ranks_gives_the_weights_of_one(optimizer, tmp_path):
    config = Config(**SMALL, optimizer=optimizer, update_every=3 if optimizer != "adamw" else None)
    train(config, tmp_path / "1")
    for size in (2, 4):
        on_ranks(size, lambda ranks, size=size: train(config, tmp_path / str(size), ranks=ranks))
        assert_close(tmp_path / "1", tmp_path / str(size))


@pytest.mark.spawns
@needs_fork
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("gnomon.experiments.training.run.CHECK_EVERY", 1)
    config, parts = Config(**SMALL), tmp_path / "parts"
    train(config, tmp_path / "whole")

    def begin(ranks):
        reporter = StopAt(7) if ranks.rank == 1 else Silent()  # the others hear of it
        assert train(config, parts, ranks=ranks, reporter=reporter).signal == signal.SIGTERM

    on_ranks(2, begin)
    assert saved(parts)["step"] == 7
    on_ranks(4, lambda ranks: train(config, parts, resume=True, ranks=ranks, reporter=StopAt(13)))
    assert (saved(parts)["epoch"], saved(parts)["step"]) == (1, 3)
    train(config, parts, resume=True)
    assert_close(tmp_path / "whole", parts)


@pytest.mark.spawns
@needs_fork
def test_batch_norm_is_saved_and_measured_as_the_first_rank_has_it(tmp_path):
    config = Config(**{**SMALL, "epochs": 1}, model="cnn", optimizer="sgd")
    on_ranks(2, lambda ranks: train(config, tmp_path / "run", ranks=ranks))
    alone = Trainer(RunFolder(tmp_path / "run").config(), load_data(config))
    alone.load(saved(tmp_path / "run"))
    (epoch,) = RunFolder(tmp_path / "run").epochs()
    assert alone.measure() == pytest.approx((epoch.test_loss, epoch.test_error), rel=1e-4)


def test_shares_are_equal_or_refused():
    batch = torch.arange(12)
    assert torch.equal(torch.cat([batch[Ranks(rank, 3).share(12)] for rank in range(3)]), batch)
    with pytest.raises(TrainingError, match=r"batch_size = 32 .* 3 ranks; .* such as 2, "):
        Ranks(0, 3).share(32)


def test_one_gpu_for_each_rank():
    with pytest.raises(TrainingError, match=r"'cuda:0' is one GPU for 2 ranks; give 'cuda'"):
        chosen_device("cuda:0", Ranks(1, 2, 1))
    if torch.cuda.device_count() < 100:
        with pytest.raises(TrainingError, match=r"'cuda:99' .*one rank for each GPU"):
            chosen_device("cuda", Ranks(99, 100, 99))


def test_only_errors_of_the_transport_mean_a_lost_rank():
    gloo = RuntimeError("[/src/gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:1")
    assert Ranks(0, 2).is_loss_of_a_rank(gloo)
    assert not Ranks(0, 2).is_loss_of_a_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not ALONE.is_loss_of_a_rank(gloo)


# ---------------------------------------------------------------------- torchrun
def wait_for_an_epoch(run, process):
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.spawns
def test_torchrun_logs_from_one_rank_and_ends_gracefully(tmp_path):
    run = tmp_path / "run"
    command = [*TORCHRUN, *options(**{**SMALL, "epochs": 500}, output=run, save_every=1000)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_an_epoch(run, process)
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=60)
    assert shown.count("2 ranks of cpu") == shown.count("test error") == 1
    assert errors.count("Interrupted. A checkpoint is saved.") == 1
    assert f"gnomon train --output {run} --resume" in errors
    assert 10 * saved(run)["epoch"] + saved(run)["step"] >= 10
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.spawns
def test_an_error_is_said_once(tmp_path):
    command = [*TORCHRUN, *options(**{**SMALL, "batch_size": 33}, output=tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert ended.stderr.count("Error: batch_size = 33 cannot be shared equally by 2 ranks") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.spawns
def test_a_killed_rank_ends_the_others_and_the_run_goes_on_without_it(tmp_path):
    run, port = tmp_path / "run", free_port()
    settings = options(**{**SMALL, "epochs": 40}, output=run, save_every=0, timeout=20)
    processes = [
        subprocess.Popen(
            [*GNOMON, *settings],
            env={**os.environ, **environment(rank, 2, port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    wait_for_an_epoch(run, processes[0])
    processes[1].kill()
    _, errors = processes[0].communicate(timeout=40)
    processes[1].communicate()
    assert processes[0].returncode == 1
    (line,) = [line for line in errors.splitlines() if line.strip()]
    assert line.startswith("Error: rank 0 of 2 has lost another rank (")
    assert line.endswith(f"gnomon train --output {run} --resume")
    before = saved(run)["epoch"]
    outcome = train(Config(**{**SMALL, "epochs": before + 2}), run, resume=True)
    assert [epoch.epoch for epoch in outcome.epochs] == list(range(1, before + 3))


def test_what_is_done_in_one_process_says_so(monkeypatch):
    for name, value in environment(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["tune", "--optimizer", "sgd"])
    assert result.exit_code == 1
    assert "gnomon tune is not for torchrun (WORLD_SIZE=2); start it alone" in result.output


@pytest.mark.spawns
def test_ranks_that_do_not_meet(monkeypatch):
    for name, value in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=r"the 2 ranks did not meet within --timeout 1 seconds .*start all of them"):
        together(1).__enter__()
