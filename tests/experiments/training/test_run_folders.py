"""Folders of runs that are shared, damaged, incomplete or no runs at all."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch

from gnomon.experiments.training import seal
from gnomon.experiments.training.config import Config, TrainingError, completed
from gnomon.experiments.training.folder import STATE, RunFolder
from gnomon.experiments.training.lock import NAME, locked
from gnomon.experiments.training.run import train
from gnomon.experiments.training.trainer import Epoch, Trainer, load_data
from support.training import SMALL, StopAt, assert_one_line, command, options, small, written

COMMAND = [sys.executable, "-m", "gnomon", "train"]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr("gnomon.experiments.training.run.draw_run", lambda epochs, config, path: None)


# ---------------------------------------------------------------------- two processes
@pytest.mark.spawns
@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_two_processes_in_one_folder(tmp_path):
    """The second one says who is there. Where the first one is killed, nothing stands in the way."""
    output = tmp_path / "run"
    arguments = options(**{**SMALL, "epochs": 10_000}, output=output, save_every=0)
    first = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL)
    try:
        while not (output / "checkpoint.pt").exists():
            assert first.poll() is None
            time.sleep(0.02)
        result = command("train", "--output", output, "--resume")
        assert_one_line(result, "another process trains in", f"pid {first.pid} ", "another --output")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (output / NAME).exists()  # what the killed process has left
    done = len(RunFolder(output).load(RunFolder(output).config(), torch.device("cpu"))[1])
    outcome = train(RunFolder(output).config(), output, resume=True, reporter=StopAt(epochs=done + 1))
    assert outcome.signal == signal.SIGINT
    assert not (output / NAME).exists()


def test_the_lock_of_this_process(tmp_path):
    folder = tmp_path / "deep" / "run"
    with RunFolder(folder).alone():
        with pytest.raises(TrainingError, match=rf"another process trains in .*run \(pid {os.getpid()} on"):
            train(small(), folder)
        assert [file.name for file in folder.iterdir()] == [NAME]
    assert not (tmp_path / "deep").exists()
    assert train(small(epochs=1), folder).epochs
    assert NAME not in [file.name for file in folder.iterdir()]
    (folder / NAME).write_text("pid 1 on a machine that is gone")
    assert train(small(epochs=1), folder, resume=True).epochs


def _count(folder, times):
    """Read, wait and write, which goes wrong where two do it at a time."""
    done = 0
    while done < times:
        try:
            with locked(folder):
                number = int((folder / "number").read_text())
                time.sleep(0.001)
                (folder / "number").write_text(str(number + 1))
                done += 1
        except Exception:
            time.sleep(0.001)


@pytest.mark.spawns
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_lock_is_given_to_one_at_a_time(tmp_path):
    """Also in the moment when the file is removed by one and opened by another."""
    (tmp_path / "number").write_text("0")
    workers = [multiprocessing.get_context("fork").Process(target=_count, args=(tmp_path, 40)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert (tmp_path / "number").read_text() == "160"


# ---------------------------------------------------------------------- damaged checkpoints
def tiny_run(path):
    """A run whose checkpoint has a few kilobytes."""
    run, config = RunFolder(path), completed(small())
    torch.manual_seed(0)
    state = dict.fromkeys(STATE, 3)
    state |= {"model": {"weight": torch.randn(5, 4)}, "optimizer": {"state": {0: {"K": torch.randn(3, 3)}}}}
    run.begin(config, "cpu")
    run.save(config, {**state, "sums": torch.zeros(2)}, [Epoch(1, 10, 1.0, 50.0, 1.5, 40.0, 0.1, 2.0, 2.0)])
    return run, config


def as_text(loaded):
    torch.set_printoptions(precision=12)
    return str(loaded)


def test_a_bit_that_is_flipped_anywhere_is_noticed(tmp_path):
    """Only in the mark before the checksum it does no harm: what is loaded then is what was saved."""
    run, config = tiny_run(tmp_path / "run")
    whole = run.checkpoint.read_bytes()
    saved = as_text(run.load(config, torch.device("cpu")))
    mark = range(len(whole) - seal.LENGTH, len(whole) - seal.LENGTH + len(seal.MARK))
    for number, place in enumerate([*range(0, len(whole), 7), *mark]):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << number % 8
        run.checkpoint.write_bytes(damaged)
        if place in mark:
            assert as_text(run.load(config, torch.device("cpu"))) == saved
            continue
        with pytest.raises(TrainingError, match=r"damaged .*; put the right one there, or delete it") as found:
            run.load(config, torch.device("cpu"))
        assert len(str(found.value).splitlines()) == 1


def test_checkpoints_of_before_have_no_seal(tmp_path):
    run, config = tiny_run(tmp_path / "run")
    whole = run.checkpoint.read_bytes()
    saved = as_text(run.load(config, torch.device("cpu")))
    run.checkpoint.write_bytes(whole[: -seal.LENGTH])
    assert as_text(run.load(config, torch.device("cpu"))) == saved
    assert as_text(torch.load(run.checkpoint)["model"]) in saved


def test_a_bit_of_a_number_is_noticed(tmp_path):
    """torch itself loads such a file, with another number."""
    run, _ = tiny_run(tmp_path / "run")
    whole = bytearray(run.checkpoint.read_bytes())
    state = torch.load(run.checkpoint)
    place = whole.find(state["model"]["weight"].numpy().tobytes())
    assert place > 0
    whole[place + 2] ^= 64
    run.checkpoint.write_bytes(whole)
    assert not torch.equal(torch.load(run.checkpoint)["model"]["weight"], state["model"]["weight"])
    result = command("train", "--output", run.path, "--resume")
    assert_one_line(result, "checkpoint.pt", "damaged", "checksum", "delete it")


def test_a_checkpoint_that_was_cut_short(tmp_path):
    run, config = tiny_run(tmp_path / "run")
    whole = run.checkpoint.read_bytes()
    for length in range(0, len(whole) - seal.LENGTH, len(whole) // 60):
        run.checkpoint.write_bytes(whole[:length])
        with pytest.raises(TrainingError, match=r"is no checkpoint of a run, or damaged .*; put the right one there"):
            run.load(config, torch.device("cpu"))
    for more in (b"\0", b"more" * 100):
        run.checkpoint.write_bytes(more + whole)
        with pytest.raises(TrainingError, match="damaged"):
            run.load(config, torch.device("cpu"))


def test_other_files_in_the_place_of_a_checkpoint(tmp_path):
    run, _ = tiny_run(tmp_path / "run")
    parts = torch.load(run.checkpoint)
    for left_out in ("config", "epochs", *STATE):
        torch.save({name: value for name, value in parts.items() if name != left_out}, run.checkpoint)
        assert_one_line(command("train", "--output", run.path, "--resume"), "damaged", left_out)
    for other in (torch.zeros(3), ["config"], {}):
        torch.save(other, run.checkpoint)
        assert_one_line(command("train", "--output", run.path, "--resume"), "damaged", "delete it")
    with zipfile.ZipFile(run.checkpoint, "w") as archive:
        archive.writestr("a.txt", "text")
    assert_one_line(command("train", "--output", run.path, "--resume"), "damaged", "delete it")
    run.checkpoint.unlink()
    run.checkpoint.mkdir()
    assert_one_line(command("train", "--output", run.path, "--resume"), "damaged", "delete it")


def test_the_parts_of_a_checkpoint_are_those_of_a_trainer():
    assert Trainer(completed(small()), load_data(small())).state().keys() == STATE


# ---------------------------------------------------------------------- incomplete folders
@pytest.mark.parametrize("left", ["checkpoint.pt", "metrics.jsonl"])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_what_is_left_of_a_run_is_not_written_over(left, resume, tmp_path):
    run, _ = tiny_run(tmp_path / "run")
    run.write_epochs([Epoch(1, 10, 1.0, 50.0, 1.5, 40.0, 0.1, 2.0, 2.0)])
    for file in run.path.iterdir():
        if file.name != left:
            file.unlink()
    before = (run.path / left).read_bytes()
    result = command("train", "--output", run.path, *options(**SMALL), *resume)
    assert_one_line(result, left, "no config.toml", "put that file back", "another --output")
    assert [(file.name, file.read_bytes()) for file in run.path.iterdir()] == [(left, before)]


def test_messages_speak_of_checkpoints_only_where_there_are_any(tmp_path, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        result = command("train", "--output", tmp_path / "run", *options(**SMALL))
    assert_one_line(result, "cannot write", "No space left", "another --output")
    assert "--resume" not in result.output
    run, _ = tiny_run(tmp_path / "other")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TrainingError, match="is intact: continue with --resume"):
        run.write_epochs([])


def test_a_batch_larger_than_the_data(tmp_path):
    result = command("train", "--output", tmp_path / "run", *options(**{**SMALL, "batch_size": 1000, "epochs": 1}))
    assert result.exit_code == 0, result.output
    assert "batch_size 1000 is larger than the training set: a step takes all 320 samples" in result.output
    again = command("train", "--output", tmp_path / "other", *options(**{**SMALL, "epochs": 1}))
    assert "larger than" not in again.output


def test_a_folder_that_cannot_be_looked_into(tmp_path):
    long = tmp_path / ("a" * 300)
    assert_one_line(command("compare", long), "cannot look into", "give another folder")
    assert_one_line(command("train", "--output", long, *options(**SMALL)), "File name too long", "--output")


# ---------------------------------------------------------------------- comparisons
def test_what_is_no_run_is_left_out_and_said(tmp_path):
    run = written(tmp_path / "run", Config(epochs=2), [50.0, 40.0])
    begun = written(tmp_path / "begun", Config(epochs=2, optimizer="sgd"), [])
    (tmp_path / "plots").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    result = command("compare", *sorted(tmp_path.iterdir()), "--output", tmp_path / "curves.png")
    assert result.exit_code == 0, result.output
    for name in ("plots", "notes.txt"):
        assert f"Left out: {tmp_path / name} holds no run." in result.output
    assert f"Left out: the run in {begun} has not finished an epoch." in result.output
    assert "INGD" in result.output
    assert "SGD" not in result.output
    assert_one_line(
        command("compare", begun, tmp_path / "plots"), "nothing to compare", "holds no run", "has not finished"
    )
    assert run.exists()


def bytes_that_are_no_text(run):
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n")


def a_folder_of_that_name(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def words_for_numbers(run):
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    (run / "metrics.jsonl").write_text(json.dumps({**line, "test_error": "small"}) + "\n")


def a_list(run):
    (run / "metrics.jsonl").write_text("[1, 2]\n")


def settings_in_a_folder(run):
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()


def settings_that_are_no_text(run):
    (run / "config.toml").write_bytes(b"\xff")


@pytest.mark.parametrize(
    "damage",
    [
        bytes_that_are_no_text,
        a_folder_of_that_name,
        words_for_numbers,
        a_list,
        settings_in_a_folder,
        settings_that_are_no_text,
    ],
)
def test_files_that_cannot_be_read(damage, tmp_path):
    run = written(tmp_path / "run", Config(epochs=2), [50.0, 40.0])
    damage(run)
    assert_one_line(command("compare", run, "--output", tmp_path / "curves.png"), str(run))


# ---------------------------------------------------------------------- data
@pytest.mark.parametrize("name", ["cifar100", "tiny-imagenet", "imagenet-100"])
def test_data_that_is_missing_is_no_matter_of_the_output(name, tmp_path):
    arguments = ["--data-dir", tmp_path / "nowhere", "--output", tmp_path / "out", "--scale", "small"]
    result = command("reproduce", name, *arguments)
    assert_one_line(result, str(tmp_path / "nowhere"), "--data-dir")
    assert "cannot write" not in result.output
