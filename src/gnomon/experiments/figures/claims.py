"""What the paper says of its figures, beside what the runs show. Every sentence about the runs is computed."""

from __future__ import annotations

import math

from ..common.document import Claim
from ..common.trials import SOLVED, Curve
from ..common.words import listed
from . import manifold, rosenbrock
from .results import Group, Results, average

EXACT = ("Alimisis 2020", "Alimisis 2021", "Ahn & Sra 2020")
"""The methods with momentum that use exact Riemannian maps."""

SIMILAR = 0.01
"""Methods perform alike if their last gaps differ by less than this share of the first gap."""

BORNE = 0.01
"""A method bears a step if less than this share of the first gap is left at the end."""

AS_GOOD = 1.001
"""A loss is as good as another if it is at most this multiple of it."""


# ---------------------------------------------------------------------- figures a and b
def on_the_manifold(results: Results) -> Claim:
    """Compare our update with the methods that use exact maps, on one SPD matrix."""
    panel = results.curves[0].panel
    groups = results.groups(panel)
    shared = {group[0].method: group for group in groups if group[0].shared}
    last = {method: _last_share(results, group) for method, group in shared.items()}
    ours, exact = shared[manifold.OURS], {method: shared[method] for method in EXACT}
    seen = [
        f"At the same step and momentum our update ends at {_share(last[manifold.OURS])} of the first gap, "
        f"{listed([f'{method} at {_share(last[method])}' for method in exact])}.",
        f"In every iteration our update and the exact heavy ball ({EXACT[0]}) differ by at most "
        f"{_share(_largest_difference(results, ours, exact[EXACT[0]]))} of the first gap.",
        f"An iteration of our update takes {_milliseconds(ours)} ms of CPU time. Those of the methods with exact maps "
        f"take {listed([_milliseconds(group) for group in exact.values()])} ms.",
    ]
    plain, bounded = (_largest_step(results, groups, method) for method in (manifold.OURS, manifold.OURS_BOUNDED))
    theirs = max(_largest_step(results, groups, method) for method in EXACT)
    seen.append(
        f"The largest step of the grid that leaves less than {BORNE:.0%} of the gap is {_step(plain)} for our update, "
        f"{_step(bounded)} with bounded steps, and {_step(theirs)} for the methods with exact maps."
    )
    alike = all(abs(last[method] - last[manifold.OURS]) <= SIMILAR for method in EXACT)
    return Claim(
        "With one step size and one momentum for all methods, the update that approximates the Riemannian maps "
        "performs as the methods with exact maps do. It can use a larger step size than they can.",
        seen,
        f"The similar performance {'holds' if alike else 'does not hold'} here. "
        + _step_verdict(plain, bounded, theirs),
    )


def _step_verdict(plain: float, bounded: float, theirs: float) -> str:
    as_published, by_default = (_compared(step, theirs) for step in (plain, bounded))
    if as_published == by_default:
        return f"That it can use a larger step {as_published}."
    return (
        f"That it can use a larger step {as_published} for the update as published, and {by_default} with bounded "
        "steps, which are the library's default."
    )


def _compared(step: float, theirs: float) -> str:
    if step == theirs:
        return "cannot be seen in this grid"
    return "holds" if step > theirs else "does not hold"


# ---------------------------------------------------------------------- figure c
def on_the_submanifold(results: Results) -> Claim:
    """Compare the update on the Gaussian submanifold with the methods on the ambient manifold."""
    shared = {group[0].method: group for group in results.groups("gmm") if group[0].shared}
    losses = {method: average(group, lambda curve: curve.final) for method, group in shared.items()}
    ambient = {method: loss for method, loss in losses.items() if method not in manifold.SUB}
    best = min(ambient, key=lambda method: ambient[method])
    ours = losses[manifold.OURS_SUB]
    away = {method: _largest_distance(group) for method, group in shared.items()}
    off = [away[method] for method in ambient]
    reached, inside = ours <= AS_GOOD * ambient[best], max(away[method] for method in manifold.SUB) == 0
    return Claim(
        "The update on the Gaussian submanifold (sub) performs as the methods on the ambient SPD manifold do. Each of "
        "its iterates is a mixture of proper Gaussians.",
        [
            f"At the same step and momentum the mean final loss of our update on the submanifold is {ours:.4f}. The "
            f"lowest one of a method on the ambient manifold is {ambient[best]:.4f} ({best}).",
            f"During the runs the largest distances of the methods on the ambient manifold from the submanifold are "
            f"between {min(off):.2g} and {max(off):.2g}. That of the methods on the submanifold is "
            f"{max(away[method] for method in manifold.SUB):.2g}.",
        ],
        f"The submanifold method {'reaches' if reached else 'does not reach'} the loss of the others here, and its "
        f"iterates {'are all' if inside else 'are not all'} mixtures of proper Gaussians.",
    )


