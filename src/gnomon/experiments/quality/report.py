"""The results of the suite as tables, for a terminal and as a page of Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

import numpy as np
from rich.table import Table

from ..common.machine import versions_text
from ..common.tables import markdown_table, titled_table
from .contestants import ADAMW, CONTESTANTS
from .runs import Outcome
from .statistics import (
    Array,
    Estimate,
    Score,
    are_best,
    bootstrap,
    geometric_means,
    mean_ranks,
    steps_to,
    time_to,
)
from .study import CHOICE_SEED, Study
from .suite import DEVELOPMENT, JUDGEMENT, TASKS

Outcomes = Callable[[str, str], list[Outcome] | None]
"""The results of a task and an optimizer, or None if there are none."""

INTRODUCTION = (
    "`gnomon bench quality` trains {tasks} unlike tasks with {optimizers} optimizers. The drawings show the test "
    "measure of each optimizer at its best learning rate, as a multiple of the task's best one. Below the dotted line "
    "are the tasks of judgement, by which INGD's defaults were not chosen."
)
MEASURED = f"""\
## How it is measured

- **Rates.** Each optimizer has {{rates}} learning rates, each twice the one before, around its usual one. They are the
  same on every task. The rate with the lowest validation measure on seed {CHOICE_SEED} is the best one.
- **Seeds.** The best rate is trained with {{seeds}} further seeds. The tables show their test measure. For the
  autoencoder it is the training loss, and for the equation the error of the solution.
- **Schedule.** All optimizers have the task's schedule: a warm-up if it has one, then a cosine to zero. Everything else
  is at each optimizer's defaults.
- **Time.** Times are CPU time of one thread without measures, as multiples of AdamW's. Each optimizer was timed at its
  usual rate in turns with AdamW, in one process.
- **Failures.** A run that diverges counts as infinitely bad."""
CHOSEN = f"""\
## What was chosen by which tasks

- **Development tasks** ({", ".join(DEVELOPMENT)}). INGD's defaults were chosen by them: polar factors, for how many
  rows they are taken, by how many iterations and when in halves, how the length of a step depends on a layer's width
  and on its direction, how long the steps of embeddings are, weight decay that follows the schedule, how fast the
  intervals between updates grow, and which sides are diagonal.
- **Not taken.** These were tried on the development tasks: other momenta (0.85 and 0.9), weight decays (0.1 and 0.4,
  none in embeddings, cautious), rates of the fallback (a third, twice and three times the layers'), damping (0.05 and
  0.6), memories of the factors (b1 of 0.1, 0.3 and 0.4), updates every twenty steps, faster growth of intervals where
  batches have few rows, two and four iterations of polar factors instead of three, quarters of matrices instead of
  halves, the same halves at each step, halves at every second step only, rows or entries of polar factors that are
  normalized by their running size, weights of fixed norm, a diagonal factor in each layer, no polar factors of output
  layers, steps of output layers of half and twice the length, steps of embeddings of 0.5, 1, 4 and 8 times `step_rms`,
  and fewer rows of statistics.
- **Words.** Between 2 and 4 times `step_rms` for embeddings a GPT with a vocabulary of 4,096 words decided. It is no
  task of the suite.
- **Judgement tasks** ({", ".join(JUDGEMENT)}). Only the learning rate of each optimizer was chosen by them, with
  validation data. But they were not unseen: results of an earlier INGD on them, and the time of its steps there, were
  known when the later choices were made.
- **Magic.** Its measure was its loss at first. It became its error after results had been seen, because a few samples
  decide the loss.
