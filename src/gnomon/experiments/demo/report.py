"""The report of the demonstration as an HTML page."""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from ...groups import Dense, Group, Heisenberg
from ..common import page, palette
from ..common.machine import versions_text
from ..common.svg import DASHES, Chart, Line, cells, legend
from ..common.trials import SOLVED, Curve
from ..data import digits
from .network import SIZES, TRAINED, Reconstruction, Runs
from .posterior import Posterior
from .scale import Cells

STRUCTURE_COLORS = {"full": palette.ORANGE, "Heisenberg": palette.OURS}
POSTERIOR_COLORS = {"exact": palette.GREY, "arrow": palette.OURS, "mean field": palette.ORANGE}

FLOOR = 1e-12
"""Smaller shares of the first gap are rounding errors. They are drawn at this value."""

LEAD = (
    "This page shows three experiments that ran on your machine just now. Four optimizers trained a neural network. "
    "Gradient descent with momentum found an unknown positive-definite matrix. Natural gradients fitted the posterior "
    "of a hierarchical model. Nothing was downloaded, and this page works offline."
)

CODE = """# a network: instead of torch.optim.AdamW(model.parameters())
opt = gnomon.optim.INGD(model, lr=0.01)

# a matrix: gnomon.SPD(400) is the full manifold
S = gnomon.SPD(gnomon.groups.Heisenberg(400, head=5, tail=5))
opt = torch.optim.SGD(S.parameters(), lr=0.1, momentum=0.7)
opt = gnomon.moving_frame(opt)

# a posterior: log_density maps (draws, 10) to (draws,)
fit = gnomon.vi.fit(log_density, dim=10)
print(fit.summary())"""

NEXT = """# one run, with checkpoints, curves and a log; --help lists models and data
gnomon train --optimizer ingd --epochs 20
gnomon train --optimizer adamw --epochs 20

# draw runs together
gnomon compare runs/*

# learning rates with an equal budget for each optimizer
gnomon tune --optimizer ingd --optimizer adamw --epochs 10 --schedule cosine

# the experiments of the paper on manifolds, with small sizes
gnomon reproduce all --quick"""


def report_page(networks: list[Runs], matrices: list[Curve], posteriors: list[Posterior], *tables: Cells) -> str:
    """Return the page.

    Each experiment has a section with its purpose, its curves, its table and an explanation. The last sections show
    code and commands to try next.
    """
    ours = "INGD", "Heisenberg", "arrow"
    shown = [page.table(*table, ours=name) for table, name in zip(tables, ours, strict=True)]
    sections = [
        ("One network, four optimizers", _network_section(networks, shown[0])),
        ("One matrix, two structures", _matrix_section(matrices, shown[1])),
        ("One posterior, two structures", _posterior_section(posteriors, shown[2])),
        ("In your own code", page.code(CODE)),
        ("Try next", page.code(NEXT)),
    ]
    return page.page("gnomon at work", sections, f"{versions_text()}. Times are CPU time of one thread.", LEAD)


# ---------------------------------------------------------------------- the network
def _network_section(networks: list[Runs], table: str) -> str:
    seeds, steps = len(networks[0].histories), networks[0].steps[-1]
    intro = (
        f"A network compresses handwritten digits of 8 x 8 pixels to {min(SIZES)} numbers, and draws the digits again "
        f"from these numbers. It learns from {TRAINED:,} digits in {steps} steps, and is tested on 360 others. Each "
        f"optimizer starts from the same {seeds} random networks and gets the same digits in the same order. Such "
        "networks have a bottleneck between many layers. They are hard for optimizers that scale each weight by "
        "itself."
    )
    seen = (
        "Lower is better, and earlier is better. KFAC and INGD estimate the curvature of the loss in each layer, and "
        "change the directions of their steps with it. They reach AdamW's final error after a fraction of its steps. "
        "Each of their steps costs more. On a network as small as this one the difference is large, so look at the "
        "chart by time too. KFAC inverts matrices. INGD only multiplies them, so it also works in half precision and "
        "with structured factors."
    )
    fair = (
        "Each optimizer has the best of five learning rates, which are half powers of ten. They were judged by the "
        "error on a fifth of the training digits that was held out, with other seeds. The rate of INGD is its "
        f"default. A step has {Reconstruction.batch_size} digits. The schedule is a cosine, SGD has a momentum of 0.9, "
        "and other settings are the defaults. Lines are means over the seeds. Bands reach from the best to the worst. "
        "The table has the 95 % interval of the mean, and the steps and CPU seconds after which the mean error is that "
        "of AdamW at its end."
    )
    by_step = [_error_line(runs, [float(step) for step in runs.steps]) for runs in networks]
    by_time = [_error_line(runs, runs.seconds) for runs in networks]
    pictures = page.strip([cells(image) for image in _ten_digits()], "digits")
    charts = [
        Chart("Test error by step", by_step, "step", "squared error of a digit", log=True, whole=True),
        Chart("Test error by time", by_time, "CPU seconds of training", "squared error of a digit", log=True),
    ]
    return _section(intro, pictures, charts, table, seen, fair)


def _error_line(runs: Runs, x: list[float]) -> Line:
    one, errors = runs.contestant, runs.errors
    low, high = list(map(min, errors)), list(map(max, errors))
    width = 2.6 if one.name == "ingd" else 1.8
    return Line(one.title, palette.of_optimizer(one.name), x, list(map(mean, errors)), low, high, width)


