"""What optimizers with a preconditioner for each layer share: which parameters, when, from what, and how they move."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..groups import Diagonal, Group
from ..manifolds import full_precision
from . import rules
from .capture import Capture
from .factors import KroneckerFactors
from .keeping import Keeping, follow
from .layers import Approximation, ModuleLayer
from .matrices import Matrix, find_matrices
from .moves import Move, Peaks, Tracked, alike
from .ranks import local
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
from .sharing import MODES, Mode, Sharing
from .shortcut import Shortcut
from .stepping import gradient_of
from .structures import Structure, check_structure, groups_for, unmatched
from .summary import Row, Summary

TORCH_OWN = ("_optimizer_", "_zero_grad", "_patch", "_hook")
"""How names begin that torch's optimizers set on themselves and make again after a copy."""
WRAPPERS = ("_orig_mod.", "module.")
"""What ``torch.compile`` and ``DistributedDataParallel`` put before the names of a model."""


PATIENCE = 10
"""After so many updates of a layer in a row that were not made, somebody should know."""


class SkippedUpdates:
    """Counts the updates in a row that layers have missed, and warns once for each layer that misses many.

    The counts stay on the device; the host reads those of an earlier update, so that it does not wait.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], Tensor] = {}
        self._read: dict[tuple[str, ...], Tensor] = {}
        self._named: set[str] = set()

    def count(self, layers: tuple[str, ...], skipped: Tensor) -> None:
        """Add one for each layer whose update was skipped; begin again at zero for the others."""
        self._warn(layers)
        counts = skipped * (self._counts[layers].to(skipped.device) + 1 if layers in self._counts else 1)
        if layers not in self._read:
            self._read[layers] = torch.zeros(len(layers), dtype=torch.long, pin_memory=counts.device.type == "cuda")
        self._counts[layers] = counts
        self._read[layers].copy_(counts, non_blocking=True)

    def _warn(self, layers: tuple[str, ...]) -> None:
        if layers not in self._read:
            return
        for name, missed in zip(layers, self._read[layers].tolist(), strict=True):
            if missed >= PATIENCE and name not in self._named:
                self._named.add(name)
                warnings.warn(
                    f"the factors of layer {name!r} have missed {missed} updates in a row, because the curvature of "
                    "its batches was not finite; look for inputs or output gradients that are infinite or NaN",
                    stacklevel=2,
                )


class LayerwiseOptimizer(Keeping):
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
        shard: Mode = "none",
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
        check_choice("shard", shard, MODES)
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
        self._shortcut, self._skips = Shortcut(), SkippedUpdates()
        self._shard, self._sharing = shard, Sharing(model, shard)
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
        unknown = [p for p in params if p in self._matrices and p not in self._tracked]
        new = [self._new_tracked(self._matrices[p], settings, schedules) for p in unknown]
        to_come = [m.layer for weight, m in self._matrices.items() if weight not in self._tracked]
        here = [tracked.layer for tracked in self._tracked.values()]
        members = {id(p) for layer in (*to_come, *here) for p in layer.parameters}
        counters = {"step": 0, "next_update": 0, "interval": 1}
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

    def _new_tracked(self, matrix: Matrix, settings: Settings, schedules: Collection[str]) -> Tracked:
        layer, name = matrix.layer, self._plain(matrix.name)
        left, right = groups_for(self._structure, name, layer.p, layer.d, self._max_dim)
        if layer.one_hot and not isinstance(left, Diagonal):
            left = Diagonal(layer.p)
        left, right = (self._form(group, layer.weight.dtype, settings, schedules) for group in (left, right))
        views = [] if self._curvature == "gradient" else matrix.views
        return Tracked(len(self._tracked), name, layer, views, KroneckerFactors(left, right))

    def _track(self, tracked: Tracked) -> None:
        tracked.index = len(self._tracked)
        equal = (other.factors for other in self._tracked.values() if other.factors == tracked.factors)
        tracked.factors = next(equal, tracked.factors)
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
        self._capture = Capture(self._model, list(self._views), self._wants, self._receive) if self._views else None
        self._find_due()
        self._arrange()

    def _find_due(self) -> None:
        due = [group for group in self.param_groups if group["role"] == "layer" and is_due(group)]
        self._due = {p for group in due for p in group["params"]}

    def close(self) -> None:
        """Remove the hooks from the model. Factors stay as they are from then on."""
        self._closed = True
        if self._capture is not None:
            self._capture.close()
            self._capture = None

    def __getstate__(self) -> Settings:
        """Copies and pickles have what torch keeps and what is here; the hooks are set anew."""
        own = {k: v for k, v in self.__dict__.items() if k.startswith("_") and not k.startswith(TORCH_OWN)}
        return {**super().__getstate__(), **own, "_capture": None, "_sharing": None}

    def __setstate__(self, state: Settings) -> None:
        super().__setstate__(state)
        if state.get("_sharing", self) is None:
            self._sharing = Sharing(self._model, self._shard)
        self._watch()

    # ------------------------------------------------------------------ ranks
    def _arrange(self) -> None:
        """Say which rank updates which layer, where they are several."""
        self._sharing.arrange([*self._tracked.values()], self._cost, self._computing_dtype)
        for tracked in self._tracked.values():
            self._drop_what_others_keep(tracked)

    def _cost(self, tracked: Tracked, shard: Mode | None = None) -> float:
        """What is balanced over ranks: memory where layers are stored by one each, else the work of an update."""
        row = self._layer_row(tracked, tracked.name)
        return row.bytes if (shard or self._shard) == "full" else row.update

    def _kept_by_all(self, tracked: Tracked, shard: Mode | None = None) -> list[str]:
        """What of a layer's factors is kept, and asked for, by ranks that do not update them."""
        return []

    def _drop_what_others_keep(self, tracked: Tracked) -> None:
        if self._sharing.is_mine(tracked):
            return
        kept = {*self._kept_by_all(tracked), *([] if self._sharing.moves_apart else ["momentum_buffer"])}
        for p in tracked.layer.parameters:
            if p in self.state:
                self.state[p] = {key: value for key, value in self.state[p].items() if key in kept}
        tracked.cache.clear()

    def _tell_factors(self, due: list[Move]) -> None:
        """What others need of factors that have moved goes from their owners to all ranks."""
        sharing = self._sharing
        owned: dict[int, list[Tensor]] = {rank: [] for rank in range(sharing.ranks.count)}
        there: list[tuple[Tracked, str, Tensor]] = []
        for tracked in (move.tracked for move in due):
            self._started([tracked])
            for key in self._kept_by_all(tracked):
                sent = self._packed(tracked, key)
                owned[sharing.owner(tracked)].append(sent)
                there.append((tracked, key, sent))
        sharing.ranks.share_out(owned, "factors")
        for tracked, key, sent in there:
            if not sharing.is_mine(tracked):
                self._unpack(tracked, key, sent)
                tracked.cache.clear()

    # ------------------------------------------------------------------ what the subclasses add
    def _form(self, group: Group, dtype: torch.dtype, settings: Settings, schedules: Collection[str]) -> Group:
        """A structure in the form in which it is kept; the settings are those at the first step, with schedules."""
        return group

    @abstractmethod
    def _update(self, stack: list[Tracked], group: Settings, ok: Tensor) -> Tensor:
        """The factors of layers of one kind follow the curvature; where ``ok`` is False they stay.

        Gives whether each layer's new factors are finite; where they are not the old ones stay too.
        """

    @abstractmethod
    def _started(self, stack: list[Tracked]) -> None:
        """See that the factors of layers have a state."""

    def _packed(self, tracked: Tracked, key: str) -> Tensor:
        """A part of the state as it is sent."""
        return self._as_sent(key, self.state[tracked.layer.weight][key])

    def _as_sent(self, key: str, value: Tensor) -> Tensor:
        return value

    def _unpack(self, tracked: Tracked, key: str, sent: Tensor) -> None:
        self.state[tracked.layer.weight][key] = sent

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
            tracked.expected = 0
        self._find_due()
        return loss

    def _step(self, parameters: list[nn.Parameter]) -> None:
        magnitudes = rules.peaks([local(gradient_of(p)) for p in parameters])
        if self._sharing.ranks.is_sharded:
            magnitudes = self._sharing.ranks.maximum(magnitudes)
        ok = magnitudes.amax() < math.inf
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        largest = Peaks(magnitudes, {p: place for place, p in enumerate(parameters)})
        moving = [
            Move(tracked, group_of[w], {p: group_of[p] for p in tracked.layer.parameters if p in largest.place})
            for w, tracked in self._tracked.items()
            if w in largest.place
        ]
        right = self._shortcut.verified([move.tracked for move in moving], self.param_groups[0])
        ok = ok if right is None else ok & right.to(ok.device)
        self._share_statistics()
        for move in moving:
            self._adapt(move.tracked)
        due = [move for move in moving if is_due(move.group)]
        self._make_whole([move for move in due if not move.tracked.views or move.tracked.backward is None])
        self._update_all(due, ok)
        ok = self._move(moving, largest, ok)
        if not self._precondition_only:
            self._fall_back([p for p in parameters if group_of[p]["role"] == "fallback"], group_of, ok)
        self._count("skipped_steps", ~ok)
        for group in self.param_groups:
            group["step"] += 1

    def _update_all(self, due: list[Move], ok: Tensor) -> None:
        """Update factors, and say when it is time again."""

        def kind(move: Move) -> tuple[Any, ...]:
            s = move.tracked.statistics
            return move.tracked.kind, id(move.group), None if s is None else s.kind

        mine = [move for move in due if self._sharing.is_mine(move.tracked) and self._has_curvature(move.tracked)]
        before = self.param_groups[0].get("skipped_updates", 0)
        for stack in alike(mine, kind):
            layers = [move.tracked for move in stack]
            finite = self._update(layers, stack[0].group, ok)
            self._skips.count(tuple(tracked.name for tracked in layers), ok.to(finite.device) & ~finite)
        if self._sharing.has_owners:
            self._tell_factors(due)
            self._agree_on_skips(before, ok)
        for group in self.param_groups:
            if is_due(group):
                grown = 1 + group["step"] // GROWTH if self._fixed["growing_intervals"] else group["update_every"]
                group["interval"] = min(group["update_every"], grown)
                group["next_update"] = group["step"] + group["interval"]

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
        if parameters and self._fisher == "mc" and self._capture is not None and self._due:
            watched = [t for t in self._tracked.values() if t.views and t.layer.weight.grad is not None]
            exchange = self._sharing.exchange
            unseen = all(t.statistics is None for t in watched) and (exchange is None or exchange.is_empty)
            if watched and unseen:
                raise RuntimeError("fisher='mc' needs observe(output) before each backward pass; there was none")
        return parameters

    def _count(self, name: str, happened: Tensor) -> None:
        first = self.param_groups[0]  # which torch saves and loads
        first[name] = first[name].to(happened.device) + happened if name in first else happened.long()

    def _agree_on_skips(self, before: Tensor | int, like: Tensor) -> None:
        """All ranks count the updates that their owners did not make."""
        skipped = torch.as_tensor(self.param_groups[0].get("skipped_updates", 0) - before, device=like.device)
        self.param_groups[0]["skipped_updates"] = self._sharing.ranks.sum(skipped.long()) + before

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because a gradient, or its natural direction, was not finite."""
        return int(self.param_groups[0].get("skipped_steps", 0))

    @property
    def skipped_updates(self) -> int:
        """Updates of a layer's factors that were not made, because its curvature was not finite or its batch empty."""
        return int(self.param_groups[0].get("skipped_updates", 0))

    def _fall_back(self, parameters: list[nn.Parameter], group_of: dict[nn.Parameter, Settings], ok: Tensor) -> None:
        for same in alike(parameters, lambda p: (id(group_of[p]), p.dtype, p.device)):
            for p in same:
                follow(self.state[p], p)
            here = ok.to(same[0].device)
            gradients = [torch.where(here, local(gradient_of(p)), 0) for p in same]
            gates = here.to(same[0].dtype).expand(len(same))
            rule = rules.FALLBACKS[self._fallback]
            rule(list(same), [self.state[p] for p in same], gradients, group_of[same[0]], gates)

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