# ---------------------------------------------------------------------- figure d
def of_the_preconditioner(results: Results) -> Claim:
    """Compare structured preconditioning with and without momentum, and with other methods."""
    forms = list(dict.fromkeys(curve.panel for curve in results.curves))
    seen = []
    ahead: dict[str, list[str]] = {}
    for form in forms:
        groups = results.groups(form)
        needed = {method: _fewest(groups, method) for method in dict.fromkeys(group[0].method for group in groups)}
        seen.append(_who_solves(form, needed))
        seen += _momentum_of_the_preconditioner(form, groups)
        for method in needed:
            ahead.setdefault(method, []).extend([form] if needed[rosenbrock.OURS] < needed[method] else [])
    rivals = (rosenbrock.NGD, "Adam", "BFGS (SciPy)", "L-BFGS (SciPy)")
    behind: dict[int, list[str]] = {}
    for method in rivals:
        behind.setdefault(len(ahead[method]), []).append(method)
    counts = [
        f"than {listed(behind[count])} on {count} of {len(forms)} forms" for count in sorted(behind, reverse=True)
    ]
    return Claim(
        "Our update and structured NGD precondition with a Heisenberg structure and do not form the Hessian. Momentum "
        "in the preconditioner could be useful. BFGS and Adam are the baselines.",
        seen,
        f"Our update with momentum needs fewer iterations {', and '.join(counts)}. The charts by work count "
        "Hessian-vector products too, which the paper does not.",
    )


def _who_solves(form: str, needed: dict[str, float]) -> str:
    """Return which methods solve a form of the function in how many iterations, and which do not."""
    solved = [f"{method}: {count:.0f}" for method, count in needed.items() if math.isfinite(count)]
    failed = listed([method for method, count in needed.items() if not math.isfinite(count)])
    if not solved:
        return f"On the {form} form no method reaches a gap of {SOLVED:g} of the first."
    end = f" The gap of {failed} is never so small." if failed else ""
    return f"On the {form} form the gap is {SOLVED:g} of the first after these iterations: {'; '.join(solved)}.{end}"


def _momentum_of_the_preconditioner(form: str, groups: list[Group]) -> list[str]:
    """Return a sentence if the grid has our update with and without that momentum."""
    ours = [group for group in groups if group[0].method == rosenbrock.OURS]
    by_momentum = {
        bool(momentum): _fewest([g for g in ours if g[0].settings["precond_momentum"] == momentum], rosenbrock.OURS)
        for momentum in {group[0].settings["precond_momentum"] for group in ours}
    }
    if len(by_momentum) < 2:
        return []
    return [
        f"On the {form} form our update at its best settings {_needs(by_momentum[True])} with momentum in the "
        f"preconditioner, and {_needs(by_momentum[False])} without."
    ]


# ---------------------------------------------------------------------- numbers
def _last_share(results: Results, group: Group) -> float:
    """Return the last gap as a share of the first. It is infinite if a run failed."""
    return average(group, lambda curve: math.inf if curve.failure else results.shares(curve)[-1])


def _largest_difference(results: Results, one: Group, other: Group) -> float:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(*map(results.shares, (a, b)), strict=False)]
    return max(abs(a - b) for a, b in pairs)


def _largest_step(results: Results, groups: list[Group], method: str) -> float:
    """Return the largest step size of the grid that a method bears, or 0 if it bears none."""
    borne = [g[0].settings["lr"] for g in groups if g[0].method == method and _last_share(results, g) < BORNE]
    return max(borne, default=0.0)


def _largest_distance(group: Group) -> float:
    return max(max(curve.notes.values(), default=0.0) for curve in group)


def _fewest(groups: list[Group], method: str) -> float:
    """Return the fewest iterations in which a method solves the problem, over its settings."""
    return min((average(g, Curve.iterations_to_solve) for g in groups if g[0].method == method), default=math.inf)


def _needs(count: float) -> str:
    return f"needs {count:.0f} iterations" if math.isfinite(count) else "does not solve the problem"


def _share(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "no finite share"


def _step(size: float) -> str:
    return f"{size:g}" if size else "none"


def _milliseconds(group: Group) -> str:
    return f"{1e3 * average(group, lambda curve: curve.seconds_per_iteration):.2g}"