- **Others.** The grids of rates were chosen once from each optimizer's usual rate. AdamW, SOAP and Muon were not tuned
  beyond their rate."""


@dataclass(frozen=True)
class Section:
    """A table with a title, and what it shows. A cell in bold has asterisks around it."""

    title: str
    text: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        return f"## {self.title}\n\n{self.text}\n\n{markdown_table(self.header, self.rows, left=self.header[:1])}"

    def terminal(self) -> Table:
        table = titled_table(self.title)
        for place, name in enumerate(self.header):
            table.add_column(name, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*(_marked_up(cell) for cell in row))
        return table


@dataclass(frozen=True)
class Panel:
    """What a picture of the results shows: a name for its file, a title, and the results of tasks and optimizers."""

    name: str
    title: str
    outcomes: Outcomes


class Report:
    """The tables of a study. Tasks and optimizers without results are left out or have empty cells."""

    def __init__(self, study: Study, measures: dict[str, str]) -> None:
        self.study, self.measures = study, measures
        self.optimizers = study.optimizers
        self.titles = [CONTESTANTS[name].title for name in self.optimizers]

    @property
    def sets(self) -> dict[str, list[str]]:
        """The tasks of each part of the suite, and all of them."""
        parts = {"development": DEVELOPMENT, "judgement": JUDGEMENT, "all": TASKS}
        return {name: [task for task in part if task in self.study.tasks] for name, part in parts.items()}

    @property
    def panels(self) -> list[Panel]:
        """The results at equal steps, and those in AdamW's time if there are any."""
        found = [Panel("quality-steps", "At equal steps", self.study.final_outcomes)]
        if ADAMW in self.study.references:
            found.append(Panel("quality-time", "In AdamW's CPU time", self.outcomes_in_time_of(ADAMW)))
        return found

    # ------------------------------------------------------------------ the page
    def markdown(self) -> str:
        introduction = INTRODUCTION.format(tasks=len(self.study.tasks), optimizers=len(self.optimizers))
        pictures = [f"![{panel.title}]({panel.name}.svg)" for panel in self.panels]
        parts = ["# Optimizers on unlike tasks", introduction, '<div class="charts" markdown>', *pictures, "</div>"]
        if self.study.scale.name != "full":
            parts.append(f"These are results of the scale `{self.study.scale.name}`, which are not to be cited.")
        if missing := len(self.study.left()):
            parts.append(f"At least {missing} runs are missing. The cells of missing runs are empty.")
        parts += [MEASURED.format(rates=len(self.study.scale.rates), seeds=self.study.scale.seeds), CHOSEN]
        parts += [section.markdown() for section in self.sections]
        if self.failures:
            parts += ["## Runs that failed", "\n".join(f"- {line}" for line in self.failures)]
        return "\n\n".join([*parts, f"Measured with {versions_text()}."]) + "\n"

    @cached_property
    def sections(self) -> list[Section]:
        sections = [self.final_measures()]
        if ADAMW in self.optimizers:
            sections.append(self.summary("Summary at equal steps", self.study.final_outcomes))
        for reference in self.study.references:
            sections.append(self.measures_in_time_of(reference))
            if ADAMW in self.optimizers:
                title = f"Summary in the time of {CONTESTANTS[reference].title}"
                sections.append(self.summary(title, self.outcomes_in_time_of(reference)))
        if ADAMW in self.optimizers:
            sections.append(self.steps_and_time())
            if self.study.shares:
                sections.append(self.planned_time())
        if self.study.scale.around:
            sections.append(self.sensitivity())
        return [*sections, self.rates_and_times()]

    # ------------------------------------------------------------------ measures
    def final_measures(self) -> Section:
        text = "Mean test measure of the seeds, with the 95% interval of the mean. Lower is better."
        return self._by_task("Final measure at equal steps", text, self.study.final_outcomes)

    def measures_in_time_of(self, reference: str) -> Section:
        title = CONTESTANTS[reference].title
        text = f"Runs with as many steps as fit in the CPU time of {title}'s, with a schedule for these steps."
        return self._by_task(f"Final measure in the time of {title}", text, self.outcomes_in_time_of(reference))

    def outcomes_in_time_of(self, reference: str) -> Outcomes:
        def found(task: str, optimizer: str) -> list[Outcome] | None:
            own = self.study.final_outcomes(task, optimizer)
            failed = own is not None and any(one.failure for one in own)
            return own if failed else self.study.outcomes_in_time_of(reference, task, optimizer)

        return found

    def _by_task(self, title: str, text: str, outcomes: Outcomes) -> Section:
        rows = []
        for task in self.sets["all"]:
            found = [outcomes(task, optimizer) for optimizer in self.optimizers]
            scores = [None if one is None else Score.of(one) for one in found]
            cells = [_bold(_score(score), best) for score, best in zip(scores, are_best(scores), strict=True)]
            rows.append([f"{task} ({self.measures[task]})", *cells])
        text += " Bold: the best, and what is within the interval of the best."
        return Section(title, text, ["task (measure)", *self.titles], rows)

    # ------------------------------------------------------------------ over tasks
    def values(self, tasks: Iterable[str], outcomes: Outcomes) -> Array:
        """Return the mean measures of tasks (rows) and optimizers (columns), of tasks that all have results of."""
        rows = []
        for task in tasks:
            found = [outcomes(task, optimizer) for optimizer in self.optimizers]
            if all(one is not None for one in found):
                rows.append([Score.of(one).mean for one in found if one is not None])
        return np.array(rows).reshape(-1, len(self.optimizers))

    def ratios(self, values: Array) -> Array:
        """Return measures as multiples of AdamW's, without tasks on which AdamW failed."""
        base = values[:, self.optimizers.index(ADAMW)]
        known = np.isfinite(base)
        return values[known] / base[known, None]

    def summary(self, title: str, outcomes: Outcomes) -> Section:
        columns: list[list[str]] = []
        header = ["optimizer"]
        for name, tasks in self.sets.items():
            values = self.values(tasks, outcomes)
            ratios = self.ratios(values)
            if not len(ratios):
                continue
            header += [f"{name}: measure / AdamW's", f"{name}: mean rank"]
            columns.append(_estimates(bootstrap(geometric_means, ratios), ".3f"))
            columns.append(_estimates(bootstrap(mean_ranks, values), ".2f"))
        text = (
            "Geometric mean over tasks of the measure as a multiple of AdamW's, and the mean rank, each with the 95% "
            "interval of a bootstrap over tasks. A value below 1 is better than AdamW."
        )
        return Section(title, text, header, [list(row) for row in zip(self.titles, *columns, strict=True)])

    # ------------------------------------------------------------------ steps and time to AdamW's measure
    def steps_and_time(self) -> Section:
        rows, shares = [], []
        for task in self.sets["all"]:
            adamw = self.study.final_outcomes(task, ADAMW)
            if adamw is None or any(one.failure for one in adamw):
                continue
            level = mean(one.curve[-1][2] for one in adamw)  # rounded as the curves are that it is compared with
            shares.append([self._shares_to(level, task, optimizer) for optimizer in self.optimizers])
            rows.append([task, *map(_pair, shares[-1])])
        means = [_mean_pair([row[place] for row in shares]) for place in range(len(self.optimizers))]
        rows.append(["geometric mean (tasks)", *means])
        text = (
            "Share of AdamW's steps / share of its CPU time until the mean validation curve is at AdamW's final "
            "validation measure. The last row has the tasks on which it is reached."
        )
        return Section("Steps and time to AdamW's measure", text, ["task", *self.titles], rows)

    def _shares_to(self, level: float, task: str, optimizer: str) -> tuple[float, float]:
        """Return the shares of AdamW's steps and of its time until a level is reached; nan if runs are missing."""
        found, times = self.study.final_outcomes(task, optimizer), self.study.times(task, optimizer)
        if found is None or times is None:
            return math.nan, math.nan
        steps = steps_to(level, found)
        return steps / self.study.tasks[task], math.inf if steps == math.inf else times.until(steps)

    def planned_time(self) -> Section:
        rows, shares = [], []
        for task in self.sets["all"]:
            adamw = self.study.final_outcomes(task, ADAMW)
            if adamw is None or any(one.failure for one in adamw):
                continue
            level = Score.of(adamw).mean
            found = [self.study.by_time(task, optimizer) for optimizer in self.optimizers]
            shares.append([time_to(level, by_time) if by_time else math.nan for by_time in found])
            rows.append([task, *map(_share, shares[-1])])
        means = [_mean_share([row[place] for row in shares]) for place in range(len(self.optimizers))]
        rows.append(["geometric mean (tasks)", *means])
        least = f"{min(self.study.shares):g}"
        text = (
            "Share of AdamW's CPU time for which a run must be planned so that its mean test measure is AdamW's final "
            f"one. Runs were planned for {' and '.join(f'{share:g}' for share in self.study.shares)} of AdamW's time, "
            "for all of it, and with the task's own steps, each with a schedule for its steps. The time is "
            f"interpolated between them. Nothing shorter was run, so {least} means that or less. The last row has the "
            "tasks on which AdamW's measure is reached."
        )
        return Section("Time to AdamW's measure with a schedule for it", text, ["task", *self.titles], rows)

    # ------------------------------------------------------------------ learning rates
    def sensitivity(self) -> Section:
        header = ["optimizer", "half the best rate", "twice the best rate", "usual rate", "best at an end of the grid"]
        rows = []
        for optimizer, title in zip(self.optimizers, self.titles, strict=True):
            usual = CONTESTANTS[optimizer].usual
            known = list(self._by_rate(optimizer))
            ends = [best in (min(tried), max(tried)) for best, tried, _ in known]
            rows.append(
                [
                    title,
                    _worse([measures[best / 2] / measures[best] for best, _, measures in known]),
                    _worse([measures[2 * best] / measures[best] for best, _, measures in known]),
                    f"{_worse([measures[usual] / measures[best] for best, _, measures in known])} at {usual:g}",
                    f"{sum(ends)} of {len(ends)}",
                ]
            )
        text = (
            "Mean test measure of the further seeds at another rate as a multiple of that at the best rate: geometric "
            f"mean over tasks, and the largest in parentheses. The best rate was chosen on seed {CHOICE_SEED}, which "
            "is not among these seeds, so that another rate can be better than it."
        )
        return Section("Sensitivity to the learning rate", text, header, rows)

    def _by_rate(self, optimizer: str) -> Iterator[tuple[float, Collection[float], dict[float, float]]]:
        """Yield the best rate of each task, the rates that were tried, and the mean measures at and beside the best."""
        for task in self.sets["all"]:
            best = self.study.chosen_rate(task, optimizer)
            own = self.study.final_outcomes(task, optimizer)
            others = {rate: self.study.outcomes(runs) for rate, runs in self.study.others(task, optimizer).items()}
            if best is not None and own is not None and not any(one.failure for one in own) and all(others.values()):
                measures = {rate: Score.of(found).mean for rate, found in {best: own, **others}.items() if found}
                yield best, self.study.tried(task, optimizer), measures

    def rates_and_times(self) -> Section:
        rows = []
        for task in self.sets["all"]:
            cells = []
            for optimizer in self.optimizers:
                rate, times = self.study.chosen_rate(task, optimizer), self.study.times(task, optimizer)
                cells.append(f"{rate:.3g}, {times.total:.2f}" if rate is not None and times is not None else "")
            rows.append([f"{task}, {self.study.tasks[task]} steps", *cells])
        text = "The rate that was chosen, and the CPU time of a run as a multiple of AdamW's, measured in turns."
        return Section("Chosen rates and times", text, ["task", *self.titles], rows)

    @cached_property
    def failures(self) -> list[str]:
        """Lines about the runs that failed."""
        lines = []
        for run in self.study.known():
            outcome = self.study.outcome(run)
            if outcome is not None and outcome.failure:
                title = CONTESTANTS[run.optimizer].title
                lines.append(
                    f"{run.task}, {title}, rate {run.rate:.3g}, seed {run.seed} ({run.plan}): {outcome.failure}"
                )
        return lines


