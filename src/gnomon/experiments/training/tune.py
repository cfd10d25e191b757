"""The search for learning rates and dampings, with the same budget for every optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import TrialState
from rich import box
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from .. import models
from ..common.files import write_atomically
from .config import ALL_SETTINGS, SETTINGS, Config, TrainingError, as_toml, check_name, completed
from .optimizers import TITLES
from .run import Outcome, train
from .trainer import Epoch, load_data

SPREAD = 10.0
"""The search covers a tenth to ten times an optimizer's default, which are two decades for every optimizer."""

VALIDATION = 0.1
"""The share of the training set on which settings are judged, unless another is given."""

EDGE = 0.05
"""The best setting is at an end of its range if it is in this share of the range, in logarithms, at either end."""


@dataclass(frozen=True)
class Trial:
    """One setting that was tried."""

    config: Config
    value: float
    """The validation error in % after the last epoch, or the loss for text. It is infinite if the run diverged."""
    tie: float = math.inf
    """The validation loss. It decides between equal errors."""


@dataclass
class Search:
    """The trials of one optimizer."""

    optimizer: str
    trials: list[Trial]
    ranges: dict[str, tuple[float, float]]
    """The least and the greatest value of each setting that is searched."""

    @property
    def best(self) -> Trial:
        """The trial with the lowest error."""
        return min(self.trials, key=lambda trial: (trial.value, trial.tie))

    @property
    def at_edge(self) -> list[str]:
        """The settings whose best value is at an end of their range."""
        return [name for name, (low, high) in self.ranges.items() if not self._inside(name, low, high)]

    def _inside(self, name: str, low: float, high: float) -> bool:
        where = math.log(getattr(self.best.config, name) / low) / math.log(high / low)
        return EDGE <= where <= 1 - EDGE


class InterruptedSearchError(Exception):
    """A signal has interrupted the search. Finished trials are kept."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def for_optimizer(config: Config, name: str) -> Config:
    """Return the same task for another optimizer, without the settings that it lacks."""
    check_name("optimizer", name, SETTINGS)
    foreign: dict[str, Any] = dict.fromkeys(ALL_SETTINGS - SETTINGS[name])
    return replace(config, optimizer=name, **foreign)


def ranges(config: Config) -> dict[str, tuple[float, float]]:
    """Return the ranges of the settings that are searched.

    They are the learning rate, and the damping of INGD and KFAC unless it is given.
    """
    full = completed(config)
    searched = [name for name in ("lr", "damping") if name == "lr" or config.damping is None]
    middles = {name: value for name in searched if (value := getattr(full, name))}
    return {name: (middle / SPREAD, middle * SPREAD) for name, middle in middles.items()}


def tune(
    config: Config,
    optimizers: Sequence[str],
    budget: int,
    folder: Path,
    tell: Callable[[str, int, Trial], None] = lambda optimizer, number, trial: None,
) -> list[Search]:
    """Try ``budget`` settings of each optimizer, all with the config's epochs, data and seed.

    The first setting is the default. The others cover the ranges evenly, by Sobol's sequence. Trials are stored in the
    folder, so that an interrupted search can be resumed, and a greater budget adds trials. The best config of each
    optimizer is written to ``best-OPTIMIZER.toml``.
    """
    if budget < 1:
        raise TrainingError(f"budget must be at least 1, got {budget}")
    if not config.validation:
        config = replace(config, validation=VALIDATION)
    wanted = [for_optimizer(config, name) for name in dict.fromkeys(optimizers)]
    data = load_data(config)
    searches = []
    for one in wanted:
        try:
            searches.append(_search(one, budget, folder, lambda c: train(c, data=data), tell))
            _write_best(searches[-1], folder)
        except (OSError, SQLAlchemyError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise TrainingError(f"cannot write to {folder}: {reason}; make room or choose another --output") from None
    return searches


def _search(
    config: Config,
    budget: int,
    folder: Path,
    run: Callable[[Config], Outcome],
    tell: Callable[[str, int, Trial], None],
) -> Search:
    study = _study(config, folder)
    space: dict[str, BaseDistribution] = {
        name: FloatDistribution(*ends, log=True) for name, ends in ranges(config).items()
    }
    for left in study.get_trials(states=(TrialState.RUNNING,)):  # trials of a process that was killed
        study.tell(left.number, state=TrialState.FAIL)
        study.enqueue_trial(left.params)
    while (done := len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))) < budget:
        asked = study.ask(space)
        trial, signal = _tried(_with(config, asked.params), run)
        if signal is not None:
            study.tell(asked, state=TrialState.FAIL)
            study.enqueue_trial(asked.params)
            raise InterruptedSearchError(signal)
        asked.set_user_attr("loss", trial.tie)
        study.tell(asked, trial.value)
        tell(config.optimizer, done + 1, trial)
    trials = [
        Trial(_with(config, t.params), t.values[0], t.user_attrs["loss"])
        for t in study.get_trials(states=(TrialState.COMPLETE,))
    ]
    return Search(config.optimizer, trials[:budget], ranges(config))


def _tried(config: Config, run: Callable[[Config], Outcome]) -> tuple[Trial, int | None]:
    outcome = run(config)
    failed = outcome.failure is not None or outcome.signal is not None
    return judged(config, None if failed else outcome.epochs[-1]), outcome.signal


def judged(config: Config, last: Epoch | None) -> Trial:
    """Judge a setting by the last epoch of its run. The epoch is None if the run diverged."""
    if last is None:
        return Trial(config, math.inf)
    text = models.MODELS[config.model].size is None
    return Trial(config, last.test_loss if text else last.test_error, last.test_loss)


def rate_grid(config: Config, count: int) -> list[Config]:
    """Return ``count`` configs that differ only in the learning rate.

    The rates have equal ratios and cover the range from end to end, with the default in the middle. A single rate is
    the default.
    """
    low, high = ranges(config)["lr"]
    shares = [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
    return [_with(config, {"lr": low * (high / low) ** share}) for share in shares]


def _with(config: Config, found: dict[str, float]) -> Config:
    """Return the config with the found settings, rounded to three digits."""
    rounded: dict[str, Any] = {name: float(f"{value:.3g}") for name, value in found.items()}
    return completed(replace(config, **rounded))


def _study(config: Config, folder: Path) -> optuna.Study:
    """Open the stored trials of an optimizer in the folder. The first trial is its default."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.QMCSampler(scramble=True, seed=config.seed)
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'trials.db'}")
    study = optuna.create_study(study_name=config.optimizer, storage=storage, sampler=sampler, load_if_exists=True)
    before = study.user_attrs.get("config")
    if before is None:
        study.set_user_attr("config", as_toml(config))
        study.enqueue_trial({name: getattr(completed(config), name) for name in ranges(config)})
    elif before != as_toml(config):
        raise TrainingError(
            f"{folder} holds a search of {config.optimizer} with other settings ({_first_change(before, config)}); "
            "choose another --output"
        )
    return study


