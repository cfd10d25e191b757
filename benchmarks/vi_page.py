"""Tables and the page docs/results/vi.md from the records of benchmarks/vi.py."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import report
import vi_picture
from vi_methods import BUDGET, GUIDES, WITHIN, Record

PAGE = Path(__file__).parent.parent / "docs" / "results" / "vi.md"
MAIN = "gnomon.vi"
BEST = "best Gaussian"
RADON = "radon_all-radon_variable_intercept_slope_centered"
MATCHING = ("batch and match", "batch and match, from the mode")
PATHFINDER = "Pathfinder (BlackJAX)"
TO_TARGET = "_to_target"
BASELINES = (*GUIDES, *MATCHING, PATHFINDER, "full rank (BlackJAX)")
HEAD = """# Results of variational inference

This page compares `gnomon.vi.fit` at its defaults with other methods: Pyro's guides with Adam, batch and match (Cai
and others, 2024), and Pathfinder and full-rank VI of BlackJAX. They approximate the {count} posteriors of posteriordb
that have reference draws. `python benchmarks/vi.py --write` writes this page from `benchmarks/vi.jsonl`. It does not
repeat runs that are recorded there.

**Error.** The error of an approximation is the largest one over all parameters, on their own scale. Errors of means
are in posterior standard deviations. Errors of standard deviations are those of their logarithms. Errors come from
10,000 draws. At the end of our fits and for the best Gaussian they come from 262,144 draws, because the standard
deviation of a heavy-tailed parameter has a sampling error of its own.

**Costs.** Evaluations are gradients of the log density, one for each draw. A product of the Hessian with a vector
counts as two. The search for the mode is counted. Seconds are CPU time of the process with one thread. They do not
include the checks. k-hat is the shape of the tail of the importance weights. Above 0.7 the weights cannot correct the
approximation.

**Two counts.** *To within {within}* is what a method spends until two checks in a row find it within {within} of the
reference draws. This goal is the same for all methods. The checks of `gnomon.vi` are fits with `max_steps` of 1, 2, 4
and so on. *To the end* is what a fit spends until it returns by itself: it continues until an estimate of its own
error is small, and then searches for other modes. The baselines do neither. They do not know when they are within
{within}, so without the reference draws a user would let them run longer. That is why a baseline has the first count
alone, and is compared with both of ours.