def _ten_digits() -> list[Tensor]:
    """Return one image of each digit, as the network sees it."""
    images, labels = digits.read()
    return [images[labels == label][0, 0].float() for label in range(10)]


# ---------------------------------------------------------------------- the matrix
def _matrix_section(curves: list[Curve], table: str) -> str:
    k, dimensions = 12, {curve.panel: f"{curve.notes['dimension']:,.0f}" for curve in curves}
    intro = (
        "The matrix S is positive definite. Only examples are known: vectors, and the products of S with them. "
        "Gradient descent starts at the identity and finds S twice: among all positive-definite matrices, and among "
        "those with a Heisenberg factor A, S = A Aᵀ. S is such a matrix. The optimizer is torch.optim.SGD. gnomon "
        "moves the frame in which the coordinates are taken, so the matrix stays positive definite at every step."
    )
    seen = (
        "Descent with momentum (solid) needs far fewer iterations than descent without it (dashed), on both "
        "structures and at the same step size. On the full manifold this is Riemannian momentum, and no transport has "
        "to be computed. With a known structure there are fewer unknowns, and an iteration costs less. The cost grows "
        "with the numbers in the factor, so the gain is larger for larger matrices."
    )
    small = (
        f"The table has the iterations and CPU seconds until the gap to the known optimum is {SOLVED:g} of the first "
        "one. All four runs have the step size 0.1. It is the best of 0.03, 0.1 and 0.3 on the full manifold, with "
        "and without momentum. On the structure a step size of 0.3 works too. It needs some 40 iterations there with "
        "momentum or without: momentum helps where a problem is ill-conditioned."
    )
    by_iteration = [_gap_line(curve, [float(i) for i in range(len(curve.loss))]) for curve in curves]
    by_time = [_gap_line(curve, curve.seconds) for curve in curves]
    patterns = [
        page.figure(_pattern(Dense(k)), f"full: {dimensions['full']} unknowns"),
        page.figure(_pattern(Heisenberg(k, head=2, tail=2)), f"Heisenberg: {dimensions['Heisenberg']} unknowns"),
    ]
    charts = [
        Chart("Gap by iteration", by_iteration, "iteration", "gap, as a share of the first", log=True, whole=True),
        Chart("Gap by time", by_time, "CPU seconds", "gap, as a share of the first", log=True),
    ]
    return _section(intro, page.strip(patterns, "patterns"), charts, table, seen, small)


def _gap_line(curve: Curve, x: list[float]) -> Line:
    gaps = [max(gap / curve.gaps[0], FLOOR) for gap in curve.gaps]
    end = next((i + 1 for i, gap in enumerate(gaps) if gap == FLOOR), len(gaps))
    dashes = DASHES[not curve.settings["momentum"]]
    return Line(curve.method, STRUCTURE_COLORS[curve.panel], x[:end], gaps[:end], width=2.2, dashes=dashes)


def _pattern(group: Group) -> str:
    """Return a picture of the entries that a factor of this structure has."""
    ones = tuple(torch.ones(shape) for shape in group.shapes)
    return cells(group.to_dense(ones))


# ---------------------------------------------------------------------- the posterior
def _posterior_section(posteriors: list[Posterior], table: str) -> str:
    intro = (
        "Eight schools tried a coaching programme. For each school there is an estimate of the effect, with a large "
        "error. A hierarchical model says that the true effects vary around a mean, with an unknown spread. These are "
        "ten unknowns. A Gaussian near their posterior is found by natural-gradient steps, with two structures. With "
        "an arrow factor the effects depend on mean and spread. With the other structure (mean field) all unknowns "
        "are independent."
    )
    seen = (
        "The model is so small that integration over a grid gives the exact answer, in grey. The arrow is close to "
        "it. Mean field has too small a spread for the mean effect, because it cannot express that this mean moves "
        "with the effects. The bound (ELBO) says so without the exact answer: higher is better."
    )
    small = (
        "The table has means ± standard deviations. The largest error is over all ten unknowns, of a mean in standard "
        "deviations or of a logarithm of a standard deviation. The last column counts the gradients of the density. "
        "Nothing was tuned: gnomon.vi.fit has its defaults."
    )
    charts = []
    for unknown in posteriors[0].marginals:
        lines = [_density_line(posterior, unknown) for posterior in posteriors]
        charts.append(Chart(unknown.capitalize(), lines, "points in the test", "density", from_zero=True))
    return _section(intro, "", charts, table, seen, small)


def _density_line(posterior: Posterior, unknown: str) -> Line:
    marginal = posterior.marginals[unknown]
    name, width = posterior.name, 3.4 if posterior.name == "exact" else 2.0
    return Line(name, POSTERIOR_COLORS[name], marginal.x, marginal.density, width=width)


# ---------------------------------------------------------------------- all of them
def _section(intro: str, pictures: str, charts: list[Chart], table: str, explanation: str, details: str) -> str:
    """Return the section of an experiment. Its charts have the same lines."""
    shown = pictures + legend(charts[0].lines) + page.charts(chart.inline() for chart in charts) + table
    return page.paragraph(intro) + shown + page.paragraph(explanation) + page.paragraph(details, "small")
