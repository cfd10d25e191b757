"""``gnomon tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .endings import one_line_errors, stop
from .options import OPTIMIZER, RUN, SCHEDULE, TASK, given_settings, names_of_optimizers, option, with_file

if TYPE_CHECKING:
    from rich.console import Console

    from ..training.tune import Search

Validation = Annotated[
    float | None, option(TASK, "Share of the training set that is held out to judge settings.", "0.1")
]
Optimizers = Annotated[
    list[str],
    option(OPTIMIZER, "Optimizer whose settings are searched. You may repeat it.", autocompletion=names_of_optimizers),
]
FixedDamping = Annotated[float | None, option(OPTIMIZER, "Keep the damping at this value, and search only the rate.")]
Budget = Annotated[int, option(SCHEDULE, "Number of settings for each optimizer.", True, min=1)]
TrialEpochs = Annotated[int | None, option(SCHEDULE, "Passes over the training set in each trial.", "120")]
Output = Annotated[Path | None, option(RUN, "Folder of the search.", "tune/DATA-MODEL")]


def tune(
    *,
    model: options.Model = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    train_limit: options.TrainLimit = None,
    validation: Validation = None,
    optimizer: Optimizers,
    preset: options.Preset = None,
    damping: FixedDamping = None,
    update_every: options.UpdateEvery = None,
    structure: options.Structure = None,
    budget: Budget = 8,
    epochs: TrialEpochs = None,
    batch_size: options.BatchSize = None,
    schedule: options.Schedule = None,
    warmup: options.Warmup = None,
    output: Output = None,
    config: options.ConfigFile = None,
    seed: options.Seed = None,
    amp: options.Amp = None,
    compile: options.Compile = None,
    device: options.Device = None,
) -> None:
    """Search learning rates, and the damping of INGD and KFAC, with the same budget for every optimizer.

    Every optimizer has the same number of settings, epochs and samples, and the same seed.

    The first setting is the default. The others cover the range from a tenth to ten times of it evenly (Optuna, Sobol).

    A held-out part of the training set judges the settings. The test set is not used.

    The command writes best-OPTIMIZER.toml for gnomon train --config. The same command continues after an interruption.
    """
    given = given_settings(locals(), "optimizer", "budget", "output", "config")
    with one_line_errors():
        from ..training.ranks import check_alone

        check_alone("gnomon tune")
        _tune(with_file(given, config), optimizer, budget, output)


def _tune(settings: dict[str, Any], optimizers: list[str], budget: int, output: Path | None) -> None:
    from rich.console import Console

    from ..training.config import config_from

    try:
        from ..training.tune import InterruptedSearchError, Trial, trial_line
        from ..training.tune import tune as search
    except ModuleNotFoundError as missing:
        stop(f"Error: gnomon tune needs {missing.name}, which is not installed; pip install 'gnomon[experiments]'")

    base = config_from({**settings, "optimizer": "ingd"})  # INGD has every setting that an optimizer can have
    folder = output or Path("tune", f"{base.data}-{base.model}")
    console = Console()

    def show(name: str, number: int, trial: Trial) -> None:
        console.print(f"{number:>3}/{budget}  {trial_line(trial)}", highlight=False, soft_wrap=True)

    try:
        found = search(base, optimizers, budget, folder, show)
    except InterruptedSearchError as stopped:
        typer.echo("Interrupted. Finished trials are kept. Run the same command again to continue.", err=True)
        raise typer.Exit(128 + stopped.signal) from None
    _show_best(found, folder, console)


def _show_best(found: list[Search], folder: Path, console: Console) -> None:
    from ..training.tune import best_file, search_table

    console.print(search_table(found))
    for one in found:
        for name in one.at_edge:
            low, high = one.ranges[name]
            console.print(f"{one.optimizer}: the best {name} is at an end of its range, {low:g} to {high:g}.")
        console.print(f"gnomon train --config {best_file(folder, one.optimizer)}", highlight=False, soft_wrap=True)