**Baselines.** Pyro's guides start at their defaults (mean 0, standard deviations 0.1). They have ten particles a step
and the best of the rates 0.01, 0.03, 0.1 and 0.3 for each posterior. Batch and match has 32 draws a step and the
schedule of its paper. It runs twice: from mean 0 and covariance I, and from the mode and the inverse of the Hessian
there. Full-rank VI of BlackJAX has ten draws a step and the same four rates of Adam. It calls the same densities, and
its times do not include compilation. A run of a baseline ends after {budget:,} evaluations or 5 seconds. Pathfinder
ends by itself, starts at a random point, and has one check. Baselines have one seed, `gnomon.vi` has five.
"""


# ---------------------------------------------------------------------- records
Table = dict[tuple[str, str], list[Record]]


def by_posterior_and_method(records: Iterable[Record]) -> Table:
    table: Table = defaultdict(list)
    for record in records:
        table[record["posterior"], record["method"]].append(record)
    return table


def best_rate(records: list[Record]) -> Record | None:
    """Of several rates the one that reached the target first, or else that with the smallest error."""

    def rank(record: Record) -> tuple[float, float]:
        reached, error = record["evaluations_to_target"], record["error"]
        return (math.inf if reached is None else reached, math.inf if error is None else error)

    return min(records, key=rank) if records else None


def halves(names: list[str]) -> tuple[list[str], list[str]]:
    """Development and judgement: every second name, from the first and from the second."""
    return names[::2], names[1::2]


def worst(records: list[Record]) -> float:
    """The largest error of several seeds; a failure is infinite."""
    return max(math.inf if record["error"] is None else record["error"] for record in records)


def median(records: list[Record], part: str) -> float | None:
    """Of several seeds, None where one of them has none."""
    values = [record[part] for record in records]
    return None if any(value is None for value in values) else statistics.median(values)


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


# ---------------------------------------------------------------------- cells
def number(value: float | None, digits: int = 2) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}f}"


def bound(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


# ---------------------------------------------------------------------- tables
def summary(table: Table, names: list[str]) -> str:
    """One row a method: how many posteriors it reaches, and what it takes beside ours."""
    development, judgement = halves(names)
    rows = []
    for method in (MAIN, *BASELINES):
        chosen = {name: _chosen(table, name, method) for name in names}
        chosen = {name: records for name, records in chosen.items() if records}
        if not chosen:
            continue
        reached = [name for name, records in chosen.items() if median(records, "evaluations_to_target") is not None]
        evaluations = [median(chosen[name], "evaluations_to_target") for name in reached]
        cells = [
            f"{len(reached)} of {len(chosen)}",
            f"{len(set(reached) & set(development))} and {len(set(reached) & set(judgement))}",
        ]
        typical = count(statistics.median(value for value in evaluations if value)) if evaluations else "-"
        rows.append([method, *cells, typical, *_ratios(table, chosen, method)])
        if method == MAIN:
            ends = [median(records, "evaluations") for records in chosen.values()]
            typical = count(statistics.median(value for value in ends if value))
            rows.append([f"{MAIN}, to the end", *cells, typical, *_ratios(table, chosen, method, end="")])
    header = ["method", "within 0.2", "development and judgement", "median evaluations"]
    ratios = [f"{what}, times ours {end}" for what in ("evaluations", "seconds") for end in ("to 0.2", "to the end")]
    return report.table([*header, *ratios], rows)


def spent_to_target(table: Table, names: list[str]) -> vi_picture.Spent:
    """What each method took where it reached the target, for the picture."""
    spent: vi_picture.Spent = {}
    for method in (MAIN, *BASELINES):
        chosen = [records for name in names if (records := _chosen(table, name, method))]
        medians = {part: [median(records, part) for records in chosen] for part in vi_picture.PARTS}
        if chosen:
            spent[method] = {part: [x for x in values if x is not None] for part, values in medians.items()}
    return spent


def _chosen(table: Table, name: str, method: str) -> list[Record]:
    records = table.get((name, method), [])
    if not any("rate" in record for record in records):
        return records
    best = best_rate(records)
    return [] if best is None else [best]


def _ratios(table: Table, chosen: dict[str, list[Record]], method: str, end: str = TO_TARGET) -> list[str]:
    """What a method spends, beside what ours spends to the target and to its end: evaluations, then seconds."""
    return [
        _ratio(table, chosen, method, what + end, what, our_end)
        for what in ("evaluations", "seconds")
        for our_end in (TO_TARGET, "")
    ]


def _ratio(table: Table, chosen: dict[str, list[Record]], method: str, part: str, what: str, our_end: str) -> str:
    """The geometric mean over the posteriors that ours reaches; what a baseline never reached counts with all it spent.

    Pathfinder ends by itself, with or without success: there only the posteriors count that it reached.
    """
    ratios, at_least = [], ""
    for name, records in chosen.items():
        mine = table.get((name, MAIN), [])
        ours = median(mine, what + our_end) if mine and median(mine, what + TO_TARGET) is not None else None
        theirs = median(records, part)
        if ours is None or (theirs is None and method == PATHFINDER):
            continue
        if theirs is None:
            at_least = "at least "
            theirs = max(records[0][what], 1e-9)
        ratios.append(theirs / ours)
    return f"{at_least}{geometric_mean(ratios):.1f}" if ratios else "-"


def posteriors_table(table: Table, names: list[str], dims: dict[str, int]) -> str:
    rows = []
    development, _ = halves(names)
    for name in names:
        records = table.get((name, MAIN), [])
        if not records:
            continue
        full = best_rate(table.get((name, "AutoMultivariateNormal"), []))
        matched = [_chosen(table, name, method) for method in MATCHING]
        rows.append(
            [
                name.split("-", 1)[1] if name.split("-")[0] in name.split("-", 1)[1] else name,
                "d" if name in development else "j",
                str(dims[name]),
                number(worst(records)),
                count(median(records, "evaluations_to_target")),
                count(median(records, "evaluations")),
                number(median(records, "seconds_to_target")),
                number(statistics.median(record["khat"] or math.inf for record in records)),
                bound(median(records, "elbo")),
                bound(full["elbo"] if full else None),
                _reached_or_error(full),
                *(_reached_or_error(part[0] if part else None) for part in matched),
            ]
        )
    header = ["posterior", "half", "dim", "error, worst of 5", "evaluations", "to the end", "seconds", "k-hat"]
    others = ["bound", "Pyro's bound, full rank", "Pyro, full rank", "batch and match", "from the mode"]
    return report.table([*header, *others], rows)


def _reached_or_error(record: Record | None) -> str:
    """The evaluations to the target; in brackets the error at the end, where it was not reached."""
    if record is None:
        return ""
    if record["evaluations_to_target"] is not None:
        return count(record["evaluations_to_target"])
    return f"({number(record['error'], 1)})" if record["error"] is not None else "(failed)"


def beyond(table: Table, names: list[str]) -> str:
    """The posteriors on which our worst seed is beyond the target, and what the best Gaussian has there."""
    rows = []
    for name in names:
        ours, best = table.get((name, MAIN), []), table.get((name, BEST), [])
        if ours and worst(ours) > WITHIN:
            errors = ", ".join(number(record["error"]) for record in sorted(ours, key=lambda record: record["seed"]))
            elbos = number(median(ours, "elbo"))
            cells = [number(best[0]["error"]), number(best[0]["elbo"])] if best else ["-", "-"]
            rows.append([name, errors, cells[0], elbos, cells[1]])
    return report.table(["posterior", "errors of 5 seeds", "of the best Gaussian", "our bound", "its bound"], rows)


def variants(table: Table, names: list[str]) -> str:
    """Momentum and rates: the target, and the end."""
    rows = []
    methods = sorted({method for name, method in table if method.startswith(MAIN) and name in names})
    common = [name for name in names if all((name, method) in table for method in methods)]
    for method in methods:
        records = [record for name in common for record in table[name, method] if record["seed"] == 0]
        reached = [record["evaluations_to_target"] for record in records if record["evaluations_to_target"] is not None]
        ends = [record["evaluations"] for record in records if record["evaluations"]]
        if not reached:
            continue
        rows.append(
            [
                method,
                f"{len(reached)} of {len(records)}",
                count(geometric_mean(reached)),
                count(geometric_mean(ends)),
                f"{sum(bool(record.get('converged')) for record in records)}",
            ]
        )
    header = ["method", "within 0.2", "evaluations to it", "evaluations to the end", "stopped by themselves"]
    return report.table(header, rows)


def hierarchical(table: Table, dims: dict[str, int]) -> str:
    rows = []
    for (name, method), records in table.items():
        if name not in dims or "elbo" not in records[0]:  # times of steps have no bound
            continue
        choose = min if method == MAIN else max
        best = choose(records, key=lambda record: -math.inf if record["elbo"] is None else record["elbo"])
        cells = [best.get("structure") or "", str(best.get("steps") or ""), count(best["evaluations"])]
        elbo = "failed" if best["elbo"] is None else f"{best['elbo']:,.2f} ± {number(best['elbo_error'])}"
        rows.append([name, str(dims[name]), method, *cells, number(best["seconds"], 1), elbo, number(best["khat"])])
    rows.sort(key=lambda row: (int(row[1]), row[0], row[2] != MAIN, row[2]))
    header = ["posterior", "dim", "method", "structure", "steps", "evaluations", "seconds", "bound", "k-hat"]
    return report.table(header, rows)


def radon(table: Table) -> str:
    """The largest radon model, with the structure that was found beside mean field and a full covariance."""
    rows = []
    for method in (MAIN, f"{MAIN}, diagonal", f"{MAIN}, full", "AutoDiagonalNormal", "AutoMultivariateNormal"):
        records = table.get((RADON, method), [])
        if not records:
            continue
        best = max(records, key=lambda record: -math.inf if record["elbo"] is None else record["elbo"])
        same = [record for record in records if record.get("rate") == best.get("rate")]
        bounds = [record["elbo"] for record in same]
        rows.append(
            [method, number(min(bounds)), count(median(same, "evaluations")), number(median(same, "seconds"), 1)]
        )
    return report.table(["method", "bound, the worst seed", "evaluations", "seconds"], rows)


HALVES = """**Halves.** Every second name is for development, and the others are for judgement. We chose defaults on the
development half and on the hierarchical models. We had seen results of the judgement half before some choices:

