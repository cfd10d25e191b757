"""The results of a table's runs as numbers, pictures and pages. Every statement about a method is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import models
from ..common.document import Block, Document, Picture, Points, Rows, Text
from ..common.machine import versions, versions_text
from ..training import compare
from ..training.config import Config, completed
from ..training.tune import SPREAD
from . import published, tolerance
from .section import Section, listed, title_of
from .study import Study

NAMES = {
    "cifar100": "CIFAR-100",
    "tiny-imagenet": "TinyImageNet-200",
    "imagenet-100": "ImageNet-100",
    "gpt": "a small GPT on Python's source",
}


class Report:
    """The results of a finished study."""

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

    # ------------------------------------------------------------------ pictures
    @property
    def curves(self) -> Path:
        """The file of the picture of all curves."""
        return self.folder / f"{self.name}-curves.png"

    @property
    def heat_maps(self) -> Path:
        """The file of the picture of the grid of learning rates and dampings."""
        return self.folder / f"{self.name}-damping.png"

    def draw(self) -> None:
        """Draw the pictures."""
        if groups := [method.group for section in self.sections for method in section.sound]:
            compare.draw(groups, self.curves, self.study.clock)
        if self.study.scale.grid is not None:
            tolerance.draw(self.maps, self.study.scale.grid, self.heat_maps)

    # ------------------------------------------------------------------ pages
    def document(self) -> Document:
        """Return the page of results."""
        found = Document(self.title, footer=versions_text())
        found.sections.append(("What was run", self._what_was_run()))
        for section in self.sections:
            found.sections.append((f"Results: {_model(section.task.model)}", self._results(section)))
        if self.curves.exists():
            picture = Picture(self.curves, f"{self.sections[0].measure} against epochs and against time")
            text = Text("Lines are means over seeds, bands reach from the least to the greatest.")
            found.sections.append(("Curves", [picture, text]))
        if self.study.scale.grid is not None:
            found.sections.append(("Larger steps and a smaller damping than KFAC?", self._claim()))
        found.sections.append(("Settings", self._settings()))
        found.sections.append(("The paper's table beside ours", self._beside_the_paper()))
        found.sections.append(("What this does not say", [Points(self._limits())]))
        return found

    def _what_was_run(self) -> list[Block]:
        scale, task = self.study.scale, completed(self.study.tasks[0])
        titles = listed([_model(one.model) for one in self.study.tasks])
        sizes = ", ".join(
            f"{limit:,} samples to {what}"
            for limit, what in ((task.train_limit, "train on"), (task.test_limit, "test on"))
            if limit is not None
        )
        searched = (
            f"Of every optimizer {scale.settings} learning rates were tried, at even ratios from a {SPREAD:g}th to "
            f"{SPREAD:g} times its usual value, and nothing else, with the same seed, epochs and samples; they were "
            f"judged by the last epoch on {scale.validation:.0%} of the training set, held out. The best of each was "
            f"then trained on the whole training set with {len(scale.seeds)} other seeds, and measured on the test set."
            if scale.settings > 1
            else f"Learning rates are those that the authors published, or usual values; {len(scale.seeds)} seeds."
        )
        blocks: list[Block] = [
            Text(f"`gnomon reproduce {self.name} --scale {self.scale_name}`"),
            Text(
                f"{titles} on {task.data} ({sizes or 'all samples'}), {task.epochs} epochs, batches of "
                f"{task.batch_size}, schedule `{task.schedule}` for all. {searched}"
            ),
        ]
        if self.study.absent:
            blocks.append(Text(f"Left out: {listed(self.study.absent)}."))
        return blocks

    def _results(self, section: Section) -> list[Block]:
        last = self.study.scale.last
        of = "after the last epoch" if last == 1 else f"as the mean over the last {last} epochs"
        clock = "CPU time" if self.study.clock == "cpu" else "wall-clock time"
        legend = (
            f"{section.measure.capitalize()} {of}, mean over seeds ± half its 95% interval (Student's t); \"INGD minus "
            'it" is the mean of differences seed by seed, below zero where INGD is ahead. "In X\'s time" is the same '
            f"measure at the last epoch that a method had finished when the {clock} of X's whole run with the same "
            'seed was used up; "-" where none was finished. Times are of training steps with their batches, without '
            "measuring."
        )
        return [section.table(), Text(legend), Points(section.findings())]

    def _claim(self) -> list[Block]:
        grid = self.study.scale.grid
        assert grid is not None
        task = grid.task
        lines = []
        for preset in grid.presets:
            ours, kfac = (
                next(m for m in self.maps if (m.optimizer, m.preset) == (o, preset)) for o in ("ingd", "kfac")
            )
            lines += [f"{preset} preset. {line}" for line in tolerance.comparison(ours, kfac, grid)]
        return [
            Text(
                "The paper says that its method can take a larger step and a smaller damping than KFAC. Each cell is "
                f"one short run ({_model(task.model)}, {task.train_limit or 0:,} samples, {task.epochs} epochs, "
                f"batches of {task.batch_size}, seed {task.seed}), with the paper's update and with the library's "
                "defaults. A method bears a setting where it gets right at least "
                f"{tolerance.SHARE:.0%} of as many test "
                "samples as with its own best setting and that preset. In the paper's update the preconditioner moves "
                "slowly during the first 500 steps, so a run of this length tests it for a part of its way only."
            ),
            Picture(self.heat_maps, "Test error of INGD and KFAC by learning rate and damping"),
            Points(lines),
        ]

    def _settings(self) -> list[Block]:
        blocks: list[Block] = []
        for section in self.sections:
            blocks.append(Text(f"{_model(section.task.model)}:"))
            if section.searches:
                name = "loss" if section.in_loss else "error in %"
                blocks += [Text(f"Learning rates that were tried, each with its validation {name}:"), section.tried()]
            blocks += [Text("Settings that were not searched:"), section.settings()]
        return blocks

    def _beside_the_paper(self) -> list[Block]:
        theirs = published.ERRORS.get(self.name, {})
        if not theirs:
            return [Text("The paper has no language model.")]
        header = ["method", *(f"{_model(s.task.model)}, here" for s in self.sections)]
        header += [f"{_model(model)}, paper" for model in theirs]
        names = dict.fromkeys([*self.study.scale.optimizers, *published.METHODS])
        rows = []
        for name in names:
            here = [s.mean_text(s.by_name[name].scores() if name in s.by_name else None) for s in self.sections]
            paper = [f"{of[name]:.2f}" if name in of else "-" for of in theirs.values()]
            rows.append([title_of(name), *here, *paper])
        note = "Test error in %. The paper's are its published numbers: 120 epochs, means over the last 10 of them."
        if self.scale_name == "small":
            note += (
                " Networks, samples and epochs differ, so only the order within a column compares, and that roughly."
            )
        return [Rows(header, rows), Text(note)]

    def _limits(self) -> list[str]:
        scale = self.study.scale
        points = [
            f"{len(scale.seeds)} seeds: an interval by Student's t is wide, and differences within it say nothing.",
            f"{scale.settings} learning rate{'s' * (scale.settings > 1)} of each optimizer and no other setting: "
            "weight decays, momenta and dampings are the paper's or the library's defaults, and each optimizer might "
            "gain from tuning them.",
        ]
        if self.scale_name == "small":
            points.append(
                "INGD's and KFAC's defaults here were chosen on tasks of this kind (`benchmarks/training.py`: a CNN on "
                "CIFAR-100, a small GPT, an autoencoder), those of the others by their authors on others."
            )
            points.append(
                "A small network, a part of the data and a short schedule: methods that are ahead in short runs need "
                "not be ahead in those of the paper, and the errors are far from what the data allow."
            )
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


def _model(name: str) -> str:
    return models.MODELS[name].title
