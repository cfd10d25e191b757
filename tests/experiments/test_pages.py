"""Pages of results: text, tables and drawings, as HTML that fits every screen and as Markdown with files."""

import re

import pytest

pytest.importorskip("matplotlib")

from gnomon.experiments.common import document, page, palette
from gnomon.experiments.common.document import Claim, Document, Drawings, Points, Rows, Text
from gnomon.experiments.common.progress import Pace
from gnomon.experiments.common.svg import DASHES, MOST_POINTS, Chart, HeatMap, Line
from support.browser import View, needs_browser

LINES = [
    Line("INGD", palette.of_optimizer("ingd"), [1, 2, 3], [8, 4, 2], [7, 3, 1], [9, 5, 3]),
    Line("SGD", palette.of_optimizer("sgd"), [1, 2, 3], [9, 8, 7], dashes=DASHES[1]),
]
CHARTS = {
    "by-epoch": Chart("By epoch", LINES, "epoch", "test error in %", whole=True),
    "by-time": Chart("By time", LINES, "CPU seconds", "test error in %", log=True),
}
MAP = HeatMap("INGD", ["0.01", "0.2"], ["0.1", "1"], [[50.0, None], [20.0, 90.0]], "rate", "damping", 20.0, 90.0)
WIDE = Rows(
    ["method", *(f"number {i}" for i in range(8))],
    [["ours (INGD)", *["12.34 ± 0.56"] * 8], ["SGD", *["23.45 ± 0.67"] * 8]],
)
LONG = Rows(
    ["method", "validation error at each rate", "chosen"],
    [["SGD", "9.87 at 0.001, 6.54 at 0.01, 3.21 at 0.1", "0.1"]],
)
NARROW = Rows(["method", "lr"], [["ours (INGD)", "0.01"], ["SGD", "0.1"]])


def sample(runs=None):
    blocks = [
        Claim("Ours is `better`.", ["It ends at 2 < 3."], "The claim holds."),
        Drawings(CHARTS, "Test error.", LINES),
        WIDE,
        LONG,
        NARROW,
        Drawings({"map": MAP}, "Errors."),
        Text("A text."),
        Points(["A point."]),
    ]
    return Document("Optimizers", "Two of them.", [("Results", blocks)], "A footer.", runs)


def test_columns_of_words_are_aligned_to_the_left_in_markdown_too():
    table = Rows(["method", "settings", "gap"], [["ours", "lr 1", "1e-6"], ["SGD", "", "0.1"]])
    assert table.markdown().splitlines()[1] == "|---|---|---:|"


def test_drawings_are_no_longer_than_they_have_to_be():
    for drawing in (*CHARTS.values(), MAP):
        for svg in (drawing.file(), drawing.inline()):
            paths = re.findall(r' d="([^"]*)"', svg)
            assert any(re.search(r"\d\.\d\d", path) for path in paths)
            assert not [path for path in paths if re.search(r"\.\d{3}", path)]


def test_a_finished_document_has_a_page_markdown_and_files(tmp_path):
    index = sample().write(tmp_path, "sample")
    text, markdown = index.read_text(), (tmp_path / "sample.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "index.html",
        "sample.md",
        "by-epoch.svg",
        "by-time.svg",
        "map.svg",
    }
    assert text.count('<svg class="chart"') == 3
    assert "<code>better</code>" in text
    assert "2 &lt; 3" in text
    assert "The claim holds." in text
    assert "**Verdict**: The claim holds." in markdown
    assert "![By time](by-time.svg)" in markdown
    assert "| **ours (INGD)** | **0.01** |" in markdown
    assert "12.34 ±\u00a00.56" in markdown  # a narrow cell breaks before the sign
    names = re.findall(r' id="([^"]*)"', text)
    assert len(names) == len(set(names))
    for name in ("by-epoch", "map"):
        drawing = (tmp_path / f"{name}.svg").read_text()
        assert "var(--" not in drawing
        assert palette.PAGE.light in drawing  # a white ground, for readers with a dark page
    assert "INGD" in (tmp_path / "by-epoch.svg").read_text()  # the legend


def test_a_document_of_runs_that_go_on_is_a_page_alone(tmp_path):
    index = sample(runs=(3, 8)).write(tmp_path, "sample")
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    text = index.read_text()
    assert "3 of 8 runs are finished" in text
    assert f'<meta http-equiv="refresh" content="{document.RELOAD}">' in text
    assert "Two of them." in text


def test_the_rows_of_a_wide_table_become_lists_on_narrow_screens():
    assert '<table class="wide">' in WIDE.html()
    assert '<td class="pair" data-column="number 7">12.34 ±&nbsp;0.56</td>' in WIDE.html()
    assert "<table>" in NARROW.html()
    assert '<tr class="ours"><td class="words"' in NARROW.html()


@pytest.mark.spawns
@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (800, "light"), (1200, "light")])
def test_nothing_is_out_of_sight(tmp_path, width, scheme):
    measures = View(sample().html(), tmp_path, width, scheme).measures()
    assert measures["page"] <= width
    assert measures["cut"] == 0
    assert all(0 <= left < right <= width for left, right in measures["cells"])
    assert len(measures["cells"]) >= 2 * 9 + 3 + 2 * 2  # every cell is shown
    (_, _, *first), (_, _, *second), _ = measures["charts"]
    beside, below = first[1] == second[1], first[0] == second[0]
    assert beside if width == 1200 else below
    channels = [int(value) for value in re.findall(r"\d+", measures["ground"])]
    assert channels == [int(getattr(palette.PAGE, scheme)[i : i + 2], 16) for i in (1, 3, 5)]


def test_long_lines_are_thinned_where_it_does_not_show():
    count = 10_000
    line = Line("long", palette.BLUE, range(count), [1 / (1 + i) for i in range(count)], range(count), range(count))
    thin = line.thinned()
    assert len(thin.x) == len(thin.y) == len(thin.low) == len(thin.high) <= 2 * MOST_POINTS
    assert list(thin.x[:5]) == [0, 1, 2, 3, 4]
    assert thin.x[-1] == count - 1
    assert max(b - a for a, b in zip(thin.x, thin.x[1:], strict=False)) <= count / MOST_POINTS + 1
    assert LINES[0].thinned() is LINES[0]


def test_charts_of_nothing_and_of_one_point():
    assert "<svg" in Chart("Empty", [], "epoch", "loss", log=True).inline()
    assert "<svg" in Chart("One", [Line("a", palette.BLUE, [1], [2.0])], "epoch", "loss", log=True, whole=True).file()


def test_the_pace_of_pages():
    assert [Pace(0).allows() for _ in range(2)] == [True, True]
    slow = Pace(1000)
    assert [slow.allows() for _ in range(3)] == [True, False, False]


def test_code_in_a_page_is_escaped():
    assert page.code("a < b") == "<pre>a &lt; b</pre>"
