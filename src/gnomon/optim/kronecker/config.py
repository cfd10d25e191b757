"""Settings of optimizers with a preconditioner for each layer: small configs that validate themselves, and presets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from .layers.base import Approximation, Settings

Scalar = float | Callable[[int], float]
"""A number, or a function of the number of the step."""
Init = TypeVar("Init", bound=Callable[..., None])


# ---------------------------------------------------------------------- presets
PRESETS = ("robust", "paper")


def resolves_preset(paper: Settings, shared: Collection[str] = ()) -> Callable[[Init], Init]:
    """Let ``preset="paper"`` replace the defaults in the signature of an ``__init__``, for arguments that are not
    given.

    ``shared`` are the names that the signature takes as ``**shared``. ``kl_clip`` without ``step_rms`` turns
    ``step_rms`` off, because they are two ways to choose the length of a step.
    """

    def decorate(init: Init) -> Init:
        signature = inspect.signature(init)
        known = {*signature.parameters, *shared}

        @functools.wraps(init)
        def resolved(*args: Any, **kwargs: Any) -> None:
            check_arguments(kwargs, known)
            bound = signature.bind(*args, **kwargs).arguments
            given = {**bound, **bound.get("shared", {})}
            if unknown := given.keys() - known:
                there = ", ".join(sorted(known - {"self", "shared"}))
                raise TypeError(f"there is no argument {', '.join(sorted(unknown))}; there are {there}")
            preset = given.get("preset", "robust")
            check_choice("preset", preset, PRESETS)
            changed = {name: value for name, value in paper.items() if name in known} if preset == "paper" else {}
            if given.get("kl_clip") is not None:
                changed["step_rms"] = None
            init(*args, **kwargs, **{name: value for name, value in changed.items() if name not in given})

        resolved.paper = paper  # type: ignore[attr-defined]
        return resolved  # type: ignore[return-value]

    return decorate


def preset_arguments(optimizer: type, preset: str = "robust") -> Settings:
    """Return the defaults of an optimizer's arguments with a preset."""
    check_choice("preset", preset, PRESETS)
    init: Any = vars(optimizer)["__init__"]
    defaults = {
        name: p.default for name, p in inspect.signature(optimizer).parameters.items() if p.default is not p.empty
    }
    paper = {name: value for name, value in init.paper.items() if name in defaults}
    return {**defaults, **(paper if preset == "paper" else {})}


IN_PLACE_OF = {
    "params": "pass the model itself as the first argument, and settings for some of its parameters as groups=[...]",
    "betas": "momentum takes the place of the first beta, as in momentum=0.9; there is no second one",
    "eps": "damping takes its place, relative to the mean curvature of a layer",
    "amsgrad": "nothing takes its place: steps have the length that step_rms says",
    "nesterov": "steps by step_rms are Nesterov's already",
    "dampening": "momentum is an average of directions, in which a new one has the weight 1 - momentum",
    "decoupled_weight_decay": "weight_decay is decoupled with step_rms, and added to directions with step_rms=None",
    "maximize": "take the loss with the opposite sign",
    "fused": "leave it out: layers that are alike are handled together already; compile=True does more",
    "foreach": "leave it out: layers that are alike are handled together already",
    "capturable": "leave it out: a step waits for no value of the device",
    "differentiable": "nothing takes its place: a step is not differentiable",
    "warmup_steps": "give lr as a function of the step, or take a scheduler of torch",
    "lr_scale": "give lr times the scale as lr",
    "trust_coefficient": "step_rms says how long the step of each layer is",
}
"""What to do in the place of arguments that other optimizers have."""


def check_arguments(given: Collection[str], known: Collection[str]) -> None:
    """Raise for arguments that are those of other optimizers, and say what takes their place."""
    foreign = [name for name in given if name in IN_PLACE_OF and name not in known]
    if foreign:
        raise TypeError("; ".join(f"there is no argument {name}: {IN_PLACE_OF[name]}" for name in foreign))


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


# ---------------------------------------------------------------------- settings of the whole optimizer
@dataclass(frozen=True)
class CurvatureConfig:
    """Where statistics come from."""

    curvature: Literal["kfac", "gradient"] = "kfac"
    fisher: Literal["empirical", "mc"] = "empirical"
    approx: Approximation | Literal["auto"] = "auto"
    grouped: Literal["each", "average"] = "each"
    subsample: bool = True
    scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        check_choice("curvature", self.curvature, ("kfac", "gradient"))
        check_choice("fisher", self.fisher, ("empirical", "mc"))
        check_choice("approx", self.approx, ("auto", "expand", "reduce"))
        check_choice("grouped", self.grouped, ("each", "average"))
        check_flag("subsample", self.subsample)
        if self.fisher == "mc" and self.curvature == "gradient":
            raise ValueError("fisher='mc' needs the hooks of curvature='kfac', got curvature='gradient'")
        if self.scaler is not None and not isinstance(self.scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(self.scaler).__name__}")


@dataclass(frozen=True)
class FactorConfig:
    """How the factors of INGD are stored and updated."""

    relative: bool = True
    order: Literal[1, 2] = 2
    max_factor_step: float = 0.5
    convention: Literal["inside", "outside"] = "inside"
    dtype: torch.dtype | None = None
    memory: Literal["default", "low"] = "default"
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_flag("relative", self.relative)
        check_flag("compile", self.compile)
        check_choice("convention", self.convention, ("inside", "outside"))
        check_choice("memory", self.memory, ("default", "low"))
        if self.order not in (1, 2) or isinstance(self.order, bool):
            raise ValueError(f"order must be 1 or 2, got {self.order!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer, got {self.seed!r}")
        bound = self.max_factor_step
        if isinstance(bound, bool) or not (isinstance(bound, (int, float)) and bound > 0):
            raise ValueError(f"max_factor_step must be positive, math.inf for no bound, got {self.max_factor_step!r}")
        if self.dtype not in (None, torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"precond_dtype must be torch.float64, float32, bfloat16 or float16, got {self.dtype}")


@dataclass(frozen=True)
class StepConfig:
    """How parameters move, and when factors are updated."""

    fallback: Literal["adamw", "sgd"] = "adamw"
    fallback_lr: Scalar | None = None
    growing_intervals: bool = True
    precondition_only: bool = False
    compile: bool = False
    growth: int = 5
    """With growing intervals, the interval between updates is 1 for this many steps, then 2 for as many, and so on,
    up to ``update_every``."""

    def __post_init__(self) -> None:
        check_choice("fallback", self.fallback, ("adamw", "sgd"))
        for name in ("growing_intervals", "precondition_only", "compile"):
            check_flag(name, getattr(self, name))
