"""One palette: no other module holds a colour, and everybody can tell the colours apart."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from gnomon.experiments.common import palette
from support.repository import ROOT

VISIONS = {
    "usual": np.eye(3),
    "without long waves": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "without middle waves": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "without short waves": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
"""What an eye sees of linear RGB: Machado, Oliveira and Fernandes 2009, at full severity."""

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
GROUNDS = {"light": palette.PAGE.light, "dark": palette.PAGE.dark}


def linear(color):
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB, in which a distance of about 2 can just be seen."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    """The contrast ratio of the Web Content Accessibility Guidelines."""
    low, high = sorted(float(TO_XYZ[1] @ linear(color)) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("form", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_hues_can_be_told_apart(form, vision):
    seen = {hue.name: lab(np.array(VISIONS[vision]) @ linear(getattr(hue, form))) for hue in palette.HUES}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, f"{one} and {other}"


@pytest.mark.parametrize("form", ["light", "dark"])
def test_hues_can_be_seen_on_their_ground_and_text_can_be_read(form):
    for hue in palette.HUES:
        assert contrast(getattr(hue, form), GROUNDS[form]) >= 3, hue.name
    for color in (palette.INK, palette.SOFT):
        assert contrast(getattr(color, form), GROUNDS[form]) >= 4.5, color.name


def test_every_optimizer_has_one_colour():
    assert len(set(palette.OPTIMIZERS.values())) == len(palette.OPTIMIZERS)
    assert len(set(palette.METHODS.values())) == len(palette.METHODS)
    assert palette.of_optimizer("INGD dense T=10") == palette.of_optimizer("ingd-paper") == palette.OURS
    assert palette.of_optimizer("AdamW") == palette.ORANGE != palette.of_optimizer("Adam") == palette.METHODS["Adam"]
    assert palette.of_optimizer("gradient only") == palette.of_method("simplex") == palette.OTHER
    assert palette.of_method("ours, bounded steps") == palette.OURS
    assert palette.of_method("structured NGD, sub") == palette.of_method("structured NGD")


def test_every_optimizer_that_can_be_drawn_has_a_colour():
    pytest.importorskip("optuna")
    from gnomon.experiments.figures.manifold import BASELINES
    from gnomon.experiments.quality.contestants import CONTESTANTS
    from gnomon.experiments.quality.picture import MARKERS
    from gnomon.experiments.training.optimizers import TITLES

    for name in (*TITLES, *TITLES.values(), *CONTESTANTS, "singd"):
        assert palette.of_optimizer(name) != palette.OTHER
    assert set(MARKERS) == set(CONTESTANTS)
    for name in BASELINES:
        assert palette.of_method(name) != palette.OTHER


@pytest.mark.parametrize("folder", ["src/gnomon", "examples", "benchmarks", "docs"])
def test_no_other_module_holds_a_colour(folder):
    """Neither in hexadecimal, nor as one of matplotlib's numbered colours, nor from its colour cycles."""
    own = Path(palette.__file__).name
    for file in sorted((ROOT / folder).rglob("*.py")):
        found = re.findall(
            r"""#[0-9a-fA-F]{3}(?:[0-9a-fA-F]{3})?\b|["']C\d["']|["']tab(?:10|20|:\w+)["']""", file.read_text()
        )
        assert file.name == own or not found, f"{file} has {', '.join(found)}: take a colour of palette.py"


def test_drawings_in_pages_refer_to_variables():
    drawn = palette.with_variables(f"stroke: {palette.BLUE.light}; fill: #123456")
    assert drawn == "stroke: var(--blue); fill: #123456"
    rules = palette.variables()
    for color in (*palette.HUES, *palette.THEME):
        assert rules.count(f"--{color.name}: ") == 2
        assert rules.index(color.light) < rules.index("prefers-color-scheme: dark") < rules.rindex(color.dark)
