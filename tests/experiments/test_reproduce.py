"""gnomon reproduce: the files it writes, what the figures claim, resuming, and its manners."""

import io
import json
import re
import shutil

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from rich.console import Console
from typer.testing import CliRunner

from gnomon.cli import main
from gnomon.experiments.commands.reproduce import TABLE_NAMES, Reproducible
from gnomon.experiments.common.trials import Curve, Store, Trial, run_trials
from gnomon.experiments.figures import claims, manifold, reproduce, rosenbrock
from gnomon.experiments.figures.plots import FLOOR_OF_GUESSES, gap_chart
from gnomon.experiments.figures.reproduce import EXPERIMENTS
from gnomon.experiments.figures.results import Results
from gnomon.experiments.training.config import Config
from support.training import command, written

NAMES = list(EXPERIMENTS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One quick run of everything, as CI and a newcomer would do it."""
    folder = tmp_path_factory.mktemp("runs")
    result = CliRunner().invoke(main, ["reproduce", "all", "--quick", "--output", str(folder)])
    assert result.exit_code == 0, result.output
    assert all(f"{name}/index.html" in result.output for name in NAMES)
    return folder


def curves_of(runs, name):
    data = json.loads((runs / name / "results.json").read_text())
    return [Curve(**curve) for curve in data["curves"]], data


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_leaves(runs, name):
    curves, data = curves_of(runs, name)
    assert data["configuration"]["quick"] is True
    assert {"torch", "gnomon", "python"} <= data["versions"].keys()
    page, markdown = (runs / name / "index.html").read_text(), (runs / name / f"{name}.md").read_text()
    assert page.count('<svg class="chart"') == 2 * len(EXPERIMENTS[name].axes)
    assert not re.search(r"<(img|script|link)|http-equiv", page)  # nothing from elsewhere, and it is not read again
    for part in ("The paper", "Here", "Verdict"):
        assert f"<dt>{part}</dt>" in page
        assert f"**{part}**: " in markdown or f"**{part}**:\n" in markdown
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(pictures) == 2 * len(EXPERIMENTS[name].axes)
    for picture in pictures:
        assert "var(--" not in (runs / name / picture).read_text()  # a file has colours of its own
    for method in {curve.method for curve in curves}:
        assert method.replace("&", "&amp;") in page
    for curve in curves:
        assert len(curve.loss) == len(curve.seconds)
        assert curve.seconds == sorted(curve.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metric-nearness", "log-det"])
def test_ours_ends_where_the_exact_momentum_methods_end(runs, name):
    """Within 1% of the initial gap, at the same step and momentum."""
    curves, _ = curves_of(runs, name)
    shared = {curve.method: curve for curve in curves if curve.shared}
    ours = shared[manifold.OURS]
    for method in ("Alimisis 2020", "Alimisis 2021", "Ahn & Sra 2020"):
        assert abs(ours.gaps[-1] - shared[method].gaps[-1]) <= 0.01 * ours.gaps[0]


@pytest.mark.slow
def test_the_submanifold_method_is_as_good_as_the_ambient_ones_and_stays_on_it(runs):
    curves, _ = curves_of(runs, "gmm")

    def mean(method):
        finals = [curve.final for curve in curves if curve.method == method and curve.shared]
        assert len(finals) == 3
        return sum(finals) / 3

    for method in (manifold.OURS, *manifold.BASELINES):
        assert mean(manifold.OURS_SUB) <= 1.001 * mean(method)
    for curve in curves:
        away = curve.notes["largest distance to the submanifold"]
        assert away == 0 if curve.method in manifold.SUB else away > 1e-3


@pytest.mark.slow
def test_rosenbrock_momentum_is_ahead(runs):
    curves, _ = curves_of(runs, "rosenbrock")
    mild = {}
    for curve in curves:
        if curve.panel == "mild":
            mild[curve.method] = min(curve.iterations_to_solve(), mild.get(curve.method, 10_000))
    assert mild[rosenbrock.OURS] <= 0.7 * mild[rosenbrock.NGD]
    assert mild[rosenbrock.OURS] < mild["Adam"]
    assert mild[rosenbrock.OURS_SELDOM] < mild["Adam"]
    ours = next(curve for curve in curves if curve.method == rosenbrock.OURS)
    per_iteration = 1 + rosenbrock.HVP_COST * (rosenbrock.HEAD + rosenbrock.TAIL + 2 + 1)
    assert ours.evaluations[3] - ours.evaluations[2] == per_iteration


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    ran = []

    def trial(method, size=1):
        def run(record):
            ran.append(method)
            if method == "b" and ran.count("b") <= 1:
                raise KeyboardInterrupt
            for loss in (3.0, 2.0, 1.0):
                record(loss)

        return Trial("panel", method, {"lr": 0.1}, 0, {"size": size}, run)

    trials = [trial(name) for name in "abc"]
    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(run_trials(trials, store))
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    ran.clear()
    ran.append("b")  # it has been interrupted
    curves = list(run_trials(trials, store))
    assert "a" not in ran
    assert [curve.loss for curve in curves] == [[3.0, 2.0, 1.0]] * 3
    assert store.load(trial("a", size=2)) is None  # another size is another trial


@pytest.mark.slow
def test_the_whole_command_resumes_without_running_again(runs, monkeypatch):
    monkeypatch.setattr(Trial, "__call__", lambda self: pytest.fail("everything is on disk"))
    console = Console(quiet=True)
    before = json.loads((runs / "log-det" / "results.json").read_text())
    reproduce.reproduce("log-det", runs, quick=True, console=console)
    assert json.loads((runs / "log-det" / "results.json").read_text()) == before


def test_a_method_that_diverges_is_a_result():
    def explode(record):
        for loss in (1.0, 2.0, 1e300, float("inf")):
            record(loss)

    curve = Trial("panel", "explosive", {}, 0, {}, explode, minimum=0.0)()
    assert curve.failure == "the loss is not finite"
    assert curve.final == float("inf")
    assert curve.loss == [1.0, 2.0, 1e300]
    calm = Curve("panel", "calm", {}, 0, minimum=0.0, loss=[1.0, 1e-7], seconds=[0.0, 0.1])
    (title,) = Results([curve, calm]).panels()
    _, rows = Results([curve, calm]).table(title)
    assert rows[0][3] == "-"
    assert rows[1][4] == "1"


@pytest.mark.slow
def test_a_broken_file_is_run_again(runs):
    path = next((runs / "log-det" / "trials").iterdir())
    whole = path.read_text()
    for broken in ("", "{", json.dumps({**json.loads(whole), "color": "red"})):
        path.write_text(broken)
        reproduce.reproduce("log-det", runs, quick=True, console=Console(quiet=True))
        assert len(json.loads(path.read_text())["loss"]) == len(json.loads(whole)["loss"])


@pytest.mark.slow
def test_numbers_are_never_cut(runs):
    curves, _ = curves_of(runs, "rosenbrock")
    results = Results(curves)
    title = next(iter(results.panels()))
    header, rows = results.table(title)
    for width in (70, 120):
        console = Console(width=width, file=io.StringIO())
        console.print(reproduce.terminal_table(title, header, rows, width))
        text = console.file.getvalue()
        assert all(cell in text for row in rows for cell in row[2:])


@pytest.mark.slow
def test_compare_leaves_out_what_reproduce_writes(runs, tmp_path):
    """A shell gives all of ``runs/*`` to it."""
    run = written(runs / "digits-mlp-ingd", Config(epochs=2), [50.0, 40.0])
    result = command("compare", *sorted(runs.iterdir()), "--output", tmp_path / "curves.png")
    shutil.rmtree(run)
    assert result.exit_code == 0, result.output
    assert all(f"Left out: {runs / name} holds no run." in result.output for name in NAMES)
    assert "INGD" in result.output


@pytest.mark.slow
def test_a_page_tells_how_far_the_runs_are(runs, tmp_path, monkeypatch):
    """After the first trial, and then now and then."""
    trials = list(EXPERIMENTS["log-det"].trials(True))
    store = Store(tmp_path / "log-det" / "trials")
    for trial in trials[:-1]:
        store.save(trial, Store(runs / "log-det" / "trials").load(trial))

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "__call__", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce("log-det", tmp_path, quick=True, console=Console(quiet=True))
    page = (tmp_path / "log-det" / "index.html").read_text()
    assert f"1 of {len(trials)} runs are finished" in page
    assert 'http-equiv="refresh"' in page
    assert "<svg" in page
    assert "Verdict" not in page
    assert not list((tmp_path / "log-det").glob("*.md"))


def mixture(method, seed, losses, lr=1.0, shared=True, away=0.0):
    seconds = [0.1 * i for i in range(len(losses))]
    return Curve("gmm", method, {"lr": lr}, seed, shared, loss=losses, seconds=seconds, notes={"away": away})


def test_the_mixture_figure_has_medians_and_ranges_above_a_floor():
    losses = {0: [11.0, 2.0, 1.0], 1: [11.0, 3.0, 1.0], 2: [11.0, 6.0, 1.0]}
    results = Results([mixture("ours, sub", seed, values) for seed, values in losses.items()])
    ((title, groups), _) = results.panels().items()
    chart = gap_chart(results, groups, "iterations", log_axis=False)
    (line,) = chart.lines
    assert line.name == "ours, sub"
    assert line.dashes
    assert line.y == pytest.approx([1.0, 0.2, FLOOR_OF_GUESSES])
    assert line.low == pytest.approx([1.0, 0.1, FLOOR_OF_GUESSES])
    assert line.high == pytest.approx([1.0, 0.5, FLOOR_OF_GUESSES])
    assert "legend" not in chart.inline()  # the page has it, so that it covers no curve
    assert "same step" in title


def test_claims_follow_the_numbers():
    def problem(ours, exact, bounded=0.0):
        """Two steps; a loss is that after one iteration from 1."""
        found = []
        for method in (manifold.OURS, manifold.OURS_BOUNDED, *claims.EXACT):
            for lr in (0.1, 0.2):
                last = {manifold.OURS: ours, manifold.OURS_BOUNDED: {0.1: bounded, 0.2: bounded}}.get(method, exact)[lr]
                curve = Curve("log-det", method, {"lr": lr}, 0, lr == 0.1, 0.0, [1.0, last], [0.0, 0.1])
                found.append(curve)
        return claims.on_the_manifold(Results(found)).verdict

    same = problem({0.1: 1e-3, 0.2: 1e-3}, {0.1: 1e-3, 0.2: 1e-3})
    assert same == "The similar performance holds here. That it can use a larger step cannot be seen in this grid."
    worse = problem({0.1: 0.1, 0.2: 0.9}, {0.1: 1e-3, 0.2: 0.9})
    assert "The similar performance does not hold here." in worse
    assert "does not hold for the update as published, and holds with bounded steps" in worse
    better = problem({0.1: 1e-3, 0.2: 1e-3}, {0.1: 1e-3, 0.2: 0.9})
    assert "That it can use a larger step holds." in better
    names = (*manifold.SUB, manifold.OURS, *manifold.BASELINES)
    for sub, words in ((1.0, "reaches the loss"), (1.1, "does not reach the loss")):
        losses = {manifold.OURS_SUB: sub}
        curves = [mixture(m, 0, [9.0, losses.get(m, 1.0)], away=0.0 if m in manifold.SUB else 1.0) for m in names]
        claim = claims.on_the_submanifold(Results(curves))
        assert words in claim.verdict
        assert "are all mixtures" in claim.verdict


def test_every_seed_is_measured_from_its_own_minimum():
    def curve(method, seed, losses):
        return Curve("gmm", method, {"lr": 1.0}, seed, True, loss=losses, seconds=[0.0, 1.0], notes={"away": 0.0})

    curves = [curve(m, s, [10.0 + s, 5.0 + s + d]) for s in (0, 1) for m, d in (("ours", 0.0), ("RGD", 0.5))]
    results = Results(curves)
    assert [results.shares(c)[-1] for c in curves] == pytest.approx([0.0, 0.1, 0.0, 0.1])
    failed = Curve("gmm", "RGD", {"lr": 9.0}, 0, failure="diverged at once")
    assert Results([*curves, failed]).table("gmm: each method with its own best settings")[1]


def test_the_command_offers_every_experiment():
    assert {name.value for name in Reproducible if name not in TABLE_NAMES} == {*EXPERIMENTS, "all"}


def test_bad_input(tmp_path):
    result = CliRunner().invoke(main, ["reproduce", "figure-7"])
    assert result.exit_code == 2
    assert "metric-nearness" in result.output
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    result = CliRunner().invoke(main, ["reproduce", "log-det", "--quick", "--output", str(blocked)])
    assert result.exit_code == 1
    assert "cannot write to --output" in result.output