- We saw that fits from one start end in a wrong mode on `hmm_drive_0` and `lotka_volterra`. Then we added searches
  for other modes.
- We ran all posteriors before the last changes of the searches and of when fits end.
- We gave up a variant of the gradients after we had run all posteriors with it.
"""
BEYOND = """## Beyond 0.2

The best Gaussian is the one with the largest bound that L-BFGS finds with 2,048 fixed draws. It starts from our fit
and from the mode near the means of the reference. "Our bound" and "its bound" are the evidence lower bounds of our
fit and of the best Gaussian.
"""
EACH = """## Posterior by posterior

The column "evaluations" has those to within 0.2. The columns of Pyro and of batch and match have them too, or the
error at the end in brackets. Half d is development, and j is judgement. Bounds are those at the end, from 10,000
draws, up to the constants that a model drops.
"""
RATES = """## Rates and momentum

The table has geometric means of evaluations for seed 0, over the posteriors of the development half on which all of
these variants ran. Momentum averages gradients, so the rate keeps its meaning: a rate of 2 is a Newton step. By
default the rate is 1, or less where the draws are few, and there is no momentum.
"""
LOCAL = """## Hierarchical models without reference draws

The bound is known up to the constants that a model drops. It is an average over 10,000 draws, and with 100,000
unknowns over the 128 draws of the fit itself. The rows of `gnomon.vi` have the seed with the worst bound of five.
With 100,000 unknowns there is one seed. The rows of Pyro's guides have the best of four rates. Each rate has at most
20,000 evaluations or 5 CPU seconds, or 30 seconds with more than 500 unknowns.
"""
LARGEST_RADON = """## The largest radon model

