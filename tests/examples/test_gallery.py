"""The examples of the gallery run in their quick form, draw a picture, and find what they are to find."""

import os
import re
import runpy
import subprocess
import sys

import pytest

from support.repository import ROOT

EXAMPLES = ROOT / "examples"
GALLERY = ROOT / "docs" / "gallery"
OUTCOMES = {
    "cnn_digits": lambda ingd, adamw: ingd < adamw < 10,
    "gpt": lambda first, last, steps, adamw_first, adamw_last, adamw_steps: last < first / 2 and last < adamw_last,
    "graphical_model": lambda loss, right, extra, edges: right >= 0.8 * edges and extra <= edges,
    "kalman": lambda loss, iterations, truth: loss < truth + 0.05,
    "lora": lambda first, last, steps, adamw_first, adamw_last, adamw_steps: last < first / 3,
    "metric_learning": lambda plain, learned: learned < plain,
    "mixture": lambda dense, arrow, diagonal: arrow > dense > diagonal,
    "posterior": lambda first, last, steps: last < first - 1,
    "spd_layer": lambda error, steps: error < 5,
    "structured_covariance": lambda thin, rank, few, dense, many, diagonal: dense > thin > diagonal and few < many,
}
"""What must hold for the numbers that an example prints."""

ON_RANKS = {
    "torchrun_digits": lambda first, last, steps, ranks, alone, apart, held, held_alone: (
        last < first / 2 and abs(last - alone) < 0.01 and apart < 0.01 and held < 0.75 * held_alone
    )
}
"""The same for examples that torchrun starts, on two ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTCOMES)
def test_example_runs_and_draws(name, tmp_path, monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    picture = tmp_path / "picture.svg"
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--picture", str(picture)])
    with matplotlib.rc_context():
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        matplotlib.pyplot.close("all")
    check(OUTCOMES[name], capsys.readouterr().out, picture)


@pytest.mark.spawns
@pytest.mark.parametrize("name", ON_RANKS)
def test_example_runs_on_two_ranks(name, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    picture = tmp_path / "picture.svg"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = [*launcher, EXAMPLES / f"{name}.py", "--quick", "--picture", picture]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    check(ON_RANKS[name], ended.stdout, picture)
    without = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=300)
    assert without.stderr.startswith("start it with torchrun")


def check(outcome, printed, picture):
    assert "<svg" in picture.read_text()
    printed = printed.partition("wrote ")[0]
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", printed)]
    assert outcome(*numbers), printed


def test_the_gallery_shows_every_example_with_a_picture():
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert {picture.stem for picture in GALLERY.glob("*.svg")} == {*OUTCOMES, *ON_RANKS}
    assert len({*OUTCOMES, *ON_RANKS}) >= 11
    for name in (*OUTCOMES, *ON_RANKS):
        assert f"gallery/{name}.svg" in page
    for script in EXAMPLES.glob("*.py"):
        assert script.name == "pictures.py" or f"examples/{script.name}" in page, f"{script.name} is not in gallery.md"
