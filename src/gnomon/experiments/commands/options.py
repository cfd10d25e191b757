"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


# ---------------------------------------------------------------------- names that the shell completes
def names_of_models() -> list[str]:
    from .. import models

    return list(models.MODELS)


def names_of_data() -> list[str]:
    from .. import data

    return list(data.DATA)


def names_of_optimizers() -> list[str]:
    from ..training.config import OPTIMIZER_NAMES

    return list(OPTIMIZER_NAMES)


def names_of_schedules() -> list[str]:
    from ..training.config import SCHEDULES

    return list(SCHEDULES)


# ---------------------------------------------------------------------- options that commands share
TASK, OPTIMIZER, SCHEDULE, RUN, MACHINE = "What to train", "Optimizer", "Length and schedule", "Run", "Machine"


def option(panel: str, help: str, default: str | bool = False, **more: Any) -> Any:
    """Return an option that is None if it is not given. ``default`` describes the value that then applies."""
    return typer.Option(help=help, show_default=default, rich_help_panel=panel, **more)


Model = Annotated[
    str | None,
    option(
        TASK,
        "mlp, cnn, convmixer128-6, gpt, or a network of the paper, such as vgg16-bn.",
        "mlp",
        autocompletion=names_of_models,
    ),
]
Data = Annotated[
    str | None,
    option(
        TASK,
        "digits, mnist, fashion-mnist, cifar10, cifar100, tiny-imagenet, imagenet-100, image-folder or python-text.",
        "digits",
        autocompletion=names_of_data,
    ),
]
DataDir = Annotated[Path | None, option(TASK, "Folder with the files of the data.", "$GNOMON_DATA, else .data")]
TrainLimit = Annotated[int | None, option(TASK, "Use the first N training samples.", "all", metavar="N")]
TestLimit = Annotated[int | None, option(TASK, "Use the first N test samples.", "all", metavar="N")]

OptimizerName = Annotated[
    str | None,
    option(
        OPTIMIZER,
        "ingd, kfac, sgd, adam, adamw, lion, soap or muon.",
        "ingd",
        autocompletion=names_of_optimizers,
    ),
]
Preset = Annotated[
    Literal["robust", "paper"] | None,
    option(
        OPTIMIZER,
        "Defaults of INGD and KFAC: those of the library (robust), or the paper's update with its momentum, weight "
        "decay, damping and rates (paper).",
        "robust",
    ),
]
Rate = Annotated[float | None, option(OPTIMIZER, "Learning rate.", "by optimizer; ImageNet models: the paper's")]
WeightDecay = Annotated[
    float | None,
    option(OPTIMIZER, "Weight decay.", "ingd, kfac 0.2, paper 0.01; sgd, adam 0.001; lion 0.1; others 0.01"),
]
Momentum = Annotated[float | None, option(OPTIMIZER, "Momentum of INGD, KFAC and SGD.", "0.8, paper 0.9; sgd 0.9")]
Damping = Annotated[float | None, option(OPTIMIZER, "Damping of INGD and KFAC.", "0.2; paper 0.005 or 0.0005")]
UpdateEvery = Annotated[
    int | None,
    option(OPTIMIZER, "Steps between updates of INGD's and KFAC's factors.", "10 to 60, the paper's by model"),
]
Structure = Annotated[
    str | None, option(OPTIMIZER, "Structure of INGD's factors: dense, triangular, diagonal, ...", "auto")
]

Epochs = Annotated[int | None, option(SCHEDULE, "Passes over the training set.", "120")]
BatchSize = Annotated[int | None, option(SCHEDULE, "Samples in a batch.", "128")]
Schedule = Annotated[
    str | None,
    option(
        SCHEDULE,
        "Schedule of the learning rate. step: divide it by 10 every 40 epochs. thirds: divide it by 10 after each "
        "third of the run. cosine: lower it to zero. constant: keep it.",
        "step; cosine for text",
        autocompletion=names_of_schedules,
    ),
]
Warmup = Annotated[
    float | None,
    option(SCHEDULE, "Share of the run during which the learning rate grows from zero.", "0; 0.05 for text"),
]

ConfigFile = Annotated[Path | None, option(RUN, "TOML file with settings, named as the options. Options override it.")]
Seed = Annotated[int | None, option(RUN, "Seed of weights, order of samples and augmentation.", "0")]

Amp = Annotated[
    Literal["float32", "bf16"] | None, option(MACHINE, "Precision of the forward pass. bf16 uses autocast.", "float32")
]
Compile = Annotated[bool | None, typer.Option("--compile", help="Use torch.compile.", rich_help_panel=MACHINE)]
Device = Annotated[str | None, option(MACHINE, "cpu, cuda, cuda:1, ...", "cuda if there is one")]


# ---------------------------------------------------------------------- settings
def given_settings(values: dict[str, Any], *others: str) -> dict[str, Any]:
    """Return the settings among a command's arguments that were given, without the ``others``, as a file has them."""
    settings = {name: value for name, value in values.items() if value is not None and name not in others}
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


def with_file(given: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Return the settings of a config file and those that were given. The latter override the file."""
    from ..training.config import read_settings

    return given if file is None else {**read_settings(file), **given}