The model `radon_all` is centered and has varying intercepts and slopes: 777 unknowns. `gnomon.vi` finds pairs of an
intercept and a slope that are independent given five globals. The table compares this structure with mean field and a
full covariance. Both come from the same fit and from Pyro's guides. The guides have the best of four rates, and end
after 20,000 evaluations or 30 CPU seconds.
"""
PICTURE = """![Posteriors within 0.2 of the reference, by gradient evaluations and by CPU time](vi.png)
"""
CONCLUSIONS = """If a baseline never reached the goal, it counts with all that it spent.
So its ratio is a lower bound ("at least").

- **No Gaussian reaches two posteriors**, `gp_pois_regr` and `one_comp_mm_elim_abs`. The best Gaussian has about the
  same error there as the fit.
- **Two posteriors need a search for other modes**, `hmm_drive_0` and `lotka_volterra`. From one start most methods
  end in a wrong mode. The fit searches after it has converged, so it takes thousands of evaluations there.
- **The start matters.** Batch and match as published starts from mean 0 and covariance I. It fails on regressions
  whose scales are far from 1. If it starts from the mode and the inverse of the Hessian there, it is the strongest of
  the baselines. It then takes more evaluations than the fit and less CPU time, because its steps are simpler.
- **Pathfinder** takes few evaluations, and ends within 0.2 on few posteriors. Its ratios are over those alone.
- **Momentum does not help here.** Steps are near Newton steps, which leave momentum little to speed up: 0.5 takes as
  long as none, and 0.9 takes longer. At a rate of 0.25 a momentum of 0.5 helps a little. A doubled rate helps more
  (see below).
- **The fit continues after it is within 0.2**, to estimate its own error and to search for other modes. Compare the
  columns "evaluations" and "to the end".
"""


LARGE = """## 100,000 unknowns

The table has the CPU time of a step of `gnomon.vi.fit` in float64, the default, on the generated mixed model with 5
global unknowns. The time of the density is included. Times are the least of five measurements, because other programs
ran beside them. The rows with path gradients have a given structure, `Arrow(100_000, rank=5)` or `"low_rank"`. If the
fit has found the arrow itself, it takes Price's gradients. A step then takes longer, and few steps are needed. With
path gradients the fit has not converged there in 1,000 steps. A test checks that no tensor of a step has more than 24
numbers for each unknown.
"""

MORE = "[The page of variational inference](../docs/results/vi.md) says what the columns mean, and has more tables."


def steps_table(records: Iterable[Record]) -> str:
    rows = [
        [record["structure"], record["gradients"], str(record["evaluations_a_step"]), number(record["milliseconds"], 1)]
        for record in records
        if "milliseconds" in record
    ]
    return report.table(["structure", "gradients", "evaluations a step", "milliseconds"], rows)


def page(records: list[Record], names: list[str], local_names: list[str], dims: dict[str, int]) -> str:
    """The whole page."""
    table = by_posterior_and_method(records)
    development, judgement = halves(names)
    parts = [
        HEAD.format(count=len(names), within=WITHIN, budget=BUDGET),
        HALVES,
        f"Development: {', '.join(development)}.\n\nJudgement: {', '.join(judgement)}.\n",
        "## In short\n",
        summary(table, names) + "\n",
        PICTURE,
        CONCLUSIONS,
        BEYOND,
        beyond(table, names) + "\n",
        EACH,
        posteriors_table(table, names, dims) + "\n",
        RATES,
        variants(table, names) + "\n",
        LOCAL,
        hierarchical(table, {name: dims[name] for name in local_names}) + "\n",
        LARGEST_RADON,
        radon(table) + "\n",
        LARGE,
        steps_table(records),
    ]
    return "\n".join(parts)


def write(records: list[Record], names: list[str], local_names: list[str], dims: dict[str, int]) -> None:
    """Write the page, and the summary into RESULTS.md."""
    PAGE.write_text(page(records, names, local_names, dims) + "\n")
    spent = spent_to_target(by_posterior_and_method(records), names)
    vi_picture.draw(spent, len(names), PAGE.with_suffix(".png"))
    machine = f"`python benchmarks/vi.py --write`, on {report.machine('pyro-ppl')}."
    short = summary(by_posterior_and_method(records), names)
    text = f"## Variational inference\n\n{machine}\n\n{short}\n\n{MORE}"
    report.write("vi", text, {"machine": machine, "posteriors": len(names), "runs": len(records)})
