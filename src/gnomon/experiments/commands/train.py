"""``gnomon train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .endings import one_line_errors
from .options import MACHINE, RUN, TASK, given_settings, option, with_file

if TYPE_CHECKING:
    from ..training.config import Config
    from ..training.folder import RunFolder
    from ..training.ranks import Ranks

Validation = Annotated[
    float | None,
    option(TASK, "Hold out this share of the training set, and measure on it instead of the test set.", "0"),
]
Output = Annotated[Path | None, option(RUN, "Folder of the run.", "runs/DATA-MODEL-OPTIMIZER-SEED")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the run in the folder, bit for bit.", rich_help_panel=RUN)
]
SaveEvery = Annotated[float, option(RUN, "Seconds between checkpoints.", True, min=0, metavar="SECONDS")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also log for TensorBoard, in the folder.", rich_help_panel=RUN)
]
ChannelsLast = Annotated[
    bool | None,
    typer.Option(" /--no-channels-last", help="Use torch's usual memory layout for images.", rich_help_panel=MACHINE),
]
Timeout = Annotated[
    float,
    option(
        MACHINE,
        "How long a rank waits for the others before it ends with an error.",
        True,
        min=1,
        metavar="SECONDS",
    ),
]


def train(
    model: options.Model = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    train_limit: options.TrainLimit = None,
    test_limit: options.TestLimit = None,
    validation: Validation = None,
    optimizer: options.OptimizerName = None,
    lr: options.Rate = None,
    preset: options.Preset = None,
    weight_decay: options.WeightDecay = None,
    momentum: options.Momentum = None,
    damping: options.Damping = None,
    update_every: options.UpdateEvery = None,
    structure: options.Structure = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    schedule: options.Schedule = None,
    warmup: options.Warmup = None,
    output: Output = None,
    config: options.ConfigFile = None,
    seed: options.Seed = None,
    resume: Resume = False,
    save_every: SaveEvery = 60.0,
    tensorboard: TensorBoard = False,
    amp: options.Amp = None,
    compile: options.Compile = None,
    channels_last: ChannelsLast = None,
    device: options.Device = None,
    timeout: Timeout = 600.0,
) -> None:
    """Train a network on a data set. Defaults are those of the paper's protocol.

    For example: gnomon train --model convmixer256-12 --data cifar100 --optimizer ingd

    It writes config.toml, versions.json, metrics.jsonl (a line for each epoch), checkpoint.pt and curves.png.

    Ctrl-C saves a checkpoint. You can resume a run with --resume, even after a kill.

    On several GPUs or machines: torchrun --nproc-per-node 4 -m gnomon train ..., with the same options.
    """
    given = given_settings(locals(), "output", "config", "resume", "save_every", "tensorboard", "timeout")
    with one_line_errors():
        from ..training.ranks import together

        with together(timeout) as ranks:
            number = _train(ranks, with_file(given, config), output, resume, save_every, tensorboard)
    if number is not None:
        raise typer.Exit(128 + number)


def _train(
    ranks: Ranks, settings: dict[str, Any], output: Path | None, resume: bool, save_every: float, tensorboard: bool
) -> int | None:
    """Train and report. Return the signal that interrupted the run, if there was one."""
    from ..training import report
    from ..training.config import TrainingError, completed, config_from
    from ..training.folder import RunFolder
    from ..training.run import train as run

    config = completed(config_from(settings))
    folder = output or Path("runs", f"{config.data}-{config.model}-{config.optimizer}-{config.seed}")
    bar = report.Bar()
    reporter: report.Silent = report.Several(bar, report.TensorBoard(folder)) if tensorboard else bar
    if ranks.leads and resume:
        config = _resumed(RunFolder(folder), settings, config)
    begun = config
    config = ranks.from_first(lambda: begun)
    reporter = reporter if ranks.leads else report.Silent()
    outcome = run(config, folder, resume=resume, reporter=reporter, save_every=save_every, ranks=ranks)
    if outcome.failure is not None:
        last = f" The last good checkpoint is in {folder}." if RunFolder(folder).has_checkpoint else ""
        raise TrainingError(
            f"{outcome.failure}; start again with a smaller --lr (it was {config.lr:g}) in another --output.{last}"
        )
    if ranks.leads and outcome.signal is not None:
        typer.echo(
            f"Interrupted. A checkpoint is saved. Resume with: gnomon train --output {folder} --resume", err=True
        )
    elif ranks.leads:
        bar.console.print(f"Results: {folder}/metrics.jsonl and curves.png", soft_wrap=True, highlight=False)
    return outcome.signal


def _resumed(place: RunFolder, settings: dict[str, Any], config: Config) -> Config:
    """Return the config of the run in a folder, or the given config if there is no run yet."""
    from ..training.config import config_from

    if not place.exists:
        place.check_new()
        typer.echo(f"There is no run in {place.path} yet. A new run starts.")
        return config
    place.check_same(settings)
    return config_from(settings, place.config())
