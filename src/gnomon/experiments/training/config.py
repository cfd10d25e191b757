"""What a training run is: its settings, in a file and with the paper's protocol where nothing is said."""

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
from .. import models

PRESETS = ("robust", "paper")
SCHEDULES = ("step", "thirds", "cosine", "constant")
PRECISIONS = ("float32", "bf16")


class TrainingError(ValueError):
    """What a user can put right; the message is one line and says how."""


@dataclass(frozen=True)
class Config:
    """The settings of a run. What is None is filled in by :func:`completed`, or does not apply to the optimizer."""

    model: str = "mlp"
    data: str = "digits"
    data_dir: str | None = None
    train_limit: int | None = None
    """Train on the first so many samples."""
    test_limit: int | None = None
    validation: float = 0.0
    """The share of the training set that is kept from training and measured in the place of the test set."""
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
    """Whether images and weights of convolutions lie in memory with their channels together; faster as a rule."""
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
"""What each optimizer can be told."""
OPTIMIZER_NAMES = tuple(SETTINGS)
ALL_SETTINGS = set().union(*SETTINGS.values())

WEIGHT_DECAY = {"sgd": 1e-3, "adam": 1e-3, "adamw": 1e-2, "lion": 0.1, "soap": 1e-2, "muon": 1e-2}
"""The paper's; SOAP and Muon are not in it and have AdamW's."""

DAMPING = {"repvgg-b1g4": 5e-4}
"""The paper's where it is not 0.005, which is the preset's."""

LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3, "lion": 3e-4, "soap": 3e-3, "muon": 2e-3}
"""Usual values: the paper tunes each and publishes none, but those of its ImageNet-100 runs below."""

AUTHORS_LR: dict[str, dict[str, float]] = {
    model: dict(zip(("ingd", "kfac", "adamw", "lion", "sgd", "adam"), rates, strict=True))
    for model, rates in {
        "convmixer180-16": (4e-3, 4e-4, 6e-4, 1e-3, 2e-2, 4e-4),
        "regnetz-500mf": (4e-4, 3e-4, 4e-3, 6e-4, 6e-3, 2e-4),
        "repvgg-b1g4": (2.5e-3, 1e-3, 1e-3, 1e-4, 3e-2, 2e-4),
        "rexnetr-100": (1e-3, 7e-4, 3e-3, 1e-3, 1.5e-2, 4e-4),
    }.items()
}
"""The learning rates of the authors' runs on ImageNet-100; those of INGD and KFAC hold for the paper's preset."""


def completed(config: Config) -> Config:
    """The same run with every setting that applies said; what it says already stays."""
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
    """Of INGD and KFAC: the library's, or with ``preset="paper"`` the paper's; the intervals are the paper's."""
    preset = config.preset or "robust"
    known = (INGD if config.optimizer == "ingd" else KFAC).presets[preset]
    defaults = {name: known[name] for name in ("lr", "weight_decay", "momentum", "damping", "update_every")}
    defaults |= {"preset": preset, "update_every": models.MODELS[config.model].update_every or known["update_every"]}
    if preset == "paper":
        defaults["lr"] = AUTHORS_LR.get(config.model, {}).get(config.optimizer, known["lr"])
        defaults["damping"] = DAMPING.get(config.model, known["damping"])
    if config.optimizer == "ingd":
        defaults["structure"] = "dense"
    return defaults


# ---------------------------------------------------------------------- files
def read_settings(path: Path) -> dict[str, Any]:
    """What a TOML file says, by name; values are checked where they become a :class:`Config`."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"cannot read the config file {path}: {_reason(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise TrainingError(f"{path} is not a TOML file of lines such as lr = 0.01: {error}") from None


def config_from(settings: Mapping[str, Any], base: Config | None = None) -> Config:
    """A config with these settings, over those of ``base``."""
    known = [field.name for field in fields(Config)]
    for name in settings:
        check_name("setting", name, known)
    return replace(base or Config(), **settings)


def as_toml(config: Config) -> str:
    """The text of a file that :func:`read_settings` takes; settings that do not apply are left out."""
    said = {name: value for name, value in asdict(config).items() if value is not None}
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in said.items())


# ---------------------------------------------------------------------- checks
def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Raise for a name that is not known, with the nearest that are."""
    if name in known:
        return
    near = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    raise TrainingError(f"unknown {what} {name!r}; {hint}")


def _check_type(name: str, value: object, annotation: str) -> None:
    """Whether a value, which may come from a file, is of a field's type; an integer is a float too."""
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
