"""What optimizers with a preconditioner for each layer share: which parameters, when, from what, and how they move."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..groups import Diagonal
from ..manifolds import full_precision
from . import rules
from .capture import Capture
from .factors import KroneckerFactors, Statistics
from .layers import Approximation, Layer, Matrix, ModuleLayer, find_matrices
from .sampling import Likelihood, sampled_loss
from .settings import (
    GROWTH,
    SCHEDULABLE,
    Scalar,
    Settings,
    check_choice,
    check_parameter,
    check_settings,
    checked_group,
    is_due,
)
from .structures import Structure, check_structure, groups_for, unmatched
from .summary import Row, Summary

TORCH_OWN = ("_optimizer_", "_zero_grad", "_patch", "_hook")
"""How names begin that torch's optimizers set on themselves and make again after a copy."""
WRAPPERS = ("_orig_mod.", "module.")
"""What ``torch.compile`` and ``DistributedDataParallel`` put before the names of a model."""


@dataclass
class Tracked:
    """A matrix of the model with its factors, and what the hooks have gathered for the next update."""

    index: int
    name: str
    layer: Layer
    views: list[ModuleLayer]
    factors: KroneckerFactors
    statistics: Statistics | None = None
    samples: dict[int, int] = field(default_factory=dict)
    """By forward pass: a layer that is used twice in one of them counts its samples once."""
    backward: int | None = None
    """The backward pass that came last through a module of the layer; None where there was none yet."""
    cache: dict[str, Tensor] = field(default_factory=dict)
    """Products of the factors that change only with them."""

    def forget(self) -> None:
        self.statistics = None
        self.samples.clear()


@dataclass
class Move:
    """A layer that has a gradient: what is needed to move it."""

    tracked: Tracked
    group: Settings
    """Of the weight."""
    groups: dict[nn.Parameter, Settings]
    """Of each parameter with a gradient."""
    largest: dict[nn.Parameter, Tensor]
    """The largest magnitudes of all gradients."""

    @property
    def has_gradient(self) -> Tensor:
        """Whether an entry of the gradient is not zero."""
        return torch.stack([self.largest[p] for p in self.groups]).amax() > 0


