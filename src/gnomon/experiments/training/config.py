"""The settings of a training run, and the file that stores them. Defaults are those of the paper's protocol."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ...optim import INGD, KFAC
from ...optim.kronecker.config import preset_arguments
from .. import models

PRESETS = ("robust", "paper")
SCHEDULES = ("step", "thirds", "cosine", "constant")
PRECISIONS = ("float32", "bf16")


class TrainingError(ValueError):
    """An error that the user can correct. The message is one line and says how."""


@dataclass(frozen=True)
class Config:
    """The settings of a run. A setting that is None gets a default in :func:`completed`, or the optimizer lacks it."""

    model: str = "mlp"
    data: str = "digits"
    data_dir: str | None = None
    train_limit: int | None = None
    """The number of training samples. The first samples are used."""
    test_limit: int | None = None
    validation: float = 0.0
    """The share of the training set that is held out and replaces the test set."""
    epochs: int = 120
    batch_size: int = 128
    seed: int = 0
    optimizer: str = "ingd"
    preset: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    damping: float | None = None
    update_every: int | None = None
    structure: str | None = None
    schedule: str | None = None
    warmup: float | None = None
    """The share of the run in which the learning rate grows from zero."""
    amp: str = "float32"
    compile: bool = False
    channels_last: bool = True
    """Whether images and weights of convolutions use torch's ``channels_last`` layout, which is usually faster."""
    device: str = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        check_name("model", self.model, models.MODELS)
        check_name("optimizer", self.optimizer, OPTIMIZER_NAMES)
        for name, known in (("preset", PRESETS), ("schedule", SCHEDULES), ("amp", PRECISIONS)):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name), known)
        _check_ranges(self)
        for name in ALL_SETTINGS - SETTINGS[self.optimizer]:
            if getattr(self, name) is not None:
                raise TrainingError(
                    f"{name} = {getattr(self, name)} is no setting of {self.optimizer}, which has "
                    f"{', '.join(sorted(SETTINGS[self.optimizer]))}; leave it out"
                )


# ---------------------------------------------------------------------- the paper's protocol
LAYERWISE = {"lr", "weight_decay", "momentum", "damping", "update_every", "preset"}
SETTINGS: dict[str, set[str]] = {
    "ingd": {*LAYERWISE, "structure"},
    "kfac": LAYERWISE,
    "sgd": {"lr", "weight_decay", "momentum"},
    **{name: {"lr", "weight_decay"} for name in ("adam", "adamw", "lion", "soap", "muon")},
}
"""The settings that each optimizer has."""
OPTIMIZER_NAMES = tuple(SETTINGS)
ALL_SETTINGS = set().union(*SETTINGS.values())

WEIGHT_DECAY = {"sgd": 1e-3, "adam": 1e-3, "adamw": 1e-2, "lion": 0.1, "soap": 1e-2, "muon": 1e-2}
"""The paper's weight decays. SOAP and Muon are not in the paper and have that of AdamW."""

DAMPING = {"repvgg-b1g4": 5e-4}
"""The paper's dampings that differ from 0.005, which is that of the preset."""

LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3, "lion": 3e-4, "soap": 3e-3, "muon": 2e-3}
"""Usual learning rates. The paper tunes its rates and publishes only those of its ImageNet-100 runs (below)."""

AUTHORS_LR: dict[str, dict[str, float]] = {
    model: dict(zip(("ingd", "kfac", "adamw", "lion", "sgd", "adam"), rates, strict=True))
    for model, rates in {
        "convmixer180-16": (4e-3, 4e-4, 6e-4, 1e-3, 2e-2, 4e-4),
        "regnetz-500mf": (4e-4, 3e-4, 4e-3, 6e-4, 6e-3, 2e-4),
        "repvgg-b1g4": (2.5e-3, 1e-3, 1e-3, 1e-4, 3e-2, 2e-4),
        "rexnetr-100": (1e-3, 7e-4, 3e-3, 1e-3, 1.5e-2, 4e-4),
    }.items()
}
"""The learning rates of the authors' runs on ImageNet-100. Those of INGD and KFAC belong to the paper's preset."""


