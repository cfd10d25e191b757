"""``gnomon train``, ``compare`` and ``tune``; what takes long to import is imported when it is called."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from .ranks import Ranks


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


def _option(panel: str, help: str, default: str | bool = False, **more: Any) -> Any:
    """An option that is None where it is not given; the default that it then has depends on others, and is told."""
    return typer.Option(help=help, show_default=default, rich_help_panel=panel, **more)


Model = Annotated[
    str | None,
    _option(
        TASK,
        "mlp, cnn, convmixer128-6, gpt, or one of the paper, such as vgg16-bn.",
        "mlp",
        autocompletion=_names_of_models,
    ),
]
Data = Annotated[
    str | None,
    _option(
        TASK,
        "digits, mnist, fashion-mnist, cifar10, cifar100, tiny-imagenet, imagenet-100, image-folder or python-text.",
        "digits",
        autocompletion=_names_of_data,
    ),
]
DataDir = Annotated[Path | None, _option(TASK, "Folder of the data's files.", "$GNOMON_DATA, else .data")]
TrainLimit = Annotated[int | None, _option(TASK, "Take the first N training samples.", "all", metavar="N")]
TestLimit = Annotated[int | None, _option(TASK, "Take the first N test samples.", "all", metavar="N")]

OptimizerName = Annotated[
    str | None,
    _option(
        OPTIMIZER,
        "ingd, kfac, sgd, adam, adamw, lion, soap or muon.",
        "ingd",
        autocompletion=_names_of_optimizers,
    ),
]
Preset = Annotated[
    Literal["robust", "paper"] | None,
    _option(
        OPTIMIZER,
        "Where the settings of INGD and KFAC come from that are not given: the library's defaults, or the paper's "
        "update with its momentum, weight decay, damping and rates.",
        "robust",
    ),
]
Rate = Annotated[float | None, _option(OPTIMIZER, "Learning rate.", "by optimizer; ImageNet models: the paper's")]
WeightDecay = Annotated[
    float | None,
    _option(OPTIMIZER, "Weight decay.", "ingd, kfac 0.2, paper 0.01; sgd, adam 0.001; lion 0.1; others 0.01"),
]
Momentum = Annotated[float | None, _option(OPTIMIZER, "Of INGD, KFAC and SGD.", "0.8, paper 0.9; sgd 0.9")]
Damping = Annotated[float | None, _option(OPTIMIZER, "Of INGD and KFAC.", "0.2; paper 0.005 or 0.0005")]
UpdateEvery = Annotated[
    int | None,
    _option(OPTIMIZER, "Steps between updates of INGD's and KFAC's factors.", "10 to 60, the paper's by model"),
]
Structure = Annotated[str | None, _option(OPTIMIZER, "Of INGD's factors: triangular, diagonal, ...", "dense")]

Epochs = Annotated[int | None, _option(SCHEDULE, "Passes over the training set.", "120")]
BatchSize = Annotated[int | None, _option(SCHEDULE, "Samples of a step.", "128")]
Schedule = Annotated[
    str | None,
    _option(
        SCHEDULE,
        "Of the learning rate: step divides it by 10 every 40 epochs, thirds after each third of the run, cosine goes "
        "to zero, constant stays.",
        "step; cosine for text",
        autocompletion=_names_of_schedules,
    ),
]
Warmup = Annotated[
    float | None,
    _option(SCHEDULE, "Share of the run in which the rate grows from zero.", "0; 0.05 for text"),
]

ConfigFile = Annotated[Path | None, _option(RUN, "TOML file with settings named as the options, which win.")]
Seed = Annotated[int | None, _option(RUN, "Of weights, order and augmentation.", "0")]

Amp = Annotated[
    Literal["float32", "bf16"] | None, _option(MACHINE, "Precision of the forward pass; bf16 by autocast.", "float32")
]
Compile = Annotated[bool | None, typer.Option("--compile", help="Use torch.compile.", rich_help_panel=MACHINE)]
Device = Annotated[str | None, _option(MACHINE, "cpu, cuda, cuda:1, ...", "cuda if there is one")]


# ---------------------------------------------------------------------- commands
def train(
    model: Model = None,
    data: Data = None,
    data_dir: DataDir = None,
    train_limit: TrainLimit = None,
    test_limit: TestLimit = None,
    validation: Annotated[
        float | None, _option(TASK, "Hold out this share of the training set, and measure on it.", "0")
    ] = None,
    optimizer: OptimizerName = None,
    lr: Rate = None,
    preset: Preset = None,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    damping: Damping = None,
    update_every: UpdateEvery = None,
    structure: Structure = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    output: Annotated[Path | None, _option(RUN, "Folder of the run.", "runs/DATA-MODEL-OPTIMIZER-SEED")] = None,
    config: ConfigFile = None,
    seed: Seed = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, bit for bit.", rich_help_panel=RUN)
    ] = False,
    save_every: Annotated[float, _option(RUN, "Seconds between checkpoints.", True, min=0, metavar="SECONDS")] = 60.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log for TensorBoard into the folder.", rich_help_panel=RUN)
    ] = False,
    amp: Amp = None,
    compile: Compile = None,
    channels_last: Annotated[
        bool | None,
        typer.Option(" /--no-channels-last", help="Keep torch's usual memory layout.", rich_help_panel=MACHINE),
    ] = None,
    device: Device = None,
    timeout: Annotated[
        float,
        _option(
            MACHINE,
            "How long one of several processes waits for another before it gives up.",
            True,
            min=1,
            metavar="SECONDS",
        ),
    ] = 600.0,
) -> None:
    """Train a network on a data set, by the paper's protocol where nothing else is said.

    For example: gnomon train --model convmixer256-12 --data cifar100 --optimizer ingd

    The folder gets config.toml, versions.json, metrics.jsonl with a line for each epoch, checkpoint.pt and curves.png.

    Ctrl-C saves a checkpoint first. A run that was stopped, even killed, goes on with --resume.

    On several GPUs or machines: torchrun --nproc-per-node 4 -m gnomon train ..., with the same options.
    """
    given = _given(locals(), "output", "config", "resume", "save_every", "tensorboard", "timeout")
    with one_line_errors():
        from .ranks import together

        with together(timeout) as ranks:
            number = _train(ranks, given, config, output, resume, save_every, tensorboard)
    if number is not None:
        raise typer.Exit(128 + number)


def _train(
    ranks: Ranks,
    given: dict[str, Any],
    file: Path | None,
    output: Path | None,
    resume: bool,
    save_every: float,
    tensorboard: bool,
) -> int | None:
    """Train and report; returns the signal that interrupted it, if one did."""
    from .config import TrainingError, completed, config_from, read_settings
    from .folder import RunFolder
    from .report import Bar, Several, Silent, TensorBoard
    from .run import train as run

    said = {**({} if file is None else read_settings(file)), **given}
    config = completed(config_from(said))
    folder = output or Path("runs", f"{config.data}-{config.model}-{config.optimizer}-{config.seed}")
    place, bar = RunFolder(folder), Bar()
    reporter: Silent = Several(bar, TensorBoard(folder)) if tensorboard else bar
    if ranks.leads and resume and place.exists:
        place.check_same(said)
        config = config_from(said, place.config())
    elif ranks.leads and resume:
        typer.echo(f"There is no run in {folder} yet: it begins.")
    begun = config
    config = ranks.from_first(lambda: begun)
    reporter = reporter if ranks.leads else Silent()
    outcome = run(config, folder, resume=resume, reporter=reporter, save_every=save_every, ranks=ranks)
    if outcome.failure is not None:
        raise TrainingError(
            f"{outcome.failure}; begin again with a smaller --lr (it was {config.lr:g}) in another --output. "
            f"The last good checkpoint is in {folder}."
        )
    if ranks.leads and outcome.signal is not None:
        typer.echo(f"Interrupted, and saved. Go on with: gnomon train --output {folder} --resume", err=True)
    elif ranks.leads:
        bar.console.print(f"Results: {folder}/metrics.jsonl and curves.png", soft_wrap=True, highlight=False)
    return outcome.signal


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    output: Annotated[Path, typer.Option(metavar="PNG", help="File for the curves.")] = Path("compare.png"),
    last: Annotated[int, typer.Option(min=1, help="Epochs at the end of a run that its result is the mean of.")] = 10,
    clock: Annotated[
        Literal["wall", "cpu"], typer.Option(help="Which time the curves are drawn against; both without evaluation.")
    ] = "wall",
) -> None:
    """Draw runs together, against epochs and against time, and print the table of the paper.

    Results are means over the last epochs of a run. Runs that differ in the seed alone are one line of the table.

    It has their mean and its 95% interval (Student's t); the picture has their mean and their range.

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
    *,
    model: Model = None,
    data: Data = None,
    data_dir: DataDir = None,
    train_limit: TrainLimit = None,
    validation: Annotated[
        float | None, _option(TASK, "Share of the training set that settings are judged by.", "0.1")
    ] = None,
    optimizer: Annotated[
        list[str],
        _option(OPTIMIZER, "Whose settings are searched; may be repeated.", autocompletion=_names_of_optimizers),
    ],
    preset: Preset = None,
    damping: Annotated[float | None, _option(OPTIMIZER, "Keep the damping at this, and search the rate alone.")] = None,
    update_every: UpdateEvery = None,
    structure: Structure = None,
    budget: Annotated[int, _option(SCHEDULE, "Settings to try of each optimizer.", True, min=1)] = 8,
    epochs: Annotated[int | None, _option(SCHEDULE, "Of each trial.", "120")] = None,
    batch_size: BatchSize = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    output: Annotated[Path | None, _option(RUN, "Folder of the search.", "tune/DATA-MODEL")] = None,
    config: ConfigFile = None,
    seed: Seed = None,
    amp: Amp = None,
    compile: Compile = None,
    device: Device = None,
) -> None:
    """Search learning rates, and the damping of INGD and KFAC, with one budget for every optimizer.

    Each optimizer gets as many settings, epochs and samples as any other, and the same seed.

    The first setting is its default; the others cover a factor of ten to both sides of it evenly (Optuna, Sobol).

    Settings are judged on a part of the training set that is held out; the test set is not looked at.

    Writes best-OPTIMIZER.toml, which gnomon train --config takes. An interrupted search goes on with the same command.
    """
    given = _given(locals(), "optimizer", "budget", "output", "config")
    with one_line_errors():
        _tune(given, optimizer, budget, config, output)


def _tune(given: dict[str, Any], optimizers: list[str], budget: int, file: Path | None, output: Path | None) -> None:
    from rich.console import Console

    from .config import config_from, read_settings
    from .ranks import check_alone

    check_alone("gnomon tune")
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


def reproduce_table(name: str, output: Path, scale: str, data_dir: Path | None, jobs: int | None) -> None:
    """What ``gnomon reproduce`` does for a table."""
    with one_line_errors():
        from .ranks import check_alone

        check_alone("gnomon reproduce")
        try:
            from ..tables.reproduce import reproduce_table as run
        except ModuleNotFoundError as missing:
            _stop(f"Error: gnomon reproduce needs {missing.name}; pip install 'gnomon[experiments]'")
        try:
            run(name, output, scale, data_dir=data_dir, jobs=jobs)
        except KeyboardInterrupt as interrupt:
            typer.echo("Interrupted. What is finished is kept: run the same command again to go on.", err=True)
            raise typer.Exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)) from None
        except OSError as error:
            _stop(f"Error: cannot write to --output {output}: {error.strerror or error}; choose another folder")


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
