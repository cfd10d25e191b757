"""INGD: inverse-free natural-gradient descent for neural networks (Fig. matDL_opt)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..groups import Dense, Element, Group, Toeplitz, symmetric
from ..groups.base import align
from . import forms
from .compiling import can_compile, compiled
from .costs import costs, square_size
from .factors import KroneckerFactors, joined
from .layers import Approximation
from .layerwise import LayerwiseOptimizer
from .moves import Tracked, cat, parted
from .renewal import Rule, renewed
from .rounding import HALF, promoted, rounded
from .settings import PRESETS, Scalar, Settings, check_choice
from .sharing import Mode
from .square import Square
from .structures import Structure
from .summary import Row


def published_precond_lr(step: int) -> float:
    """The paper's warm-up of b1: 0.0002 for 100 iterations, 0.002 up to 500, then 0.01."""
    return 0.0002 if step < 100 else 0.002 if step < 500 else 0.01


def early_average(step: int) -> float:
    """The default b1: 1/2, 1/3, 1/4 and 1/5 from then on, so that the first updates are plain averages."""
    return max(0.2, 1 / (step + 2))


class INGD(LayerwiseOptimizer):
    """Second-order steps for every layer of a model, by matrix multiplications alone (Fig. matDL_opt).

    With ``mu_AA`` the second moment of a layer's inputs and ``mu_GG`` that of its per-sample output gradients,
    ``H_K = K^T mu_AA K`` and ``H_C = C^T mu_GG C``, the factors follow the curvature by::

        m_K <- a1 m_K + b1/(2d) ( tr(H_C) H_K + damping tr(C^T C) K^T K - d I )        K <- K Exp(-m_K)
        m_C <- a1 m_C + b1/(2p) ( tr(H_K) H_C + damping tr(K^T K) C^T C - p I )        C <- C Exp(-m_C)

    with ``a1 = precond_momentum`` and ``b1 = precond_lr``, and a step goes along ``D = C C^T G K K^T`` for the weight
    with its bias as a last column. By default, the average B of the directions (Nesterov's) is scaled to
    a root mean square of ``step_rms`` in each layer, as AdamW's steps nearly are::

        B <- momentum B + (1 - momentum) D        W <- (1 - lr weight_decay) W - lr step_rms B / rms(B)

    Beside that the defaults differ from the figure in what keeps it stable: curvature and damping are relative to the
    mean of the layer's curvature, so that the identity is a matched start and the scale of inputs and loss does not
    matter; an update of a factor is bounded in norm; the exponential is kept to second order; factors are updated at
    each step at first, then at intervals that grow up to ``update_every``. ``preset="paper"`` is the figure
    as it stands: absolute curvature, ``K <- K (I - m_K)``, the published schedule of b1,
    ``M <- momentum M + D + weight_decay W``, ``W <- W - lr M``, and SGD for other parameters.

    Args:
        model: the model; all its trainable parameters are trained. Linear, convolution, transposed convolution,
            embedding and attention layers get factors, other parameters follow ``fallback``.
        lr: learning rate; with ``step_rms`` in AdamW's units.
        momentum: weight of the past in the average of directions.
        weight_decay: decoupled with ``step_rms``, otherwise added to the direction.
        damping: added to the curvature, relative to its mean (absolute in the paper's preset).
        precond_lr: b1, how fast the factors follow.
        precond_momentum: a1. By default there is none: b1 is so large that it has little to add, and a dense factor
            costs half as much without it.
        update_every: steps between updates of the factors, T in the paper.
        structure: of K and C: ``"dense"``, ``"triangular"``, ``"diagonal"``, ``"block"``, ``"arrow"``,
            ``"heisenberg"``, ``"toeplitz"`` or ``"identity"``, a function from the size to a group, a pair of those
            for (K, C), or a mapping from patterns of layer names (``"encoder.*"``) to any of these.
        curvature: ``"kfac"`` takes inputs and output gradients of layers by hooks; ``"gradient"`` takes the gradient
            matrix alone, for any parameter of two or more dimensions.
        fisher: ``"empirical"`` takes the gradients of the loss; ``"mc"`` those of targets drawn from the model's
            predictions, see :meth:`observe`.
        approx: where a weight is applied at several positions of a sample: ``"expand"`` counts each, ``"reduce"``
            takes means of inputs and sums of gradients; ``"auto"`` reduces convolutions, whose positions are pooled
            before the loss as a rule, and expands sequences.
        grouped: factors for each group of a convolution (``"each"``), or the paper's ``"average"`` over them.
        step_rms: root mean square of a layer's step at ``lr = 1``; None for steps as long as they are.
        kl_clip: the alternative to ``step_rms``: a bound on ``lr^2 <G, D>``, over all layers.
        max_factor_step: bound on the spectral norm of what an update adds to ``m_K`` and ``m_C``; ``math.inf`` for
            none.
        order: of the exponential, 1 or 2. With 2 a dense factor without momentum is kept as ``K K^T``, where its
            condition is bounded by the size and the damping (see ``forms.keep_square``), and moves as
            :class:`~gnomon.optim.square.Square` says; elsewhere K moves by ``I - m_K + 0.3 m_K^2``.
        relative: whether curvature and damping are relative to the curvature's mean, that of the batch with
            ``curvature="kfac"`` and a running one with ``"gradient"``.
        growing_intervals: whether updates are more frequent at first.
        subsample: whether statistics may come from one sample in two to four, where there are many more rows than
            the factors are large, and those of convolutions by positions from every second one along each axis.
        convention: ``"outside"`` keeps b1 out of the momentum, ``m <- a1 m + (...)``, ``K <- K Exp(-b1 m)``, which
            differs where b1 changes.
        precond_dtype: type of the factors; half precision is rounded at random, seeded by ``seed``. None is that of
            the weight, and float32 at least.
        memory: ``"low"`` stores symmetric matrices to one half, no products between updates and, on CPUs, no room for
            directions between steps: less state, more work.
        compile: whether ``torch.compile`` makes one function of each layer's move, the part of a step that comes after
            its direction, and of updates of sparse factors, after up to half a minute for each shape at first. Moves
            then take about half of the time and updates a third. Moves in half precision and of shards, and updates of
            other factors, are as without it.
        max_dim: a factor of a larger size is diagonal.
        fallback: how other parameters are trained, ``"adamw"`` or ``"sgd"``.
        fallback_lr: their learning rate, that of the layers unless given.
        groups: dictionaries with ``params`` and settings for them, as in torch; all other parameters are a group too.
        precondition_only: ``step()`` replaces each gradient by its direction and moves nothing: for use before the
            ``step()`` of another optimizer.
        scaler: the ``GradScaler`` of the training loop, if there is one, so that curvature has the loss's own units.
            Without it ``step_rms`` works all the same, while ``kl_clip`` and the paper's preset do not.
        shard: on several ranks, whether each updates all factors (``"none"``), a layer's are updated by one rank, which
            sends them to the others (``"update"``), or stored by it alone, which sends directions (``"full"``).
        preset: ``"robust"`` or ``"paper"``: what arguments that are not given mean.
        seed: of random rounding.

    Numbers may be functions of the step: ``lr=lambda step: ...``. A gradient that is not finite skips the step, and
    curvature that is not finite the update; ``skipped_steps`` and ``skipped_updates`` count them.
    """

    presets: ClassVar[dict[str, Settings]] = {
        "robust": {
            **PRESETS["robust"],
            "precond_lr": early_average,
            "precond_momentum": 0.0,
            "max_factor_step": 0.5,
            "order": 2,
        },
        "paper": {
            **PRESETS["paper"],
            "precond_lr": published_precond_lr,
            "precond_momentum": 0.5,
            "max_factor_step": math.inf,
            "order": 1,
        },
    }

    def __init__(
        self,
        model: nn.Module,
        lr: Scalar | None = None,
        *,
        momentum: Scalar | None = None,
        weight_decay: Scalar | None = None,
        damping: Scalar | None = None,
        precond_lr: Scalar | None = None,
        precond_momentum: Scalar | None = None,
        update_every: int | None = None,
        structure: Structure = "dense",
        curvature: Literal["kfac", "gradient"] = "kfac",
        fisher: Literal["empirical", "mc"] = "empirical",
        approx: Approximation | Literal["auto"] | None = None,
        grouped: Literal["each", "average"] = "each",
        step_rms: Scalar | Literal["preset"] | None = "preset",
        kl_clip: Scalar | None = None,
        max_factor_step: float | None = None,
        order: Literal[1, 2] | None = None,
        relative: bool | None = None,
        growing_intervals: bool | None = None,
        subsample: bool | None = None,
        convention: Literal["inside", "outside"] = "inside",
        precond_dtype: torch.dtype | None = None,
        memory: Literal["default", "low"] = "default",
        compile: bool = False,
        max_dim: int | None = 8192,
        fallback: Literal["adamw", "sgd"] | None = None,
        fallback_lr: Scalar | None = None,
        groups: Iterable[Settings] = (),
        precondition_only: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        shard: Mode = "none",
        preset: Literal["robust", "paper"] = "robust",
        seed: int = 0,
    ) -> None:
        check_choice("convention", convention, ("inside", "outside"))
        check_choice("memory", memory, ("default", "low"))
        if order not in (None, 1, 2) or isinstance(order, bool):
            raise ValueError(f"order must be 1 or 2, got {order!r}")
        if not isinstance(compile, bool):
            raise TypeError(f"compile must be True or False, got {compile!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        if max_factor_step is not None and not (isinstance(max_factor_step, (int, float)) and max_factor_step > 0):
            raise ValueError(f"max_factor_step must be positive, math.inf for no bound, got {max_factor_step!r}")
        if precond_dtype not in (None, torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"precond_dtype must be torch.float64, float32, bfloat16 or float16, got {precond_dtype}")
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
            "precond_lr": precond_lr,
            "precond_momentum": precond_momentum,
            "update_every": update_every,
            "step_rms": step_rms,
            "kl_clip": kl_clip,
            "max_factor_step": max_factor_step,
            "order": order,
            "relative": relative,
            "growing_intervals": growing_intervals,
            "subsample": subsample,
        }
        self._convention, self._seed, self._factor_type = convention, seed, precond_dtype
        self._is_frugal, self._compile = memory == "low", compile
        super().__init__(
            model,
            settings,
            preset=preset,
            structure=structure,
            curvature=curvature,
            fisher=fisher,
            approx=approx,
            grouped=grouped,
            fallback=fallback,
            fallback_lr=fallback_lr,
            max_dim=max_dim,
            groups=groups,
            precondition_only=precondition_only,
            scaler=scaler,
            shard=shard,
        )

    # ------------------------------------------------------------------ factors
    def _form(self, group: Group, dtype: torch.dtype, settings: Settings, schedules: Collection[str]) -> Group:
        """A dense factor by its square, where it has no momentum, its condition is bounded and its type can hold it.

        That is not half precision, since entries that are rounded at random would not be symmetric.
        """
        fixed, changing = self._fixed, {"damping", "precond_momentum"} & set(schedules)
        bounded = fixed["relative"] and fixed["order"] == 2 and fixed["max_factor_step"] <= 1 and not changing
        without_momentum = self._convention == "inside" and not settings["precond_momentum"]
        computed = torch.promote_types(dtype, torch.float32)
        used = (computed, self._factor_type or computed)
        if type(group) is not Dense or not (bounded and without_momentum) or any(kind in HALF for kind in used):
            return group
        safe = forms.keep_square(group.k, settings["damping"], max(torch.finfo(kind).eps for kind in used))
        return Square(group.k, packed=self._is_frugal) if safe else group

    def _stored_dtype(self, tracked: Tracked) -> torch.dtype:
        return self._factor_type or self._computing_dtype(tracked)

    def _has_momentum(self, structure: Group) -> bool:
        return not isinstance(structure, Square) and any(
            group["precond_momentum"] or "precond_momentum" in schedules
            for group, schedules in zip(self.param_groups, self._schedules, strict=True)
        )

    def _factor_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        return {key: shape for key, shape in self._owned_shapes(tracked).items() if self._is_kept(tracked, key)}

    def _owned_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        """Those at the rank that updates the factors; the same at every rank, whichever it is."""
        blocks, sides = (tracked.layer.blocks,), (("K", tracked.factors.left), ("C", tracked.factors.right))
        shapes = {_key(name, group): blocks + group.storage_shape for name, group in sides}
        for name, group in sides:
            if self._has_momentum(group):
                shapes[f"m_{name}"] = blocks + group.compressed_shape
        return shapes

    def _state_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        has_level = self._fixed["relative"] and self._is_kept(tracked, "level")
        level = {"level": (tracked.layer.blocks,)} if has_level else {}
        return self._factor_shapes(tracked) | level

    def _is_kept(self, tracked: Tracked, key: str) -> bool:
        return self._sharing.is_mine(tracked) or key in self._kept_by_all(tracked)

    def _kept_by_all(self, tracked: Tracked, shard: Mode | None = None) -> list[str]:
        """For directions both factors and their units; otherwise those through which rows are seen when they come."""
        sides = (("K", tracked.factors.left), ("C", tracked.factors.right))
        if (shard or self._shard) == "full":
            return [_key(name, group) for name, group in sides if not group.keeps_covariance]
        return [_key(name, group) for name, group in sides] + ["level"] * self._fixed["relative"]

    def _as_sent(self, key: str, value: Tensor) -> Tensor:
        return symmetric.pack(value) if self._is_square(key) else value

    def _unpack(self, tracked: Tracked, key: str, sent: Tensor) -> None:
        size = _side(tracked, "K" if key == "KK" else "C").k
        super()._unpack(tracked, key, symmetric.unpack(sent, size) if self._is_square(key) else sent)

    def _is_square(self, key: str) -> bool:
        """Whether a part of the state is a symmetric matrix in full."""
        return key in ("KK", "CC") and not self._is_frugal

    def _started(self, stack: list[Tracked]) -> None:
        """Factors begin as identities, momenta as zeros."""
        for tracked in stack:
            state, weight = self.state[tracked.layer.weight], tracked.layer.weight
            first = [_key("K", tracked.factors.left)]
            if all(key in state for key in (first if self._sharing.is_mine(tracked) else self._kept_by_all(tracked))):
                continue
            shapes = self._state_shapes(tracked)
            place: dict[str, Any] = {"dtype": self._stored_dtype(tracked), "device": weight.device}
            for name, shape in self._factor_shapes(tracked).items():
                state[name] = torch.zeros(shape, **place)
            for name, group in (("K", tracked.factors.left), ("C", tracked.factors.right)):
                if (key := _key(name, group)) in shapes:
                    state[key] = group.pack(group.identity((tracked.layer.blocks,), **place)).contiguous()
            if "level" in shapes:
                # In float64, where the square of no gradient in float32 overflows or vanishes.
                state["level"] = torch.zeros(tracked.layer.blocks, dtype=torch.float64, device=weight.device)

    def _factors(self, stack: list[Tracked], dtype: torch.dtype) -> tuple[Element, Element]:
        """K and C of layers of one kind, in a type."""
        return self._factor(stack, "K", dtype), self._factor(stack, "C", dtype)

    def _factor(self, stack: list[Tracked], name: Literal["K", "C"], dtype: torch.dtype) -> Element:
        self._started(stack)
        group = _side(stack[0], name)
        return group.unpack(self._gathered(stack, _key(name, group)).to(dtype))

    def _seen_from(self, tracked: Tracked) -> tuple[Element | None, Element | None]:
        """None where a sum of squares needs no factor."""
        dtype, factors = self._computing_dtype(tracked), tracked.factors
        return (
            None if factors.left.keeps_covariance else self._factor([tracked], "K", dtype),
            None if factors.right.keeps_covariance else self._factor([tracked], "C", dtype),
        )

    def _update(self, stack: list[Tracked], group: Settings, ok: Tensor) -> Tensor:
        factors, dtype, fixed = stack[0].factors, self._computing_dtype(stack[0]), self._fixed
        k, c = self._factors(stack, dtype)
        known = [tracked.statistics for tracked in stack if tracked.statistics is not None]
        seen = joined(known) if known else cat([self._gradient(tracked) for tracked in stack]).to(dtype)
        level = self._gathered(stack, "level") if fixed["relative"] else None
        sides = (("m_K", factors.left), ("m_C", factors.right))
        m_k, m_c = (self._gathered(stack, m).to(dtype) if self._has_momentum(side) else None for m, side in sides)
        rule = Rule(
            group["precond_momentum"],
            group["precond_lr"],
            group["damping"],
            fixed["max_factor_step"],
            fixed["order"],
            self._convention == "inside",
        )
        ok = ok.to(k[0].device)
        renew = compiled(renewed, factors) if self._compiles_updates(factors) else renewed
        new = renew(factors, rule, k, c, (m_k, m_c), level, seen, ok, len(stack))
        self._count("skipped_updates", (ok & ~new.finite).sum())
        if new.level is not None:
            self._scatter(stack, "level", new.level)
        keys = (_key("K", factors.left), _key("C", factors.right), "m_K", "m_C")
        for key, value in zip(keys, (new.k, new.c, new.m_k, new.m_c), strict=True):
            if value is not None:
                self._store(stack, key, value, group)
        for tracked in stack:
            tracked.cache.clear()
        return new.finite

    def _compiles_updates(self, factors: KroneckerFactors) -> bool:
        """Large products and Fourier transforms take longer that way."""
        slower = any(side.keeps_covariance or isinstance(side, Toeplitz) for side in (factors.left, factors.right))
        return self._compile and can_compile() and not slower

    def _follow_schedules(self) -> None:
        super()._follow_schedules()
        for group in self.param_groups:
            mine = [p for p in group["params"] if p in self._tracked] if group["precond_momentum"] else []
            kept = [self._tracked[p].factors for p in mine]
            if any(isinstance(side, Square) for factors in kept for side in (factors.left, factors.right)):
                raise RuntimeError(
                    f"precond_momentum was 0 when the optimizer was built and is {group['precond_momentum']!r} now; "
                    "build it with precond_momentum as a function of the step, so that factors have room for it"
                )

    def _store(self, stack: list[Tracked], key: str, new: Tensor, group: Settings) -> None:
        """A new value in the type that is kept."""
        self._scatter(stack, key, new)
        dtype = self._stored_dtype(stack[0])
        if dtype != new.dtype:
            for tracked in stack:
                state = self.state[tracked.layer.weight]
                state[key] = rounded(state[key], dtype, self._noise_seed(tracked, group, key))

    def _noise_seed(self, tracked: Tracked, group: Settings, key: str) -> int:
        """A seed for each tensor at each update, so that a run that is resumed goes on alike."""
        return hash((self._seed, group["step"], tracked.index, ("K", "C", "m_K", "m_C", "KK", "CC").index(key))) % 2**63

    # ------------------------------------------------------------------ directions
    def _times(
        self,
        stack: list[Tracked],
        side: Literal["K", "C"],
        rows: Tensor,
        uses: int,
        overwrite: bool = False,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """``A A^T x`` for each row; what is needed of ``A A^T`` is kept where that pays."""
        group, dtype = _side(stack[0], side), promoted(self._stored_dtype(stack[0]), rows.dtype)
        rows, scratch = rows.to(dtype), scratch if scratch is not None and scratch.dtype == dtype else None
        if type(group) is Dense and not self._keeps_square(group, rows.shape[-2], uses):
            return group.apply_squared(self._factor(stack, side, dtype), rows)
        return group.times_square(self._square(stack, side, group, dtype), rows, overwrite, scratch)

    def _keeps_square(self, group: Group, rows: int, uses: int) -> bool:
        """Whether ``A A^T`` is kept for a use of so many rows; that of a dense A is if it pays."""
        if self._is_frugal or not square_size(group):
            return False
        return type(group) is not Dense or forms.keep_product(group.k, rows, uses)

    def _square(self, stack: list[Tracked], side: Literal["K", "C"], group: Group, dtype: torch.dtype) -> Element:
        """``A A^T``, kept until A changes, unless it is A itself or memory is short."""
        if self._is_frugal or not square_size(group):
            return group.squared(self._factor(stack, side, dtype))
        place = dtype, stack[0].layer.weight.device
        if any(side not in t.cache or (t.cache[side][0].dtype, t.cache[side][0].device) != place for t in stack):
            square = group.squared(self._factor(stack, side, dtype))
            parts = zip(*(parted(block, len(stack)) for block in square), strict=True)
            for tracked, part in zip(stack, parts, strict=True):
                tracked.cache[side] = part
        if len(stack) == 1:
            return stack[0].cache[side]
        return tuple(torch.cat(blocks) for blocks in zip(*(t.cache[side] for t in stack), strict=True))

    def _levels(self, stack: list[Tracked]) -> Tensor | None:
        if not self._fixed["relative"]:
            return None
        level = self._gathered(stack, "level")
        return torch.where(level > 0, level, 1.0)

    # ------------------------------------------------------------------ for people
    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """The dense K and C of a layer, in the curvature's own units: ``K K^T x C C^T`` is near the inverse curvature.

        Of shape ``(p, p)`` and ``(d, d)``, with a leading dimension where a layer has several blocks.
        """
        tracked = next((t for t in self._tracked.values() if t.name == name), None)
        if tracked is None:
            known = ", ".join(repr(t.name) for t in self._tracked.values())
            raise KeyError(f"no layer {name!r} has factors; those that have: {known}")
        k, c = self._factors([tracked], self._computing_dtype(tracked))
        dense = tracked.factors.left.to_dense(k), tracked.factors.right.to_dense(c)
        if (levels := self._levels([tracked])) is not None:
            unit = levels**-0.25
            dense = dense[0] * align(unit, dense[0]), dense[1] * align(unit, dense[1])
        K, C = (m.squeeze(0) if tracked.layer.blocks == 1 else m for m in dense)
        return K.clone(), C.clone()

    def _layer_row(self, tracked: Tracked, name: str) -> Row:
        layer, factors = tracked.layer, tracked.factors
        numbers = sum(math.prod(shape) for shape in self._owned_shapes(tracked).values())
        kept = numbers * self._stored_dtype(tracked).itemsize + self._square_bytes(tracked)
        update, step = costs(factors, layer.blocks, self._fixed["order"])
        kind = f"INGD, {'kfac' if tracked.views else 'gradient'} curvature"
        blocks = f"{layer.blocks} of " if layer.blocks > 1 else ""
        return Row(
            name,
            tuple(layer.weight.shape),
            kind,
            f"{blocks}{factors.left}",
            f"{blocks}{factors.right}",
            kept + self._momentum_bytes(tracked),
            update,
            step,
        )

    def _square_bytes(self, tracked: Tracked) -> int:
        """Of what is kept of ``K K^T`` and ``C C^T`` between updates."""
        layer, factors = tracked.layer, tracked.factors
        sides, uses = ((factors.left, layer.d), (factors.right, layer.p)), self.param_groups[0]["update_every"]
        kept = sum(square_size(group) for group, rows in sides if self._keeps_square(group, rows, uses))
        return layer.blocks * kept * torch.promote_types(self._stored_dtype(tracked), layer.weight.dtype).itemsize


def _side(tracked: Tracked, name: Literal["K", "C"]) -> Group:
    return tracked.factors.left if name == "K" else tracked.factors.right


def _key(name: str, group: Group) -> str:
    """Under which a factor is in the state: K, or KK for ``K K^T``."""
    return 2 * name if isinstance(group, Square) else name
