"""The examples of the gallery run in their quick form, draw a picture, and find what they are to find."""

import re
import runpy
import sys

import pytest

from support.repository import ROOT

EXAMPLES = ROOT / "examples"
GALLERY = ROOT / "docs" / "gallery"
OUTCOMES = {
    "cnn_digits": lambda ingd, adamw: ingd < adamw < 10,
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
    assert "<svg" in picture.read_text()
    printed = capsys.readouterr().out.partition("wrote ")[0]
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", printed)]
    assert OUTCOMES[name](*numbers), printed


def test_the_gallery_shows_every_example_with_a_picture():
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert {picture.stem for picture in GALLERY.glob("*.svg")} == set(OUTCOMES)
    for name in OUTCOMES:
        assert f"gallery/{name}.svg" in page
    for script in EXAMPLES.glob("*.py"):
        assert script.name == "pictures.py" or f"examples/{script.name}" in page, f"{script.name} is not in gallery.md"