def _first_change(before: str, config: Config) -> str:
    then, now = (set(text.splitlines()) for text in (before, as_toml(config)))
    names = {line.split(" = ")[0] for line in then ^ now}
    name = next(field.name for field in fields(Config) if field.name in names)
    return next((line for line in then if line.startswith(f"{name} = ")), f"no {name}")


def _write_best(search: Search, folder: Path) -> None:
    """Write the best config. With it ``gnomon train`` uses the whole training set and measures on the test set."""
    best = replace(search.best.config, validation=0.0)
    write_atomically(best_file(folder, search.optimizer), as_toml(best))


# ---------------------------------------------------------------------- output
def trial_line(trial: Trial) -> str:
    """Return a trial as a line of text."""
    config = trial.config
    damping = "" if config.damping is None else f"  damping {config.damping:<8g}"
    return f"{config.optimizer:<6} lr {config.lr:<8g}{damping}  {_value_text(trial)}"


def search_table(searches: list[Search]) -> Table:
    """Return a table with the best trial of each optimizer."""
    table = Table("Optimizer", box=box.SIMPLE)
    for title in ("Trials", "Diverged", "Best lr", "Damping", "Validation"):
        table.add_column(title, justify="right")
    for search in searches:
        best = search.best
        damping = "" if best.config.damping is None else f"{best.config.damping:g}"
        diverged = str(sum(math.isinf(trial.value) for trial in search.trials))
        row = (str(len(search.trials)), diverged, f"{best.config.lr:g}", damping, _value_text(best))
        table.add_row(TITLES[search.optimizer], *row)
    return table


def _value_text(trial: Trial) -> str:
    if math.isinf(trial.value):
        return "diverged"
    return f"loss {trial.value:.4f}" if trial.value == trial.tie else f"error {trial.value:.2f} %"


def best_file(folder: Path, optimizer: str) -> Path:
    """Return the file of an optimizer's best config."""
    return folder / f"best-{optimizer}.toml"