def completed(config: Config) -> Config:
    """Return the config with a default for every setting that applies and is not given."""
    text = models.MODELS[config.model].size is None
    defaults: dict[str, Any] = {"schedule": "cosine" if text else "step", "warmup": 0.05 if text else 0.0}
    name = config.optimizer
    if name in ("ingd", "kfac"):
        defaults |= _layerwise_defaults(config)
    else:
        rates = {**LR, **AUTHORS_LR.get(config.model, {})}
        defaults |= {"lr": rates[name], "weight_decay": WEIGHT_DECAY[name], "momentum": 0.9 if name == "sgd" else None}
    return replace(config, **{key: value for key, value in defaults.items() if getattr(config, key) is None})


def _layerwise_defaults(config: Config) -> dict[str, Any]:
    """Return the defaults of INGD and KFAC.

    They are the library's, or the paper's with ``preset="paper"``. The intervals of updates are always the paper's.
    """
    preset = config.preset or "robust"
    known = preset_arguments(INGD if config.optimizer == "ingd" else KFAC, preset)
    defaults = {name: known[name] for name in ("lr", "weight_decay", "momentum", "damping", "update_every")}
    defaults |= {"preset": preset, "update_every": models.MODELS[config.model].update_every or known["update_every"]}
    if preset == "paper":
        defaults["lr"] = AUTHORS_LR.get(config.model, {}).get(config.optimizer, known["lr"])
        defaults["damping"] = DAMPING.get(config.model, known["damping"])
    if config.optimizer == "ingd":
        defaults["structure"] = "auto"
    return defaults


# ---------------------------------------------------------------------- files
def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a TOML file, by name. Their values are checked when they become a :class:`Config`."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"cannot read the config file {path}: {_reason(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise TrainingError(f"{path} is not a TOML file of lines such as lr = 0.01: {error}") from None


def config_from(settings: Mapping[str, Any], base: Config | None = None) -> Config:
    """Return a config with these settings. Other settings are those of ``base``."""
    known = [field.name for field in fields(Config)]
    for name in settings:
        check_name("setting", name, known)
    return replace(base or Config(), **settings)


def as_toml(config: Config) -> str:
    """Return the text of a file that :func:`read_settings` reads. Settings that are None are left out."""
    said = {name: value for name, value in asdict(config).items() if value is not None}
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in said.items())


# ---------------------------------------------------------------------- checks
def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Raise an error for an unknown name. The message has the most similar known names."""
    if name in known:
        return
    near = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    raise TrainingError(f"unknown {what} {name!r}; {hint}")


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raise an error if a value, which may come from a file, is not of a field's type. An integer is also a float."""
    if value is None and annotation.endswith("| None"):
        return
    wanted = {"str": "text", "int": "an integer", "float": "a number", "bool": "true or false"}
    kind = annotation.removesuffix(" | None")
    given = {bool: {"bool"}, int: {"int", "float"}, float: {"float"}, str: {"str"}}.get(type(value), set())
    if kind not in given:
        raise TrainingError(f"{name} must be {wanted[kind]}, got {value!r}")


def _check_ranges(config: Config) -> None:
    for name in ("epochs", "batch_size", "train_limit", "test_limit", "update_every"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise TrainingError(f"{name} must be at least 1, got {value}")
    for name in ("weight_decay", "damping", "momentum", "warmup", "validation"):
        if (value := getattr(config, name)) is not None and not 0 <= value < math.inf:
            raise TrainingError(f"{name} must be finite and at least 0, got {value}")
    for name in ("momentum", "warmup", "validation"):
        if (value := getattr(config, name)) is not None and value >= 1:
            raise TrainingError(f"{name} must be below 1, got {value}")
    if config.lr is not None and not 0 < config.lr < math.inf:
        raise TrainingError(f"lr must be positive, got {config.lr}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
