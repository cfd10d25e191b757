"""The demonstration and its command."""

import importlib.util
import io
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageColor
from rich.console import Console
from typer.testing import CliRunner

import gnomon
from gnomon.cli import main
from gnomon.experiments.common import palette
from gnomon.experiments.demo import network, posterior
from gnomon.experiments.demo import report as demo_report
from gnomon.experiments.demo import run as demonstration
from support.browser import View, needs_browser


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", "from gnomon.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


SMALL = demonstration.Scale(steps=20, seeds=2, k=30, iterations=20)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small demonstration: its report, and what it printed on a terminal of 80 columns."""
    console = Console(record=True, width=80, file=io.StringIO())
    report = demonstration.demo(tmp_path_factory.mktemp("demo") / "new", scale=SMALL, console=console)
    return report, console.export_text()


@pytest.mark.slow
def test_the_demo_prints_three_tables_and_where_its_report_is(made):
    report, text = made
    for name in ("SGD", "AdamW", "KFAC", "INGD", "full", "Heisenberg", "exact", "arrow", "mean field"):
        assert f"\n {name} " in text
    assert "…" not in text  # nothing was cut to fit
    assert all(len(line) <= 80 or str(report) in line for line in text.splitlines())
    assert str(report) in text.replace("\n", "")


@pytest.mark.slow
def test_the_report_is_one_file_that_loads_nothing(made):
    page = made[0].read_text()
    assert page.count('<svg class="chart"') == 6
    assert not re.search(r"<(script|link|iframe|img|object)", page)
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", page)
    names = re.findall(r' id="([^"]*)"', page)
    assert len(names) == len(set(names))
    assert [path.name for path in made[0].parent.iterdir()] == ["report.html"]


@pytest.mark.slow
def test_momentum_saves_iterations_and_structure_unknowns():
    curves = demonstration.fit_matrices(demonstration.Scale(k=60), 0, lambda what: None)
    plain, fast, structured_plain, structured_fast = (curve.iterations_to_solve() for curve in curves)
    assert fast < plain / 2
    assert structured_fast < structured_plain
    assert max(fast, structured_fast) < 100
    assert curves[2].notes["dimension"] < curves[0].notes["dimension"] / 2


def test_the_exact_posterior_is_that_of_independent_draws():
    """Importance sampling from the prior of mean and spread; the effects are normal given these."""
    exact = posterior.exact_posterior()
    torch.manual_seed(0)
    mean, log_spread = (prior.sample((400_000,)) for prior in (posterior.PRIOR_MEAN, posterior.PRIOR_LOG_SPREAD))
    y, errors = torch.tensor(posterior.EFFECTS), torch.tensor(posterior.ERRORS)
    total = ((2 * log_spread).exp().unsqueeze(-1) + errors.square()).sqrt()
    weights = torch.distributions.Normal(mean.unsqueeze(-1), total).log_prob(y).sum(-1).softmax(0)
    assert float(weights @ mean) == pytest.approx(exact.means[0], abs=0.1)
    assert float(weights @ log_spread) == pytest.approx(exact.means[1], abs=0.02)
    assert float(weights @ (mean - exact.means[0]).square()) ** 0.5 == pytest.approx(exact.sds[0], rel=0.02)
    for marginal in exact.marginals.values():
        area = torch.trapezoid(torch.tensor(marginal.density), torch.tensor(marginal.x))
        assert float(area) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_arrow_is_nearer_to_the_posterior_than_the_mean_field():
    exact, arrow, mean_field = posterior.fit_posteriors(0, lambda what: None)
    assert arrow.elbo > mean_field.elbo
    assert arrow.error(exact) < 0.2


@pytest.mark.slow
def test_goals_that_are_not_reached_are_told():
    _, rows = demonstration.matrix_table(demonstration.fit_matrices(SMALL, 0, lambda what: None))
    assert rows[0][3] == "> 20"
    runs = demonstration.train_networks(replace(SMALL, steps=40, seeds=1), 0, lambda what: None)
    _, rows = demonstration.network_table(runs)
    assert rows[0][0] == "SGD"
    assert rows[0][3:5] == ["-", "-"]


@pytest.mark.slow
def test_ingd_needs_a_fraction_of_the_steps_of_adamw():
    runs = demonstration.train_networks(demonstration.Scale(seeds=1), 1, lambda what: None)
    ends = {one.contestant.name: one.final for one in runs}
    ingd = runs[-1]
    assert ends["ingd"] < 0.7 * ends["adamw"]
    assert ingd.steps[ingd.place(ends["adamw"])] <= 80


@pytest.mark.spawns
@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1200, "dark")])
def test_a_browser_shows_the_figures(made, tmp_path, width, scheme):
    view = View(made[0].read_text(), tmp_path, width, scheme)
    measures = view.measures()
    assert len(measures["charts"]) == 6
    for chart_width, chart_height, *_ in measures["charts"]:
        assert 0.4 * width < chart_width <= width
        assert 0.5 * chart_width < chart_height < chart_width
    assert measures["page"] <= width  # nothing to scroll sideways
    assert measures["cut"] == 0
    assert all(0 <= left < right <= width for left, right in measures["cells"])
    counts = {color: count for count, color in Image.open(view.picture()).convert("RGB").getcolors(1 << 24)}
    optimizers = [palette.of_optimizer(one.name) for one in network.CONTESTANTS]
    others = [*demo_report.STRUCTURE_COLORS.values(), *demo_report.POSTERIOR_COLORS.values()]
    for color in (*optimizers, *others):
        drawn = ImageColor.getrgb(getattr(color, scheme))
        assert counts.get(drawn, 0) > 50, f"{color.name} is not to be seen"


@pytest.mark.slow
def test_command_line(tmp_path, monkeypatch):
    invoke = CliRunner().invoke
    assert invoke(main, ["--version"]).output.strip() == f"gnomon {gnomon.__version__}"
    assert "demo" in invoke(main, ["--help"]).output
    monkeypatch.setattr(demonstration, "Scale", lambda: SMALL)
    result = invoke(main, ["demo", "--seed", "3", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.spawns
def test_a_folder_that_cannot_be_written_is_one_line_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    result = command("demo", "--output", str(tmp_path / "file" / "new"))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "choose another folder" in result.stderr


def test_interrupting_is_one_line(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "train", interrupted)
    result = CliRunner().invoke(main, ["demo", "--output", str(tmp_path)])
    assert result.exit_code == 130
    assert "Interrupted: no report was written." in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.spawns
def test_command_line_names_the_missing_extra():
    blocked = "import sys; sys.modules['typer'] = None; import gnomon.cli"
    result = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'gnomon[experiments]'" in result.stderr


@pytest.mark.spawns
def test_the_library_needs_torch_alone():
    """Importing gnomon loads none of the extras."""
    extras = ("numpy", "scipy", "matplotlib", "rich", "typer", "geoopt", "pymanopt")
    script = (
        f"import sys; before = set(sys.modules); import torch; torch_own = set(sys.modules); import gnomon; "
        f"print([m for m in {extras!r} if m in sys.modules and m not in torch_own])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.spawns
@pytest.mark.skipif(importlib.util.find_spec("geoopt") is None, reason="the benchmark needs geoopt (extra 'bench')")
def test_the_benchmark_runs_in_a_small_form():
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import spd;"
        "spd.WANTED[5] = 0; full = spd.full_manifold((5,)); print(spd.full_table(full));"
        "sparse = spd.structured((200, 400)); print(spd.structured_table(sparse))"
    )
    root = next(p for p in __import__("pathlib").Path(__file__).resolve().parents if (p / "benchmarks").is_dir())
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root)
    assert result.returncode == 0, result.stderr
    assert "geoopt" in result.stdout
    assert "Toeplitz" in result.stdout
