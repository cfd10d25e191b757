"""``gnomon train``, ``compare`` and ``tune``; what takes long to import is imported when it is called."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer


# ---------------------------------------------------------------------- names that the shell completes
def _names_of_models() -> list[str]:
    from .. import models

    return list(models.MODELS)


def _names_of_data() -> list[str]:
    from .. import data

    return list(data.DATA)


def _names_of_optimizers() -> list[str]:
    from .config import OPTIMIZER_NAMES

    return list(OPTIMIZER_NAMES)


def _names_of_schedules() -> list[str]:
    from .config import SCHEDULES

    return list(SCHEDULES)


# ---------------------------------------------------------------------- options that commands share
TASK, OPTIMIZER, SCHEDULE, RUN, MACHINE = "What to train", "Optimizer", "Length and schedule", "Run", "Machine"

Model = Annotated[
    str | None, typer.Option(help="Network, by name [mlp].", autocompletion=_names_of_models, rich_help_panel=TASK)
]
Data = Annotated[
    str | None, typer.Option(help="Data set, by name [digits].", autocompletion=_names_of_data, rich_help_panel=TASK)
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of its files [$GNOMON_DATA, or .data].", rich_help_panel=TASK)
]
TrainLimit = Annotated[int | None, typer.Option(help="Take the first N training samples.", rich_help_panel=TASK)]
TestLimit = Annotated[int | None, typer.Option(help="Take the first N test samples.", rich_help_panel=TASK)]
ConfigFile = Annotated[
    Path | None, typer.Option(help="TOML file of settings, by the names of options; options win.", rich_help_panel=RUN)
]
BatchSize = Annotated[int | None, typer.Option(help="Samples of a step [128].", rich_help_panel=SCHEDULE)]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="Of the learning rate: [b]step[/b] divides by 10 every 40 epochs, [b]thirds[/b] after each third of the "
        "run, [b]cosine[/b] goes to zero, [b]constant[/b] stays [step; cosine for text].",
        autocompletion=_names_of_schedules,
        rich_help_panel=SCHEDULE,
    ),
]
Warmup = Annotated[
    float | None,
    typer.Option(
        help="Share of the run in which the rate grows from zero [0; 0.05 for text].", rich_help_panel=SCHEDULE
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of weights, order and augmentation [0].", rich_help_panel=RUN)]
Preset = Annotated[
    Literal["robust", "paper"] | None,
    typer.Option(
        help="What settings of INGD and KFAC mean that are not given: [b]robust[/b] takes the library's defaults, "
        "[b]paper[/b] the paper's update with its momentum, weight decay, damping and rates [robust].",
        rich_help_panel=OPTIMIZER,
    ),
]
Damping = Annotated[
    float | None, typer.Option(help="Of INGD and KFAC [0.2; paper: by model].", rich_help_panel=OPTIMIZER)
]
UpdateEvery = Annotated[
    int | None,
    typer.Option(
        help="Steps between updates of INGD's and KFAC's factors [by model, 10 to 60].", rich_help_panel=OPTIMIZER
    ),
]
Structure = Annotated[
    str | None,
    typer.Option(help="Of INGD's factors: dense, triangular, diagonal, ... [dense].", rich_help_panel=OPTIMIZER),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(
        help="[INGD and KFAC 0.2, paper 0.01; SGD and Adam 0.001, Lion 0.1, others 0.01]", rich_help_panel=OPTIMIZER
    ),
]
Amp = Annotated[
    Literal["float32", "bf16"] | None,
    typer.Option(help="Precision of the forward pass; bf16 by autocast [float32].", rich_help_panel=MACHINE),
]
Compile = Annotated[bool | None, typer.Option("--compile", help="Use torch.compile.", rich_help_panel=MACHINE)]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ... [auto: cuda if there is one].", rich_help_panel=MACHINE)
]


# ---------------------------------------------------------------------- commands
def train(
    model: Model = None,
    data: Data = None,
    data_dir: DataDir = None,
    train_limit: TrainLimit = None,
    test_limit: TestLimit = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Hold out this share of the training set, and measure on it [0].", rich_help_panel=TASK),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="ingd, kfac, sgd, adam, adamw, lion, soap or muon [ingd].",
            autocompletion=_names_of_optimizers,
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate [by optimizer and model].", rich_help_panel=OPTIMIZER)
    ] = None,
    preset: Preset = None,
    weight_decay: WeightDecay = None,
    momentum: Annotated[
        float | None, typer.Option(help="Of INGD and KFAC [0.8; paper 0.9] and SGD [0.9].", rich_help_panel=OPTIMIZER)
    ] = None,
    damping: Damping = None,
    update_every: UpdateEvery = None,
    structure: Structure = None,
    epochs: Annotated[int | None, typer.Option(help="[120]", rich_help_panel=SCHEDULE)] = None,
    batch_size: BatchSize = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run [runs/DATA-MODEL-OPTIMIZER-SEED].", rich_help_panel=RUN),
    ] = None,
    config: ConfigFile = None,
    seed: Seed = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in the folder, bit for bit as if it had not stopped.",
            rich_help_panel=RUN,
        ),
    ] = False,
    save_every: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time between checkpoints.", rich_help_panel=RUN)
    ] = 60.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log for TensorBoard into the folder.", rich_help_panel=RUN)
    ] = False,
    amp: Amp = None,
    compile: Compile = None,
    channels_last: Annotated[
        bool | None,
        typer.Option(help="Memory layout of images [channels last].", rich_help_panel=MACHINE),
    ] = None,
    device: Device = None,
) -> None:
    """Train a network on a data set, by the paper's protocol where nothing else is said.

    For example:

        gnomon train --model convmixer256-12 --data cifar100 --optimizer ingd

    The folder holds config.toml, versions.json, metrics.jsonl (a line for each epoch), checkpoint.pt and curves.png.

    Ctrl-C saves a checkpoint first. A run that was stopped, killed too, goes on with --resume.
    """
    given = _given(locals(), "output", "config", "resume", "save_every", "tensorboard")
    with one_line_errors():
        _train(given, config, output, resume, save_every, tensorboard)


def _train(
    given: dict[str, Any], file: Path | None, output: Path | None, resume: bool, save_every: float, tensorboard: bool
) -> None:
    from .config import completed, config_from, read_settings
    from .folder import RunFolder
    from .report import Bar, Several, TensorBoard
    from .run import train as run

    said = {**({} if file is None else read_settings(file)), **given}
    config = completed(config_from(said))
    folder = output or Path("runs", f"{config.data}-{config.model}-{config.optimizer}-{config.seed}")
    place = RunFolder(folder)
    if resume and place.exists:
        config = config_from(said, place.config())
    elif resume:
        typer.echo(f"There is no run in {folder} yet: it begins.")
    bar = Bar()
    reporter = Several(bar, TensorBoard(folder)) if tensorboard else bar
    outcome = run(config, folder, resume=resume, reporter=reporter, save_every=save_every)
    if outcome.failure is not None:
        _stop(
            f"Error: {outcome.failure}; begin again with a smaller --lr (it was {config.lr:g}) in another --output. "
            f"The last good checkpoint is in {folder}."
        )
    if outcome.signal is not None:
        typer.echo(f"Interrupted, and saved. Go on with: gnomon train --output {folder} --resume", err=True)
        raise typer.Exit(128 + outcome.signal)
    bar.console.print(f"Results: {folder}/metrics.jsonl and curves.png", soft_wrap=True, highlight=False)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[Path, typer.Option(metavar="PNG", help="File for the curves.")] = Path("compare.png"),
    last: Annotated[int, typer.Option(min=1, help="Epochs at the end of a run that its result is the mean of.")] = 10,
    clock: Annotated[
        Literal["wall", "cpu"], typer.Option(help="Which time the curves are drawn against; both without evaluation.")
    ] = "wall",
) -> None:
    """Draw runs together, against epochs and against time, and print the table of the paper.

    Results are means over the last epochs of a run. Runs that differ in the seed alone are one line: the mean over
    them, in the table with the 95% interval of the mean (Student's t), in the picture with the range.

    For images the measure is the test error in %, for text the test loss.
    """
    from rich.console import Console

    with one_line_errors():
        from .compare import draw, paper_table, read_runs, run_table

        groups = read_runs(runs)
        console = Console()
        console.print(paper_table(groups, last))
        console.print(run_table(groups))
        try:
            draw(groups, output, clock)
        except OSError as error:
            _stop(f"Error: cannot write --output {output}: {error.strerror or error}; choose another file")
        shorter = " (all of a run that has fewer)" if any(g.epochs < last for g in groups) else ""
        note = f"Means over the last {last} epochs{shorter}"
        note += ", ± half the 95% interval over seeds" if any(len(g.runs) > 1 for g in groups) else ""
        console.print(f"{note}. Curves: {output}", soft_wrap=True, highlight=False)


def tune(
    optimizer: Annotated[
        list[str],
        typer.Option(
            help="Optimizer to search settings of; may be repeated.",
            autocompletion=_names_of_optimizers,
            rich_help_panel=OPTIMIZER,
        ),
    ],
    budget: Annotated[
        int, typer.Option(min=1, help="Settings to try of each optimizer.", rich_help_panel=SCHEDULE)
    ] = 8,
    model: Model = None,
    data: Data = None,
    data_dir: DataDir = None,
    train_limit: TrainLimit = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Share of the training set that settings are judged by [0.1].", rich_help_panel=TASK),
    ] = None,
    preset: Preset = None,
    damping: Annotated[
        float | None,
        typer.Option(help="Keep the damping at this, and search the rate alone.", rich_help_panel=OPTIMIZER),
    ] = None,
    update_every: UpdateEvery = None,
    structure: Structure = None,
    epochs: Annotated[int | None, typer.Option(help="Of each trial [120].", rich_help_panel=SCHEDULE)] = None,
    batch_size: BatchSize = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    output: Annotated[Path | None, typer.Option(help="Folder [tune/DATA-MODEL].", rich_help_panel=RUN)] = None,
    config: ConfigFile = None,
    seed: Seed = None,
    amp: Amp = None,
    compile: Compile = None,
    device: Device = None,
) -> None:
    """Search learning rates (and the damping of INGD and KFAC), as many settings for each optimizer.

    Every optimizer gets the same number of settings, epochs, samples and the same seed. The first setting is its
    default; the others cover a factor of ten to both sides of it evenly (Optuna's Sobol sampler). Settings are
    judged on a part of the training set that is held out; the test set is not looked at.

    Writes best-OPTIMIZER.toml for each, a file that gnomon train --config takes. A search that was interrupted
    goes on with the same command.
    """
    given = _given(locals(), "optimizer", "budget", "output", "config")
    with one_line_errors():
        _tune(given, optimizer, budget, config, output)


def _tune(given: dict[str, Any], optimizers: list[str], budget: int, file: Path | None, output: Path | None) -> None:
    from rich.console import Console

    from .config import config_from, read_settings

    try:
        from .tune import InterruptedSearchError, best_file, search_table, trial_line
        from .tune import tune as search
    except ModuleNotFoundError as missing:
        _stop(f"Error: gnomon tune needs {missing.name}, which is not installed; pip install 'gnomon[experiments]'")

    said = {**({} if file is None else read_settings(file)), **given}
    base = config_from({**said, "optimizer": "ingd"})  # which has all settings that any has
    folder = output or Path("tune", f"{base.data}-{base.model}")
    console = Console()
    try:
        found = search(
            base,
            optimizers,
            budget,
            folder,
            lambda name, number, trial: console.print(
                f"{number:>3}/{budget}  {trial_line(trial)}", highlight=False, soft_wrap=True
            ),
        )
    except InterruptedSearchError as stopped:
        typer.echo("Interrupted. Trials that are finished are kept: run the same command again to go on.", err=True)
        raise typer.Exit(128 + stopped.signal) from None
    console.print(search_table(found))
    for one in found:
        for name in one.at_edge:
            low, high = one.ranges[name]
            console.print(f"{one.optimizer}: the best {name} is at an end of its range, {low:g} to {high:g}.")
        console.print(f"gnomon train --config {best_file(folder, one.optimizer)}", highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------- what they share
def _given(values: dict[str, Any], *others: str) -> dict[str, Any]:
    """The settings among a command's arguments that were given, as a file would say them."""
    settings = {name: value for name, value in values.items() if value is not None and name not in others}
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user can put right is said in one line, with an exit code of 1."""
    from ..data import DataError
    from .config import TrainingError

    try:
        yield
    except (TrainingError, DataError) as error:
        _stop(f"Error: {error}")
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None


def _stop(message: str) -> NoReturn:
    typer.echo(" ".join(message.split()), err=True)
    raise typer.Exit(1) from None