# ---------------------------------------------------------------------- cells
def _number(value: float, form: str = ".4g") -> str:
    return "diverged" if value == math.inf else f"{value:{form}}"


def _score(score: Score | None) -> str:
    if score is None:
        return ""
    return _number(score.mean) + ("" if math.isnan(score.half) else f" ± {score.half:.2g}")


def _bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted else text


def _marked_up(cell: str) -> str:
    return f"[bold]{cell[2:-2]}[/bold]" if cell.startswith("**") else cell.replace("[", r"\[")


def _estimates(estimates: list[Estimate], form: str) -> list[str]:
    return [f"{one.value:{form}} [{one.low:{form}}, {one.high:{form}}]" for one in estimates]


def _pair(shares: tuple[float, ...]) -> str:
    steps, seconds = shares
    if math.isnan(steps):
        return ""
    return "not reached" if steps == math.inf else f"{steps:.2f} / {seconds:.2f}"


def _mean_pair(pairs: Sequence[tuple[float, ...]]) -> str:
    reached = np.array([pair for pair in pairs if math.isfinite(pair[0])])
    return f"{_pair(tuple(geometric_means(reached)))} ({len(reached)})" if len(reached) else "(0)"


def _share(share: float) -> str:
    if math.isnan(share):
        return ""
    return "not reached" if share == math.inf else f"{share:.2f}"


def _mean_share(shares: Sequence[float]) -> str:
    reached = np.array([[share] for share in shares if math.isfinite(share)])
    return f"{_share(geometric_means(reached)[0])} ({len(reached)})" if len(reached) else "(0)"


def _worse(ratios: list[float]) -> str:
    """Return the geometric mean and the largest of the ratios that are known."""
    known = np.array([ratio for ratio in ratios if not math.isnan(ratio)])
    if not len(known):
        return ""
    return f"{geometric_means(known[:, None])[0]:.3f} ({known.max():.3g})"