class LayerwiseOptimizer(Optimizer):
    """The frame of :class:`~gnomon.optim.INGD` and :class:`~gnomon.optim.KFAC`; they add the factors."""

    presets: ClassVar[dict[str, Settings]]
    """What arguments that are not given mean, by preset."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        *,
        preset: str,
        structure: Structure,
        curvature: Literal["kfac", "gradient"],
        fisher: Literal["empirical", "mc"],
        approx: Approximation | Literal["auto"] | None,
        grouped: Literal["each", "average"],
        fallback: Literal["adamw", "sgd"] | None,
        fallback_lr: Scalar | None,
        max_dim: int | None,
        groups: Iterable[Settings],
        precondition_only: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
        check_choice("preset", preset, self.presets)
        chosen = {**self.presets[preset], **{k: v for k, v in settings.items() if v is not None}}
        if settings["step_rms"] == "preset":
            chosen["step_rms"] = self.presets[preset]["step_rms"] if settings["kl_clip"] is None else None
        elif settings["step_rms"] is None:
            chosen["step_rms"] = None
        check_choice("curvature", curvature, ("kfac", "gradient"))
        check_choice("fisher", fisher, ("empirical", "mc"))
        self._approx = chosen["approx"] if approx is None else approx
        check_choice("approx", self._approx, ("auto", "expand", "reduce"))
        check_choice("grouped", grouped, ("each", "average"))
        if fisher == "mc" and curvature == "gradient":
            raise ValueError("fisher='mc' needs the hooks of curvature='kfac', got curvature='gradient'")
        self._fallback = chosen["fallback"] if fallback is None else fallback
        check_choice("fallback", self._fallback, rules.FALLBACKS)
        for name in ("relative", "growing_intervals", "subsample"):
            if not isinstance(chosen.get(name, True), bool):
                raise TypeError(f"{name} must be True or False, got {chosen[name]!r}")
        if fallback_lr is not None:
            check_settings({"fallback_lr": fallback_lr(0) if callable(fallback_lr) else fallback_lr})
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        check_structure(structure)
        if max_dim is not None and (isinstance(max_dim, bool) or not isinstance(max_dim, int) or max_dim < 1):
            raise ValueError(f"max_dim must be a positive integer, or None for no limit, got {max_dim!r}")
        self._fixed = {k: chosen.pop(k) for k in list(chosen) if k not in SCHEDULABLE}
        self._model, self._structure, self._max_dim = model, structure, max_dim
        self._curvature, self._fisher, self._average = curvature, fisher, grouped == "average"
        self._fallback_lr = fallback_lr
        self._precondition_only, self._scaler = precondition_only, scaler
        self._observing = fisher == "empirical"
        self._tracked: dict[nn.Parameter, Tracked] = {}
        self._views: dict[nn.Module, tuple[Tracked, ModuleLayer]] = {}
        self._schedules: list[dict[str, Callable[[int], float]]] = []
        self._due: set[nn.Parameter] = set()
        self._capture: Capture | None = None
        self._closed = True
        asked = [checked_group(group) for group in groups]
        super().__init__(self._all_groups(asked), {**chosen, "role": "layer"})
        self._check_patterns()
        self._closed = False
        self._watch()

    # ------------------------------------------------------------------ parameters
    def _all_groups(self, asked: list[Settings]) -> list[Settings]:
        """The groups that were asked for, and one for all other parameters that can be trained."""
        for name, p in self._model.named_parameters():
            check_parameter(name, p)
        named = {id(p) for group in asked for p in group["params"]}
        rest = [p for p in self._model.parameters() if p.requires_grad and id(p) not in named]
        if not rest and not asked:
            raise ValueError("model has no trainable parameters; is requires_grad off for all of them?")
        # All matrices are found before the first group: the order of groups does not matter.
        self._matrices = self._find_matrices(apart=())
        return [{"params": rest}, *asked] if rest else asked

    def _find_matrices(self, apart: Collection[nn.Parameter]) -> dict[nn.Parameter, Matrix]:
        found = find_matrices(self._model, self._curvature == "gradient", self._average, apart)
        return {matrix.layer.weight: matrix for matrix in found}

    def add_param_group(self, param_group: Settings) -> None:
        """Add parameters of the model. Those of layers and others become two groups, each with its learning rate."""
        group = checked_group(param_group)
        params, asked = group.pop("params"), group
        settings = {**self.defaults, **asked}
        schedules = {k: v for k, v in settings.items() if callable(v)}
        settings |= {k: f(0) for k, f in schedules.items()}
        check_settings(settings)
        self._check_new(params)
        if any(p not in self._matrices and p not in self._tracked for p in params):
            # A layer that was frozen until now: its bias may be among the others already.
            others = [p for g in self.param_groups if g["role"] == "fallback" for p in g["params"]]
            self._matrices = self._find_matrices(apart=others)
        new = [self._new_tracked(self._matrices[p]) for p in params if p in self._matrices and p not in self._tracked]
        to_come = [m.layer for weight, m in self._matrices.items() if weight not in self._tracked]
        here = [tracked.layer for tracked in self._tracked.values()]
        members = {id(p) for layer in (*to_come, *here) for p in layer.parameters}
        counters = {"step": 0, "next_update": 0}
        if layers := [p for p in params if id(p) in members]:
            super().add_param_group({"params": layers, **settings, **counters, "role": "layer"})
            self._schedules.append(schedules)
        if others := [p for p in params if id(p) not in members]:
            lr = asked.get("fallback_lr", self._fallback_lr)
            schedules = {**schedules, "lr": lr} if callable(lr) else schedules
            lr = settings["lr"] if lr is None else lr(0) if callable(lr) else lr
            own = {"lr": lr, "beta2": 0.99, "eps": 1e-8, "role": "fallback"}
            super().add_param_group({"params": others, **settings, **counters, **own})
            self._schedules.append(schedules)
        for tracked in new:
            self._track(tracked)
        self._watch()

    def _check_new(self, params: list[nn.Parameter]) -> None:
        names = {id(p): name for name, p in self._model.named_parameters()}
        known = {id(p) for group in self.param_groups for p in group["params"]}
        for p in params:
            if id(p) not in names:
                raise ValueError(f"params holds a parameter of shape {tuple(p.shape)} that is not in the model")
            if id(p) in known:
                raise ValueError(f"params holds {names[id(p)]}, which is in another group already")
            check_parameter(names[id(p)], p)

    def _new_tracked(self, matrix: Matrix) -> Tracked:
        layer, name = matrix.layer, self._plain(matrix.name)
        left, right = groups_for(self._structure, name, layer.p, layer.d, self._max_dim)
        if layer.one_hot and not isinstance(left, Diagonal):
            left = Diagonal(layer.p)
        views = [] if self._curvature == "gradient" else matrix.views
        return Tracked(len(self._tracked), name, layer, views, KroneckerFactors(left, right))

    def _track(self, tracked: Tracked) -> None:
        tracked.index = len(self._tracked)
        self._tracked[tracked.layer.weight] = tracked
        self._views |= {view.module: (tracked, view) for view in tracked.views}

    def _plain(self, name: str) -> str:
        """A layer's name without those of wrappers around the model."""
        for wrapper in WRAPPERS:
            inner = getattr(self._model, wrapper[:-1], None)
            if isinstance(inner, nn.Module) and len(list(self._model.children())) == 1:
                name = name.removeprefix(wrapper)
        return name

    def _check_patterns(self) -> None:
        """A pattern that matches nothing is a mistake."""
        names = [tracked.name for tracked in self._tracked.values()]
        for pattern in unmatched(self._structure, names):
            raise ValueError(f"structure has the pattern {pattern!r}, which matches no layer; there are {names}")

    def _watch(self) -> None:
        """Hooks on all modules that describe a matrix."""
        if self._closed:
            return
        if self._capture is not None:
            self._capture.close()
        self._capture = Capture(self._model, list(self._views), self._receive) if self._views else None
        self._set_active()

    def _set_active(self) -> None:
        due = [group for group in self.param_groups if group["role"] == "layer" and is_due(group)]
        self._due = {p for group in due for p in group["params"]}
        if self._capture is not None:
            self._capture.active = bool(due)

    def close(self) -> None:
        """Remove the hooks from the model. Factors stay as they are from then on."""
        self._closed = True
        if self._capture is not None:
            self._capture.close()
            self._capture = None

    def __getstate__(self) -> Settings:
        """Copies and pickles have what torch keeps and what is here; the hooks are set anew."""
        own = {k: v for k, v in self.__dict__.items() if k.startswith("_") and not k.startswith(TORCH_OWN)}
        return {**super().__getstate__(), **own, "_capture": None}

    def __setstate__(self, state: Settings) -> None:
        super().__setstate__(state)
        self._watch()

    # ------------------------------------------------------------------ what the subclasses add
    @abstractmethod
    def _statistics(self, tracked: Tracked, x: Tensor, g: Tensor, terms: int) -> Statistics:
        """The sums over a batch's rows that an update needs."""

    @abstractmethod
    def _update(self, tracked: Tracked, group: Settings, ok: Tensor) -> None:
        """The factors follow the curvature; where ``ok`` is False they stay."""

    @abstractmethod
    def _precondition(self, tracked: Tracked, matrix: Tensor) -> Tensor:
        """The natural direction of a gradient matrix."""

    @abstractmethod
    def _factor_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        """The tensors that the factors of a matrix take in the state."""

    def _state_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        """Those, and what else an update needs."""
        return self._factor_shapes(tracked)

    # ------------------------------------------------------------------ statistics
    def _receive(self, module: nn.Module, x: Tensor, g: Tensor, number: int) -> None:
        """A batch of inputs and output gradients of a layer, before a step that updates."""
        tracked, view = self._views[module]
        weight = view.weight
        if not (self._observing and weight.requires_grad and weight in self._due):
            return
        task = torch._C._current_graph_task_id()
        if weight.grad is None and tracked.backward != task:
            tracked.forget()  # the gradients were dropped without zero_grad(): so is what came with them
        tracked.backward = task
        if g.numel() == 0:  # a batch of none
            self._count("skipped_updates", torch.ones((), dtype=torch.bool, device=g.device))
            return
        samples, before = view.samples(x), tracked.samples.get(number, 0)
        tracked.samples[number] = max(samples, before)
        approximation = view.usual_approximation if self._approx == "auto" else self._approx
        if self._fixed["subsample"] and (stride := view.stride(x, g, approximation)) > 1:
            # The squares of a part, counted as often as makes up for the others.
            x, g = x[::stride], g[::stride] * math.sqrt(samples / len(g[::stride]))
        dtype = self._computing_dtype(tracked)
        with full_precision(weight):
            self._adapt(tracked)
            x, g = x if view.one_hot else x.to(dtype), g.to(dtype) / self._loss_scale()
            x, g = view.rows(x, g, approximation)
            part = self._statistics(tracked, x, g, terms=max(samples - before, 0))
        tracked.statistics = part if tracked.statistics is None else tracked.statistics + part

    def _loss_scale(self) -> Tensor | float:
        """By what a ``GradScaler`` has multiplied the loss; targets of :meth:`observe` have no scale."""
        scale = getattr(self._scaler, "_scale", None)  # none before the first loss, and where the scaler is off
        return 1.0 if scale is None or self._fisher == "mc" else scale

    def _share_statistics(self, due: list[Tracked]) -> None:
        """Under ``DistributedDataParallel`` the statistics are means over the ranks, as its gradients are."""
        if not isinstance(self._model, nn.parallel.DistributedDataParallel):
            return
        ranks = self._model.process_group
        for tracked in due:
            # Every rank takes part, also one that has not seen the layer.
            own = self._no_statistics(tracked) if tracked.statistics is None else tracked.statistics.normalized()
            flat = torch.cat([part.flatten() for part in own.tensors()]) / ranks.size()
            torch.distributed.all_reduce(flat, group=ranks)
            for part, mean in zip(own.tensors(), flat.split([t.numel() for t in own.tensors()]), strict=True):
                part.copy_(mean.view_as(part))
            tracked.statistics = own

    def _no_statistics(self, tracked: Tracked) -> Statistics:
        """Those of one row of zeros."""
        layer, dtype, device = tracked.layer, self._computing_dtype(tracked), tracked.layer.weight.device
        x = torch.zeros(layer.blocks, 1, layer.p, dtype=dtype, device=device)
        if layer.one_hot:
            x = torch.full((layer.blocks, 1), layer.p, device=device)
        g = torch.zeros(layer.blocks, 1, layer.d, dtype=dtype, device=device)
        return self._statistics(tracked, x, g, terms=1).normalized()

    def observe(self, output: Tensor, likelihood: Likelihood = "categorical") -> None:
        """For ``fisher="mc"``: statistics from targets that are drawn from the model's own predictions.

        Call it with the model's output before the loss's backward pass; the graph is kept for that. ``"categorical"``
        takes logits along the last dimension, ``"bernoulli"`` logits, ``"gaussian"`` means with unit variance. Before a
        step that does not update the factors it does nothing.
        """
        if self._fisher != "mc":
            raise RuntimeError("observe() is for fisher='mc'; with fisher='empirical' the loss's gradients are used")
        if self._capture is None or not self._capture.active:
            return
        weights = [t.layer.weight for t in self._tracked.values() if t.views and t.layer.weight.requires_grad]
        self._observing = True
        try:
            torch.autograd.grad(sampled_loss(output, likelihood), weights, retain_graph=True, allow_unused=True)
        finally:
            self._observing = False

    def _computing_dtype(self, tracked: Tracked) -> torch.dtype:
        """In which statistics and factors are computed: the weight's type, and float32 at least."""
        return torch.promote_types(tracked.layer.weight.dtype, torch.float32)

    def _stored_dtype(self, tracked: Tracked) -> torch.dtype:
        """In which factors are kept."""
        return self._computing_dtype(tracked)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the hooks have gathered with them."""
        super().zero_grad(set_to_none)
        for tracked in self._tracked.values():
            tracked.forget()

    # ------------------------------------------------------------------ the step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients that are there; parameters without one stay.

        If an entry of a gradient is not finite no parameter and no state changes, and ``skipped_steps`` counts it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_schedules()
        parameters = self._checked_parameters()
        if parameters:
            with full_precision(parameters[0]):
                self._step(parameters)
        for tracked in self._tracked.values():
            tracked.forget()
        self._set_active()
        return loss

    def _step(self, parameters: list[nn.Parameter]) -> None:
        magnitudes = rules.peaks([p.grad for p in parameters if p.grad is not None])
        ok = rules.all_finite(magnitudes)
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        largest = dict(zip(parameters, magnitudes, strict=True))
        moving = [
            Move(tracked, group_of[w], {p: group_of[p] for p in tracked.layer.parameters if p in largest}, largest)
            for w, tracked in self._tracked.items()
            if w in largest
        ]
        self._share_statistics([m.tracked for m in moving if is_due(m.group) and m.tracked.views])
        for move in moving:
            self._adapt(move.tracked)
            if is_due(move.group) and self._has_curvature(move.tracked):
                self._update(move.tracked, move.group, ok)
        ok = self._move(moving, ok)
        if not self._precondition_only:
            for group in self.param_groups:
                if group["role"] == "fallback":
                    for p in group["params"]:
                        if p in largest:
                            self._fall_back(p, group, ok)
        self._count("skipped_steps", ~ok)
        for group in self.param_groups:
            if is_due(group):
                grown = 1 + group["step"] // GROWTH if self._fixed["growing_intervals"] else group["update_every"]
                group["next_update"] = group["step"] + min(group["update_every"], grown)
            group["step"] += 1

    def _has_curvature(self, tracked: Tracked) -> bool:
        """Whether there are statistics, or the gradient stands in for them.

        It does where no hook can see the layer, and where none ever did because the model applies its weight by a
        function; that needs relative curvature, since the two have different units.
        """
        unseen = (
            tracked.backward is None and self._fixed["relative"] and self._fisher == "empirical" and not self._closed
        )
        return tracked.statistics is not None or not tracked.views or unseen

    def _follow_schedules(self) -> None:
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            new = {name: schedule(group["step"]) for name, schedule in schedules.items()}
            check_settings(new)
            group.update(new)

    def _checked_parameters(self) -> list[nn.Parameter]:
        """Those with a gradient; raise where one could not be used, before anything changes."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        known = {id(p) for group in self.param_groups for p in group["params"]}
        for name, p in self._model.named_parameters():
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError(f"the gradient of {name} is sparse; build its embedding with sparse=False")
            if p.grad is not None and p.requires_grad and id(p) not in known:
                raise RuntimeError(
                    f"{name} has a gradient but is in no group, because it was frozen when this optimizer was built; "
                    "add it with add_param_group({'params': [...]})"
                )
        if parameters and self._fisher == "mc" and self._capture is not None and self._capture.active:
            watched = [t for t in self._tracked.values() if t.views and t.layer.weight.grad is not None]
            if watched and all(t.statistics is None for t in watched):
                raise RuntimeError("fisher='mc' needs observe(output) before each backward pass; there was none")
        return parameters

    def _count(self, name: str, happened: Tensor) -> None:
        first = self.param_groups[0]  # which torch saves and loads
        first[name] = first[name].to(happened.device) + happened if name in first else happened.long()

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because a gradient, or its natural direction, was not finite."""
        return int(self.param_groups[0].get("skipped_steps", 0))

    @property
    def skipped_updates(self) -> int:
        """Updates of a layer's factors that were not made, because its curvature was not finite or its batch empty."""
        return int(self.param_groups[0].get("skipped_updates", 0))

    def _fall_back(self, p: nn.Parameter, group: Settings, ok: Tensor) -> None:
        _follow(self.state[p], p)
        assert p.grad is not None
        rules.FALLBACKS[self._fallback](p, self.state[p], rules.cleaned(p.grad, ok), group, ok)

    # ------------------------------------------------------------------ how layers move
    def _gradient(self, tracked: Tracked, ok: Tensor) -> Tensor:
        """The gradient of a matrix; a bias that is frozen has none."""
        layer = tracked.layer
        parts = [torch.zeros_like(p) if p.grad is None else rules.cleaned(p.grad, ok) for p in layer.parameters]
        return layer.matrix(*parts)

    def _move(self, moving: list[Move], ok: Tensor) -> Tensor:
        """Move all layers, or replace their gradients; gives whether that could be done."""
        natural = [move for move in moving if move.group["step_rms"] is None]
        if natural:
            gradients = [self._gradient(move.tracked, ok) for move in natural]
            directions = [self._natural(move.tracked, g) for move, g in zip(natural, gradients, strict=True)]
            ok = ok & rules.all_finite(rules.peaks(directions)).to(ok.device)
            for move, direction in zip(natural, _clipped(natural, gradients, directions), strict=True):
                self._apply(move, direction, ok, rules.heavy_ball)
        for move in moving:
            if move.group["step_rms"] is not None:
                self._move_by_rms(move, ok)
        return ok

    def _move_by_rms(self, move: Move, ok: Tensor) -> None:
        """``W <- (1 - lr weight_decay) W - lr D``, D along the preconditioned average, its root mean square given."""
        layer, momentum = move.tracked.layer, move.group["momentum"]
        # Without any gradient a layer stays, as its average would shrink while the step does not.
        ok = ok & move.has_gradient.to(ok.device)
        if self._precondition_only:
            average = self._gradient(move.tracked, ok)
        else:
            average = layer.matrix(
                *(
                    rules.averaged(self.state[p], rules.cleaned(_grad(p), ok), momentum, ok)
                    if p in move.groups
                    else torch.zeros_like(p)
                    for p in layer.parameters
                )
            )
        natural = self._precondition(move.tracked, average)
        peak = torch.linalg.vector_norm(natural, float("inf"))
        unit = natural / torch.where(peak > 0, peak, 1)  # so that no square vanishes or overflows
        rms = torch.linalg.vector_norm(unit) / math.sqrt(unit.numel())
        self._apply(move, unit * (move.group["step_rms"] / rms.clamp(min=1e-30)), ok & peak.isfinite(), rules.decoupled)

    def _apply(self, move: Move, direction: Tensor, ok: Tensor, rule: Callable[..., None]) -> None:
        """Each parameter of a layer goes its part of the direction, or gets it as its gradient."""
        layer = move.tracked.layer
        for p, part in zip(layer.parameters, layer.tensors(direction), strict=True):
            if p not in move.groups:
                continue
            if self._precondition_only:
                gradient = _grad(p)
                gradient.copy_(torch.where(ok.to(p.device), part.to(gradient.dtype), gradient))
            else:
                rule(p, self.state[p], rules.cleaned(part, ok), move.groups[p], ok)

    @abstractmethod
    def _natural(self, tracked: Tracked, gradient: Tensor) -> Tensor:
        """The natural direction in its own units, with the curvature's level."""

    # ------------------------------------------------------------------ state
    def _adapt(self, tracked: Tracked) -> None:
        """State follows its parameters to another device or type."""
        factors, dtype = self._factor_shapes(tracked), self._stored_dtype(tracked)
        for p in tracked.layer.parameters:
            _follow(self.state[p], p, dict.fromkeys(factors, dtype))

    def load_state_dict(self, state_dict: Settings) -> None:
        """Take a state of the same model and structure; the dictionary stays as it is, and nothing is shared."""
        own = copy.deepcopy(state_dict)
        self._check_state(own)
        super().load_state_dict(own)
        numbers = [n for group in own["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            # As it was saved: torch would turn the factors into the parameter's type.
            if number in own["state"]:
                self.state[p] = {
                    k: v.to(p.device) if isinstance(v, Tensor) else v for k, v in own["state"][number].items()
                }
        for tracked in self._tracked.values():
            tracked.forget()
            tracked.cache.clear()
        self._set_active()

    def _check_state(self, state_dict: Settings) -> None:
        if not {"state", "param_groups"} <= set(state_dict):
            raise ValueError(
                f"state_dict must have 'state' and 'param_groups', as state_dict() gives; got {[*state_dict]}"
            )
        theirs = [[len(g["params"]), g.get("role")] for g in state_dict["param_groups"]]
        ours = [[len(g["params"]), g["role"]] for g in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f"the state is of another model or other groups: it has groups of {theirs} parameters, this has {ours}"
            )
        for group, own in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if missing := set(own) - set(group) - {"skipped_steps", "skipped_updates", "initial_lr"}:
                raise ValueError(f"the state is of another optimizer: its groups have no {', '.join(sorted(missing))}")
        names = {id(p): name for name, p in self._model.named_parameters()}
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            found = state_dict["state"].get(number, {})
            expected = {k: tuple(p.shape) for k in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
            factors = self._state_shapes(self._tracked[p]) if p in self._tracked else {}
            for key, shape in {**expected, **factors}.items():
                # The state of a layer that has had no step yet is empty.
                if key in found and tuple(found[key].shape) != shape:
                    got = f"has shape {tuple(found[key].shape)}, this optimizer needs {shape}"
                elif key in factors and found and key not in found:
                    got = "is missing"
                else:
                    continue
                raise ValueError(f"the state is of another model, structure or preset: {key} of {names[id(p)]} {got}")

    def memory_usage(self) -> int:
        """Bytes of the state, cached products included."""
        kept = [v for state in self.state.values() for v in state.values() if isinstance(v, Tensor)]
        kept += [v for tracked in self._tracked.values() for v in tracked.cache.values()]
        return sum(v.numel() * v.element_size() for v in kept)

    # ------------------------------------------------------------------ for people
    def summary(self) -> Summary:
        """Print what each parameter gets: structure, bytes of state, multiplications of an update and of a step."""
        summary = Summary(list(self._rows()))
        print(summary)
        return summary

    def _rows(self) -> Iterator[Row]:
        names = {id(p): name for name, p in self._model.named_parameters()}
        shown: set[int] = set()
        for tracked in self._tracked.values():
            parts = tracked.layer.parameters
            shown |= {id(p) for p in parts}
            yield self._layer_row(tracked, " + ".join(names[id(p)] for p in parts))
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) not in shown:
                    wide = torch.promote_types(p.dtype, torch.float32)  # AdamW's two moments; SGD's is in p's type
                    width = 2 * wide.itemsize if self._fallback == "adamw" else p.element_size()
                    treated = "left alone" if self._precondition_only else self._fallback
                    kept = 0 if self._precondition_only else p.numel() * width
                    yield Row(names[id(p)], tuple(p.shape), treated, bytes=kept, step=p.numel())
                    shown.add(id(p))
        for name, p in self._model.named_parameters():
            if id(p) not in shown:
                yield Row(name, tuple(p.shape), "frozen" if not p.requires_grad else "in no group")

    @abstractmethod
    def _layer_row(self, tracked: Tracked, name: str) -> Row:
        """A line of the summary."""


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _clipped(moves: list[Move], gradients: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """Directions times ``min(1, sqrt(kl_clip / (lr^2 sum <G, D>)))``: the predicted change is at most ``kl_clip``."""
    parts = [
        (move.group["lr"] ** 2 / move.group["kl_clip"] * (g * d).sum()).to(gradients[0].device)
        for move, g, d in zip(moves, gradients, directions, strict=True)
        if move.group["kl_clip"] is not None
    ]
    if not parts:
        return directions
    scale = torch.stack(parts).sum().clamp(min=1).rsqrt()
    return [d if move.group["kl_clip"] is None else d * scale.to(d) for move, d in zip(moves, directions, strict=True)]


def _follow(state: Settings, p: Tensor, dtypes: dict[str, torch.dtype] | None = None) -> None:
    """State of a parameter in its place, its momentum also in its type; other types as given."""
    wanted = {"momentum_buffer": p.dtype, **(dtypes or {})}
    for key, value in state.items():
        dtype = wanted.get(key, value.dtype)
        if (value.dtype, value.device) != (dtype, p.device):
            state[key] = value.to(p.device, dtype)
