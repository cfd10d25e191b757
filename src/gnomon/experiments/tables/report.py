"""The results of a table's runs as numbers and as a page. Every statement about a method is computed."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from .. import models
from ..common.document import Block, Document, Drawings, Points, Rows, Text
from ..common.machine import versions, versions_text
from ..common.words import listed
from ..training import compare
from ..training.compare import RunGroup
from ..training.config import Config, completed
from ..training.optimizers import TITLES
from ..training.tune import SPREAD
from . import published, tolerance, verdict
from .section import Section
from .study import Study

NAMES = {
    "cifar100": "CIFAR-100",
    "tiny-imagenet": "TinyImageNet-200",
    "imagenet-100": "ImageNet-100",
    "gpt": "A small GPT on Python's source",
}


class Report:
    """The results of a study. Of one that goes on it has what is finished."""

    def __init__(self, name: str, scale_name: str, study: Study) -> None:
        self.name, self.scale_name, self.study, self.folder = name, scale_name, study, study.folder
        self.sections = [self._section(task) for task in study.tasks]
        cells = study.results(study.cells())
        self.maps = tolerance.maps(cells) if cells else []

    def _section(self, task: Config) -> Section:
        names = self.study.scale.optimizers
        methods = [m for n in names if (m := self.study.method(task, n)) is not None]
        searches = [s for n in names if (s := self.study.search(task, n)) is not None]
        return Section(task, methods, searches, self.study.in_rivals_time(task), self.study)

    @property
    def title(self) -> str:
        return f"{NAMES[self.name]}: optimizers compared, {self.scale_name} scale"

    # ------------------------------------------------------------------ the page
    def document(self, runs: tuple[int, int] | None = None) -> Document:
        """Return the page of results. ``runs`` are the finished and all runs as long as runs go on."""
        found = Document(self.title, self._what_was_run(), footer=versions_text(), runs=runs)
        if runs is None:
            found.sections.append(("The claim and the runs", [verdict.claim(self.name, self.sections)]))
        for section in self.sections:
            found.sections.append((f"Results: {_model(section.task.model)}", self._results(section, runs is None)))
        if self.maps:
            found.sections.append(("Larger steps and a smaller damping than KFAC?", self._larger_steps()))
        found.sections.append(("Settings", self._settings()))
        found.sections.append(("The paper's table beside ours", self._beside_the_paper()))
        found.sections.append(("What this does not say", [Points(self._limits())]))
        return found

    def _what_was_run(self) -> str:
        scale, task = self.study.scale, completed(self.study.tasks[0])
        titles = listed([_model(one.model) for one in self.study.tasks])
        sizes = ", ".join(
            f"{limit:,} samples to {what}"
            for limit, what in ((task.train_limit, "train on"), (task.test_limit, "test on"))
            if limit is not None
        )
        searched = (
            f"{scale.settings} learning rates of each optimizer were tried, at even ratios from a {SPREAD:g}th to "
            f"{SPREAD:g} times its usual value, and no other setting, with the same seed, epochs and samples. They "
            f"were judged by the last epoch on {scale.validation:.0%} of the training set, held out. The best of each "
            f"was trained on the whole training set with {len(scale.seeds)} other seeds, and measured on the test set."
            if scale.settings > 1
            else f"Learning rates are those that the authors published, or usual values; {len(scale.seeds)} seeds."
        )
        absent = f" Left out: {listed(self.study.absent)}." if self.study.absent else ""
        return (
            f"`gnomon reproduce {self.name} --scale {self.scale_name}`: {titles} on {task.data} "
            f"({sizes or 'all samples'}), {task.epochs} epochs, batches of {task.batch_size}, schedule "
            f"`{task.schedule}` for all. {searched}{absent}"
        )

    def _results(self, section: Section, complete: bool) -> list[Block]:
        if not section.methods:
            return [Text("No optimizer has finished the runs with its best learning rate yet.")]
        last = self.study.scale.last
        of = "after the last epoch" if last == 1 else f"as the mean over the last {last} epochs"
        clock = "CPU time" if self.study.clock == "cpu" else "wall-clock time"
        at_the_end = (
            f"{section.measure.capitalize()} {of}, mean over seeds ± half its 95% interval (Student's t). \"INGD minus "
            'it" is the mean of differences seed by seed, below zero where INGD is ahead. Times are of training steps '
            "with their batches, without measuring."
        )
        in_time = (
            f"\"In X's time\" is the same measure at the last epoch that a method had finished when the {clock} of X's "
            'whole run with the same seed was used up; "-" where none was finished.'
        )
        blocks: list[Block] = [section.table(), Text(at_the_end), section.table_in_time(), Text(in_time)]
        if groups := [method.group for method in section.sound]:
            blocks.insert(0, self._curves(section, groups))
        return [*blocks, Points(section.findings())] if complete else blocks

    def _curves(self, section: Section, groups: list[RunGroup]) -> Drawings:
        ((by_epoch, by_time),) = compare.charts(groups, self.study.clock)
        stem = f"{self.name}-{section.task.model}"
        caption = f"{by_epoch.title}. Lines are means over seeds, bands reach from the least to the greatest."
        by_epoch, by_time = replace(by_epoch, title="By epoch"), replace(by_time, title="By time")
        return Drawings({f"{stem}-epochs": by_epoch, f"{stem}-time": by_time}, caption, by_epoch.lines)

    def _larger_steps(self) -> list[Block]:
        grid = self.study.scale.grid
        assert grid is not None
        task = grid.task
        claims: list[Block] = []
        for preset in grid.presets:
            ours, kfac = (
                next(m for m in self.maps if (m.optimizer, m.preset) == (o, preset)) for o in ("ingd", "kfac")
            )
            claims.append(tolerance.comparison(ours, kfac, grid))
        drawings = {f"{self.name}-{key}": one for key, one in tolerance.heat_maps(self.maps, grid).items()}
        return [
            *claims,
            Drawings(drawings, "Test error in % by learning rate and damping. Darker cells have larger errors."),
            Text(
                f"Each cell is one short run ({_model(task.model)}, {task.train_limit or 0:,} samples, epochs: "
                f"{task.epochs}, batches of {task.batch_size}, seed {task.seed}). A method bears a setting where it "
                f"gets right at least {tolerance.SHARE:.0%} of as many test samples as at its best with that preset. "
                "In the paper's update the preconditioner moves slowly during the first 500 steps, so a run of this "
                "length tests it for a part of its way only."
            ),
        ]

    def _settings(self) -> list[Block]:
        blocks: list[Block] = []
        for section in self.sections:
            model = _model(section.task.model)
            if section.searches:
                blocks += [Text(f"{model}, learning rates that were tried:"), section.tried()]
            blocks += [Text(f"{model}, settings that were not searched:"), section.settings()]
        return blocks

    def _beside_the_paper(self) -> list[Block]:
        theirs = published.ERRORS.get(self.name, {})
        if not theirs:
            return [Text("The paper has no language model.")]
        names = list(dict.fromkeys([*self.study.scale.optimizers, *published.METHODS]))
        rows = [[f"{_model(section.task.model)}, here", *_means(section, names)] for section in self.sections]
        rows += [
            [f"{_model(model)}, paper", *(f"{errors[name]:.2f}" if name in errors else "-" for name in names)]
            for model, errors in theirs.items()
        ]
        note = "Test error in %. The paper's are its published numbers: 120 epochs, means over the last 10 of them."
        if self.scale_name != "full":
            note += " Networks, samples and epochs differ, so only the order within a row compares, and that roughly."
        return [Rows(["network", *(TITLES[name] for name in names)], rows), Text(note)]

    def _limits(self) -> list[str]:
        scale = self.study.scale
        points = [
            f"{len(scale.seeds)} seeds: an interval by Student's t is wide, and differences within it say nothing.",
            f"{scale.settings} learning rate{'s' * (scale.settings > 1)} of each optimizer and no other setting: "
            "weight decays, momenta and dampings are the paper's or the library's defaults, and each optimizer might "
            "gain from tuning them.",
        ]
        if self.scale_name != "full":
            points.append(
                "INGD's and KFAC's defaults here were chosen on tasks of this kind (`benchmarks/training.py`: a CNN on "
                "CIFAR-100, a small GPT, an autoencoder), those of the others by their authors on others."
            )
            points.append(
                "A small network, a part of the data and a short schedule: methods that are ahead in short runs need "
                "not be ahead in those of the paper, and the errors are far from what the data allow."
            )
        if self.scale_name == "tiny":
            points.append("The networks have hardly learned anything: this scale shows that everything runs.")
        points.append("Times are of this machine with one thread a process; the costs of methods differ on others.")
        return points

    # ------------------------------------------------------------------ data
    def as_data(self) -> dict[str, Any]:
        """Return all results for the JSON file."""
        scale = self.study.scale
        return {
            "name": self.name,
            "scale": self.scale_name,
            "versions": versions(),
            "clock": self.study.clock,
            "optimizers": list(scale.optimizers),
            "settings of each": scale.settings,
            "seeds": list(scale.seeds),
            "last epochs": scale.last,
            "left out": self.study.absent,
            "tasks": [section.as_data() for section in self.sections],
            "grid": [
                {"optimizer": one.optimizer, "preset": one.preset, "lr": lr, "damping": damping, "test error": error}
                for one in self.maps
                for (lr, damping), error in one.errors.items()
            ],
            "published": published.ERRORS.get(self.name),
        }


def _means(section: Section, names: list[str]) -> list[str]:
    """Return the mean result of each optimizer, or a dash."""
    scores = [section.by_name[name].scores() if name in section.by_name else None for name in names]
    return ["-" if one is None else section.number(mean(one)) for one in scores]


def _model(name: str) -> str:
    return models.MODELS[name].title
