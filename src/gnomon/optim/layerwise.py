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
from .structures import Structure, check_structure, groups_for
from .summary import Row, Summary

Scalar = float | Callable[[int], float]
"""A number, or a function of the step's number."""
Settings = dict[str, Any]

GROWTH = 10
"""With growing intervals factors are updated at each of so many steps at first, then at every second of as many, ..."""

AT_LEAST_ZERO = ("lr", "fallback_lr", "weight_decay", "damping", "precond_lr")
BELOW_ONE = ("momentum", "precond_momentum", "decay")
POSITIVE_OR_NONE = ("step_rms", "kl_clip")


def check_settings(settings: Settings) -> None:
    """Raise for a number that no step could use."""
    for name, value in settings.items():
        if name in (*AT_LEAST_ZERO, *BELOW_ONE, *POSITIVE_OR_NONE) and isinstance(value, (bool, str, complex)):
            raise TypeError(f"{name} must be a number or a function of the step, got {value!r}")
        if name in AT_LEAST_ZERO and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
        if name in BELOW_ONE and not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
        if name in POSITIVE_OR_NONE and value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, or None to leave it out, got {value!r}")
        if name == "update_every" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"update_every must be a positive integer, got {value!r}")
    if settings.get("step_rms") is not None and settings.get("kl_clip") is not None:
        raise ValueError(
            f"step_rms and kl_clip are two ways to choose a step's length: got {settings['step_rms']!r} and "
            f"{settings['kl_clip']!r}; give step_rms=None to use kl_clip"
        )


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


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
    backward: int = -1
    """The backward pass in which the statistics began."""
    cache: dict[str, Tensor] = field(default_factory=dict)
    """Products of the factors that change only with them."""

    def forget(self) -> None:
        self.statistics = None
        self.samples.clear()


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
        approx: Approximation,
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
        check_choice("approx", approx, ("expand", "reduce"))
        check_choice("grouped", grouped, ("each", "average"))
        self._fallback = fallback or chosen["fallback"]
        check_choice("fallback", self._fallback, rules.FALLBACKS)
        check_structure(structure)
        if max_dim is not None and (isinstance(max_dim, bool) or not isinstance(max_dim, int) or max_dim < 1):
            raise ValueError(f"max_dim must be a positive integer, or None for no limit, got {max_dim!r}")
        self._fixed = {k: chosen.pop(k) for k in list(chosen) if k not in SCHEDULABLE}
        self._model, self._structure, self._max_dim = model, structure, max_dim
        self._curvature, self._fisher, self._approx, self._average = curvature, fisher, approx, grouped == "average"
        self._fallback_lr = fallback_lr
        self._precondition_only, self._scaler = precondition_only, scaler
        self._observing = fisher == "empirical"
        self._tracked: dict[nn.Parameter, Tracked] = {}
        self._views: dict[nn.Module, tuple[Tracked, ModuleLayer]] = {}
        self._schedules: list[dict[str, Callable[[int], float]]] = []
        self._capture: Capture | None = None
        super().__init__(self._all_groups(model, list(groups), chosen), {**chosen, "role": "layer"})

    # ------------------------------------------------------------------ parameters
    def _all_groups(self, model: nn.Module, groups: list[Settings], chosen: Settings) -> list[Settings]:
        """The groups that were asked for, and one for all other parameters."""
        for group in groups:
            group["params"] = list(group["params"]) if not isinstance(group["params"], Tensor) else [group["params"]]
        named = {id(p) for group in groups for p in group["params"]}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in named]
        if not rest and not groups:
            raise ValueError("model has no trainable parameters; is requires_grad off for all of them?")
        for name, p in model.named_parameters():
            check_parameter(name, p)
        return [{"params": rest}, *groups] if rest else groups

    def add_param_group(self, param_group: Settings) -> None:
        """Add parameters of the model. Those of layers and others become two groups, each with its learning rate."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        settings = {**self.defaults, **{k: v for k, v in param_group.items() if k != "params"}}
        schedules = {k: v for k, v in settings.items() if k in SCHEDULABLE and callable(v)}
        settings |= {k: f(0) for k, f in schedules.items()}
        check_settings(settings)
        names = {id(p): name for name, p in self._model.named_parameters()}
        for p in params:
            if id(p) not in names:
                raise ValueError(f"params holds a parameter of shape {tuple(p.shape)} that is not in the model")
            check_parameter(names[id(p)], p)
        matrices = self._matrices_among(params)
        in_layers = {id(p) for m in matrices for p in m.layer.parameters} | {
            id(p) for t in self._tracked.values() for p in t.layer.parameters
        }
        layers = [p for p in params if id(p) in in_layers]
        others = [p for p in params if id(p) not in in_layers]
        counters = {"step": 0, "next_update": 0}
        if layers:
            super().add_param_group({"params": layers, **settings, **counters, "role": "layer"})
            self._schedules.append(schedules)
        if others:
            own = {"betas": (settings["momentum"], 0.99), "eps": 1e-8}
            lr = param_group.get("fallback_lr", self._fallback_lr)
            if callable(lr):
                schedules = {**schedules, "lr": lr}
            lr = settings["lr"] if lr is None else lr(0) if callable(lr) else lr
            check_settings({"fallback_lr": lr})
            super().add_param_group({"params": others, **settings, **own, **counters, "lr": lr, "role": "fallback"})
            self._schedules.append(schedules)
        for matrix in matrices:
            self._track(matrix)
        self._watch()

    def _matrices_among(self, params: list[nn.Parameter]) -> list[Matrix]:
        """The matrices whose weights are in ``params`` and not tracked yet."""
        wanted = {id(p) for p in params}
        found = find_matrices(self._model, bare=self._curvature == "gradient", average=self._average)
        return [m for m in found if id(m.layer.weight) in wanted and m.layer.weight not in self._tracked]

    def _track(self, matrix: Matrix) -> None:
        layer = matrix.layer
        left, right = groups_for(self._structure, matrix.name, layer.p, layer.d, self._max_dim)
        left = Diagonal(layer.p) if layer.one_hot else left
        views = [] if self._curvature == "gradient" else matrix.views
        tracked = Tracked(len(self._tracked), matrix.name, layer, views, KroneckerFactors(left, right))
        self._tracked[layer.weight] = tracked
        self._views |= {view.module: (tracked, view) for view in views}

    def _watch(self) -> None:
        """Hooks on all modules that describe a matrix."""
        self.close()
        if self._views:
            self._capture = Capture(self._model, list(self._views), self._receive)
            self._set_active()

    def _set_active(self) -> None:
        if self._capture is not None:
            self._capture.active = any(is_due(group) for group in self.param_groups if group["role"] == "layer")

    def close(self) -> None:
        """Remove the hooks from the model. Factors stay as they are from then on."""
        if self._capture is not None:
            self._capture.close()
            self._capture = None

    def _group_of(self) -> dict[nn.Parameter, Settings]:
        return {p: group for group in self.param_groups for p in group["params"]}

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

    # ------------------------------------------------------------------ statistics
    def _receive(self, module: nn.Module, x: Tensor, g: Tensor, number: int) -> None:
        """A batch of inputs and output gradients of a layer, before a step that updates."""
        tracked, view = self._views[module]
        weight = view.weight
        if not (self._observing and weight.requires_grad):
            return
        if g.numel() == 0:  # a batch of none
            self._count("skipped_updates", torch.ones((), dtype=torch.bool, device=g.device))
            return
        task = torch._C._current_graph_task_id()
        if weight.grad is None and tracked.backward != task and self._fisher == "empirical":
            tracked.forget()  # the gradients were dropped without zero_grad(): so is what came with them
        tracked.backward = task
        dtype = self._computing_dtype(tracked)
        samples, before = view.samples(x), tracked.samples.get(number, 0)
        tracked.samples[number] = max(samples, before)
        if self._fixed["subsample"] and (stride := view.stride(x, g)) > 1:
            # The squares of a part, counted as often as makes up for the others.
            x, g = x[::stride], g[::stride] * math.sqrt(samples / len(g[::stride]))
        if self._scaler is not None:
            g = g / self._scaler._get_scale_async()  # type: ignore[operator]  # set, as a scaled loss came back
        with full_precision(weight):
            x_rows, g_rows = view.rows(x if view.one_hot else x.to(dtype), g.to(dtype), self._approx)
            part = self._statistics(tracked, x_rows, g_rows, terms=max(samples - before, 0))
        tracked.statistics = part if tracked.statistics is None else tracked.statistics + part

    def _share_statistics(self, due: list[Tracked]) -> None:
        """Under ``DistributedDataParallel`` the statistics are means over the ranks, as its gradients are."""
        if not isinstance(self._model, nn.parallel.DistributedDataParallel):
            return
        world = self._model.process_group.size()
        for tracked in due:
            if tracked.statistics is not None:
                flat = torch.cat([part.flatten() for part in tracked.statistics.tensors()])
                torch.distributed.all_reduce(flat, group=self._model.process_group)
                parts = (flat / world).split([part.numel() for part in tracked.statistics.tensors()])
                for part, mean in zip(tracked.statistics.tensors(), parts, strict=True):
                    part.copy_(mean.view_as(part))

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

        If an entry of a gradient is not finite nothing changes but the count, ``skipped_steps``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_schedules()
        gradients = self._checked_gradients()
        if gradients:
            with full_precision(gradients[0]):
                self._step(rules.all_finite(gradients))
        for tracked in self._tracked.values():
            tracked.forget()
        self._set_active()
        return loss

    def _step(self, ok: Tensor) -> None:
        self._count("skipped_steps", ~ok)
        group_of = self._group_of()
        moving = [(t, group_of[w]) for w, t in self._tracked.items() if w in group_of and w.grad is not None]
        self._share_statistics([tracked for tracked, group in moving if is_due(group)])
        for tracked, group in moving:
            self._adapt(tracked)
            if is_due(group) and (tracked.statistics is not None or not tracked.views):
                self._update(tracked, group, ok)
        if self._precondition_only:
            self._replace_gradients(moving, group_of, ok)
        else:
            self._move(moving, group_of, ok)
            for group in self.param_groups:
                if group["role"] == "fallback":
                    for p in group["params"]:
                        self._fall_back(p, group, ok)
        for group in self.param_groups:
            if is_due(group):
                grown = 1 + group["step"] // GROWTH if self._fixed["growing_intervals"] else group["update_every"]
                group["next_update"] = group["step"] + min(group["update_every"], grown)
            group["step"] += 1

    def _follow_schedules(self) -> None:
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            new = {name: schedule(group["step"]) for name, schedule in schedules.items()}
            check_settings(new)
            group.update(new)

    def _checked_gradients(self) -> list[Tensor]:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            name = next(n for n, p in self._model.named_parameters() if p.grad is not None and p.grad.is_sparse)
            raise RuntimeError(f"the gradient of {name} is sparse; build its embedding with sparse=False")
        if gradients and self._fisher == "mc" and self._capture is not None and self._capture.active:
            watched = [t for t in self._tracked.values() if t.views and t.layer.weight.grad is not None]
            if watched and all(t.statistics is None for t in watched):
                raise RuntimeError("fisher='mc' needs observe(output) before each backward pass; there was none")
        return gradients

    @property
    def _counts(self) -> dict[str, Tensor]:
        """Counters on the device; torch saves keys of the state that are no parameters as they are."""
        state: dict[Any, dict[str, Tensor]] = self.state
        return state.setdefault("counts", {})

    def _count(self, name: str, happened: Tensor) -> None:
        old = self._counts.get(name)
        self._counts[name] = happened.long() if old is None else old.to(happened.device) + happened

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because a gradient was not finite."""
        return int(self._counts.get("skipped_steps", 0))

    @property
    def skipped_updates(self) -> int:
        """Updates of a layer's factors that were not made, because its curvature was not finite or its batch empty."""
        return int(self._counts.get("skipped_updates", 0))

    def _fall_back(self, p: nn.Parameter, group: Settings, ok: Tensor) -> None:
        if p.grad is not None:
            _to_like(self.state[p], p)
            rules.FALLBACKS[self._fallback](p, self.state[p], rules.cleaned(p.grad, ok), group, ok)

    # ------------------------------------------------------------------ how layers move
    def _gradient(self, tracked: Tracked, ok: Tensor) -> Tensor:
        """The gradient of a matrix; a bias that is frozen has none."""
        layer = tracked.layer
        parts = [torch.zeros_like(p) if p.grad is None else rules.cleaned(p.grad, ok) for p in layer.parameters]
        return layer.matrix(*parts)

    def _move(self, moving: list[tuple[Tracked, Settings]], group_of: dict[Any, Settings], ok: Tensor) -> None:
        clipped = []
        for tracked, group in moving:
            if group["step_rms"] is None:
                gradient = self._gradient(tracked, ok)
                clipped.append((tracked, group, gradient, self._natural(tracked, gradient)))
            else:
                self._move_by_rms(tracked, group, group_of, ok)
        scale = _kl_scale(clipped)
        for tracked, _, _, natural in clipped:
            for p, direction in zip(tracked.layer.parameters, tracked.layer.tensors(natural), strict=True):
                if p.grad is not None:
                    direction = direction if scale is None else direction * scale.to(direction)
                    rules.heavy_ball(p, self.state[p], direction, group_of[p], ok)

    def _move_by_rms(self, tracked: Tracked, group: Settings, group_of: dict[Any, Settings], ok: Tensor) -> None:
        """``W <- (1 - lr weight_decay) W - lr D``, D along the preconditioned average, its root mean square given."""
        layer = tracked.layer
        parts = [
            torch.zeros_like(p)
            if p.grad is None
            else rules.averaged(self.state[p], rules.cleaned(p.grad, ok), group["momentum"], ok)
            for p in layer.parameters
        ]
        natural = self._precondition(tracked, layer.matrix(*parts))
        scale = _rms_scale(natural, group["step_rms"])
        ok = ok & (scale > 0)
        for p, direction in zip(layer.parameters, layer.tensors(natural), strict=True):
            if p.grad is not None:
                own = group_of[p]
                rules.decay(p, own["lr"] * own["weight_decay"], ok)
                p.sub_((rules.cleaned(direction, ok) * rules.share(own["lr"] * scale, ok, direction)).to(p.dtype))

    def _replace_gradients(
        self, moving: list[tuple[Tracked, Settings]], group_of: dict[Any, Settings], ok: Tensor
    ) -> None:
        """Each gradient becomes the direction that a step would follow; where it is not finite it stays."""
        directions = []
        for tracked, group in moving:
            gradient = self._gradient(tracked, ok)
            if group["step_rms"] is None:
                directions.append((tracked, group, gradient, self._natural(tracked, gradient)))
            else:
                natural = self._precondition(tracked, gradient)
                directions.append((tracked, group, gradient, natural * _rms_scale(natural, group["step_rms"])))
        scale = _kl_scale([d for d in directions if d[1]["kl_clip"] is not None])
        for tracked, group, _, natural in directions:
            clipped = natural if scale is None or group["kl_clip"] is None else natural * scale.to(natural)
            for p, direction in zip(tracked.layer.parameters, tracked.layer.tensors(clipped), strict=True):
                if p.grad is not None:
                    p.grad.copy_(torch.where(ok.to(p.device), direction.to(p.grad.dtype), p.grad))

    @abstractmethod
    def _natural(self, tracked: Tracked, gradient: Tensor) -> Tensor:
        """The natural direction in its own units, with the curvature's level."""

    # ------------------------------------------------------------------ state
    def _adapt(self, tracked: Tracked) -> None:
        """State follows its parameters to another device or type."""
        for p in tracked.layer.parameters:
            _to_like(self.state[p], p, but=self._factor_shapes(tracked))
        state, dtype = self.state[tracked.layer.weight], self._stored_dtype(tracked)
        for key in self._factor_shapes(tracked):
            if key in state and (state[key].device, state[key].dtype) != (tracked.layer.weight.device, dtype):
                state[key] = state[key].to(tracked.layer.weight.device, dtype)
                tracked.cache.clear()

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
        theirs = [[len(g["params"]), g.get("role")] for g in state_dict["param_groups"]]
        ours = [[len(g["params"]), g["role"]] for g in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f"the state is of another model or other groups: it has groups of {theirs} parameters, this has {ours}"
            )
        names = {id(p): name for name, p in self._model.named_parameters()}
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            expected = {k: tuple(p.shape) for k in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
            if p in self._tracked:
                expected |= self._factor_shapes(self._tracked[p])
            for key, value in state_dict["state"].get(number, {}).items():
                if key in expected and tuple(value.shape) != expected[key]:
                    raise ValueError(
                        f"the state is of another model or structure: {key} of {names[id(p)]} has shape "
                        f"{tuple(value.shape)}, this optimizer needs {expected[key]}"
                    )

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
                    copies = 2 if self._fallback == "adamw" else 1
                    treated = "left alone" if self._precondition_only else self._fallback
                    bytes_ = 0 if self._precondition_only else copies * p.numel() * p.element_size()
                    yield Row(names[id(p)], tuple(p.shape), treated, bytes=bytes_, step=p.numel())
                    shown.add(id(p))
        for name, p in self._model.named_parameters():
            if id(p) not in shown:
                yield Row(name, tuple(p.shape), "frozen" if not p.requires_grad else "in no group")

    @abstractmethod
    def _layer_row(self, tracked: Tracked, name: str) -> Row:
        """A line of the summary."""


SCHEDULABLE = (*AT_LEAST_ZERO, *BELOW_ONE, "step_rms", "kl_clip", "update_every")
"""Settings that may be functions of the step and differ between parameter groups."""


def is_due(group: Settings) -> bool:
    """Whether the coming step updates the factors."""
    return bool(group["step"] >= group["next_update"])


def check_parameter(name: str, p: Tensor) -> None:
    if nn.parameter.is_lazy(p):
        raise ValueError(f"{name} has no shape yet; run a batch through the model before building the optimizer")
    if p.requires_grad and not p.is_floating_point():
        raise TypeError(f"{name} is of type {p.dtype}; keep its real and imaginary parts as two real parameters")


def _rms_scale(direction: Tensor, rms: float) -> Tensor:
    """What makes the root mean square of a direction ``rms``: zero or NaN where the direction is not finite."""
    own = torch.linalg.vector_norm(direction) / math.sqrt(direction.numel())
    return rms / own.clamp(min=1e-30)  # zero stays zero


def _kl_scale(moves: list[tuple[Tracked, Settings, Tensor, Tensor]]) -> Tensor | None:
    """``min(1, sqrt(kl_clip / (lr^2 sum <G, D>)))``: what keeps the predicted change below ``kl_clip``."""
    limited = [(group, g, n) for _, group, g, n in moves if group["kl_clip"] is not None]
    if not limited:
        return None
    device = limited[0][1].device
    parts = [(group["lr"] ** 2 / group["kl_clip"] * (g * n).sum()).to(device) for group, g, n in limited]
    return torch.stack(parts).sum().clamp(min=1).rsqrt()


def _to_like(state: Settings, p: Tensor, but: Iterable[str] = ()) -> None:
    """Buffers of a parameter in its own type and place."""
    for key, value in state.items():
        moment = isinstance(value, Tensor) and key not in but and value.shape == p.shape
        if moment and (value.dtype, value.device) != (p.dtype, p.device):
            state[key] = value.to(p)
