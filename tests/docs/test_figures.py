"""Pages say what the committed results of today's settings say."""

import json
import re
from dataclasses import asdict

import pytest

import gnomon
from gnomon.experiments.common.document import Rows
from gnomon.experiments.figures.reproduce import EXPERIMENTS
from gnomon.experiments.quality.report import Report
from gnomon.experiments.quality.run import restore
from gnomon.experiments.quality.study import FULL, Study
from support.repository import ROOT

RESULTS = ROOT / "benchmarks" / "quality.json"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of the committed runs. Runs with other settings than today's are left out of it."""
    data = json.loads(RESULTS.read_text())
    optimizers = list(dict.fromkeys(run["optimizer"] for run in data["runs"]))
    study = Study(tmp_path_factory.mktemp("quality"), data["steps"], optimizers, FULL)
    restore(study, RESULTS)
    return Report(study, data["measures"])


@pytest.fixture(scope="module")
def sections(report):
    return {section.title: section for section in report.sections}


def without_versions(page):
    return page.rpartition("\n\nMeasured with ")[0]


@pytest.mark.slow
def test_the_quality_page_is_that_of_the_committed_runs(report):
    page = (ROOT / "docs" / "results" / "quality.md").read_text()
    assert without_versions(page) == without_versions(report.markdown())
    assert "runs are missing" not in page


def cell(section, row, column):
    """The first number of a cell, as it is printed."""
    found = next(cells for cells in section.rows if cells[0] == row)
    return re.match(r"[\d.]+", found[section.header.index(column)])[0]


def ranks(sections, title, *optimizers):
    return [cell(sections[title], optimizer, "all: mean rank") for optimizer in optimizers]


def in_percent(ratio):
    return f"{100 * (float(ratio) - 1):.1f}%"


@pytest.mark.slow
def test_the_readme_says_what_the_suite_measured(sections):
    page = readme()
    (at_steps,) = ranks(sections, "Summary at equal steps", "INGD")
    (in_time,) = ranks(sections, "Summary in the time of AdamW", "INGD")
    assert f"INGD's mean rank is {at_steps} and {in_time}" in page
    means = sections["Steps and time to AdamW's measure"].rows[-1]
    steps = re.match(r"[\d.]+", means[-1])[0]
    planned = sections["Time to AdamW's measure with a schedule for it"].rows[-1][-1].split()[0]
    assert f"AdamW's final result in {steps} of its steps, or in {planned} of its CPU time" in page


@pytest.mark.slow
def test_the_page_of_networks_says_what_the_suite_measured(sections):
    page = " ".join((ROOT / "docs" / "networks.md").read_text().split())
    own, before = ranks(sections, "Summary at equal steps", "INGD", "INGD before")
    assert f"INGD has a mean rank of {own} of seven; the next one, INGD of version 0.1, has {before}" in page
    for reference in ("AdamW", "Muon"):
        own, muon = ranks(sections, f"Summary in the time of {reference}", "INGD", "Muon")
        assert f"{own} (Muon {muon})" in page, reference
    planned = sections["Time to AdamW's measure with a schedule for it"].rows[-1][-1].split()[0]
    assert f"in {planned} of AdamW's CPU time" in page
    sensitivity = sections["Sensitivity to the learning rate"]
    for column in ("usual rate", "twice the best rate", "half the best rate"):
        assert in_percent(cell(sensitivity, "INGD", column)) in page, column


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_page_of_the_papers_figures_has_the_tables_of_todays_version(name):
    page = (ROOT / "docs" / "results" / "figures.md").read_text()
    results = json.loads((ROOT / "docs" / "figures" / f"{name}.json").read_text())
    assert results["versions"]["gnomon"] == gnomon.__version__
    assert results["configuration"]["scale"] == json.loads(json.dumps(asdict(EXPERIMENTS[name].scale(False))))
    for table in results["tables"].values():
        assert Rows(*table).markdown() in page


def committed(benchmark):
    return json.loads((ROOT / "benchmarks" / f"{benchmark}.json").read_text())


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def readme():
    return " ".join((ROOT / "README.md").read_text().split())


def prose_of(name):
    return " ".join((ROOT / "docs" / name).read_text().split())


def test_the_page_of_problems_says_how_much_faster_solve_is():
    ratios = [row["ratio"] for row in committed("solve")["rows"]]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as the best of pymanopt's" in prose_of("problems.md")


def test_the_page_of_mixtures_has_the_fits_of_the_benchmark():
    results = committed("mixture")
    fits = {(result["components"], result["model"]): result["fits"] for result in results["magic"]}
    models = ("EM, full", "EM, full, tol=1e-6", "Dense", "Dense, precision, batches of 1024")
    page = prose_of("mixture.md")
    for components in (3, 5, 8):
        means = [
            [mean(fit[what] for fit in fits[components, model]) for what in ("train", "test", "seconds")]
            for model in models
        ]
        cells = [f"{train:.3f}, {test:.3f}, {seconds:.2f} s" for train, test, seconds in means]
        assert f"| {components} | {' | '.join(cells)} |" in page
    for part in results["synthetic"]:
        own = [result for result in part["results"] if result["model"] == part["structure"]]
        others = [result for name in ("EM, full", "EM, diag") for result in part["results"] if result["model"] == name]
        cells = [f"{mean(fit['test'] for fit in result['fits']):.2f}" for result in [*own, *others]]
        assert f"| {' | '.join(cells)} |" in page, part["structure"]


def test_the_page_of_covariances_has_the_likelihoods_of_the_benchmark():
    page = prose_of("covariance.md")
    methods = ("structure='auto'", "LedoitWolf", "GraphicalLassoCV", "sklearn FactorAnalysis, rank by CV")
    for record in committed("covariance")["held_out"]:
        true, *cells = (
            f"{mean(score for score, *_ in record['fits'][method]):.1f}" for method in ("true structure", *methods)
        )
        assert f"| {true} (`{record['structure']}`) | {' | '.join(cells)} |" in page, record["data"]


def test_the_readme_says_what_structured_covariances_gain():
    gains = []
    for record in committed("covariance")["held_out"]:
        means = {name: mean(score for score, *_ in fits) for name, fits in record["fits"].items()}
        others = [means[name] for name in means if name.startswith(("Ledoit", "OAS", "GraphicalLasso", "sklearn"))]
        if record["data"] != "none of these":
            gains.append(means["true structure"] - max(others))
    assert f"{min(gains):.0f} to {max(gains):.0f} nats above the best of" in readme()


def test_the_readme_says_how_long_a_large_arrow_takes():
    (row,) = (r for r in committed("spd")["structured"] if (r["structure"], r["k"]) == ("Arrow", 1_000_000))
    seconds = row["nanoseconds an entry"] * row["k"] / 1e9
    claim = "arrow matrix takes less than a tenth of a second on one core" in readme()
    assert claim == (seconds < 0.1)


def test_the_readme_says_how_near_posteriors_are():
    """The table of the benchmark, which another test holds to the records, and README have the same figures."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    within, evaluations = re.search(
        r"^\| gnomon\.vi \| (\d+ of \d+) \| [^|]* \| (\d+) \|", results, re.MULTILINE
    ).groups()
    assert f"on {within} posteriors, after {evaluations} gradient evaluations at the median" in readme()
