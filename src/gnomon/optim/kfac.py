"""KFAC: the baseline of INGD, with inverses (right side of Fig. matDL_opt)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..groups import Dense
from ..groups.base import align
from .factors import in_units, joined
from .layers import Approximation
from .layerwise import LayerwiseOptimizer
from .moves import Tracked, cat
from .renewal import finite_layers
from .rounding import promoted
from .settings import PRESETS, Scalar, Settings
from .summary import Row


class KFAC(LayerwiseOptimizer):
    """Kronecker-factored curvature with running averages and Cholesky inverses.

    With ``mu_AA`` and ``mu_GG`` as in :class:`~gnomon.optim.INGD`, every ``update_every`` steps::

        A <- decay A + (1 - decay) mu_AA          S <- decay S + (1 - decay) mu_GG

    and the direction of a gradient G is ``(S + damping I)^-1 G (A + damping I)^-1``. By default the averages start with
    the first batch, damping is relative to the mean of each diagonal, and steps are those of INGD's defaults.
    ``preset="paper"`` starts from identities, with an absolute damping, the paper's momentum, and SGD for other
    parameters.

    Arguments are those of :class:`~gnomon.optim.INGD`; ``decay`` is the weight of the past in the averages. Factors
    are dense, and diagonal for embeddings and above ``max_dim``.
    """

    presets: ClassVar[dict[str, Settings]] = {name: {**preset, "decay": 0.95} for name, preset in PRESETS.items()}

    def __init__(
        self,
        model: nn.Module,
        lr: Scalar | None = None,
        *,
        momentum: Scalar | None = None,
        weight_decay: Scalar | None = None,
        damping: Scalar | None = None,
        decay: Scalar | None = None,
        update_every: int | None = None,
        curvature: Literal["kfac", "gradient"] = "kfac",
        fisher: Literal["empirical", "mc"] = "empirical",
        approx: Approximation | Literal["auto"] | None = None,
        grouped: Literal["each", "average"] = "each",
        step_rms: Scalar | Literal["preset"] | None = "preset",
        kl_clip: Scalar | None = None,
        relative: bool | None = None,
        growing_intervals: bool | None = None,
        subsample: bool | None = None,
        max_dim: int | None = 8192,
        fallback: Literal["adamw", "sgd"] | None = None,
        fallback_lr: Scalar | None = None,
        groups: Iterable[Settings] = (),
        precondition_only: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        preset: Literal["robust", "paper"] = "robust",
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
            "decay": decay,
            "update_every": update_every,
            "step_rms": step_rms,
            "kl_clip": kl_clip,
            "relative": relative,
            "growing_intervals": growing_intervals,
            "subsample": subsample,
        }
        super().__init__(
            model,
            settings,
            preset=preset,
            structure="dense",
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
        )

    # ------------------------------------------------------------------ factors
    def _sides(self, tracked: Tracked) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        blocks = (tracked.layer.blocks,)
        left, right = tracked.factors.left, tracked.factors.right
        return ("A", blocks + left.storage_shape), ("S", blocks + right.storage_shape)

    def _factor_shapes(self, tracked: Tracked) -> dict[str, tuple[int, ...]]:
        return {f"{name}{suffix}": shape for name, shape in self._sides(tracked) for suffix in ("", "_inverse")}

    def _seen_from(self, tracked: Tracked) -> tuple[None, None]:
        return None, None

    def _update(self, stack: list[Tracked], group: Settings, ok: Tensor) -> Tensor:
        self._started(stack)
        means = self._means(stack)
        new: dict[str, Tensor] = {}
        for name, (mean, unit) in zip("AS", means, strict=True):
            old = self._gathered(stack, name)
            mean, weight = mean.view_as(old), mean.new_full((len(mean),), 1 - group["decay"])
            if self._fixed["relative"]:
                # The first batch replaces the start. Averages are in a unit of their own, as moments are.
                is_first = self._gathered(stack, f"{name}_updates") == 0
                weight, known = torch.where(is_first, 1, weight), self._gathered(stack, f"{name}_unit")
                common = torch.where(is_first, unit, torch.maximum(known, unit))
                old = old * align((known / common).square(), old)
                mean, unit = mean * align((unit / common).square(), mean), common
                new[f"{name}_unit"] = unit
            else:
                mean = mean * align(unit.square(), mean)
            new[name] = old.lerp(mean, align(weight, old))
            new[f"{name}_inverse"] = self._inverse(new[name], group["damping"])
        finite = finite_layers([value for value in new.values() if value.ndim > 1], len(stack))
        ok = ok.to(finite.device)
        self._count("skipped_updates", (ok & ~finite).sum())
        gates = (ok & finite).repeat_interleave(stack[0].layer.blocks).to(self._computing_dtype(stack[0]))
        for key, value in new.items():
            # Weights of zero and one: to choose between old and new values would take eight times as long.
            old = self._gathered(stack, key)
            self._scatter(stack, key, old.lerp_(value.nan_to_num_(0.0, 0.0, 0.0), align(gates, value)))
        for name in "AS":
            self._scatter(stack, f"{name}_updates", self._gathered(stack, f"{name}_updates") + gates)
        return finite

    def _means(self, stack: list[Tracked]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """``mu_AA`` and ``mu_GG``; where there are no rows, ``G^T S^-1 G / d`` and ``G A^-1 G^T / p``.

        Each comes with the unit of its rows.
        """
        factors, dtype = stack[0].factors, self._computing_dtype(stack[0])
        left, right = factors.left, factors.right
        known = [tracked.statistics for tracked in stack if tracked.statistics is not None]
        if known:
            s = factors.normalized(None, None, joined(known))
            return (s.inputs.tensors[0].to(dtype), s.inputs.unit), (s.outputs.tensors[0].to(dtype), s.outputs.unit)
        gradients, unit = in_units(cat([self._gradient(tracked) for tracked in stack]).to(dtype))
        outer = right.times_square((self._gathered(stack, "S_inverse"),), gradients.mT).mT
        inner = left.times_square((self._gathered(stack, "A_inverse"),), gradients)
        return (
            (left.pack(left.restrict(gradients, outer)) / right.k, unit),
            (right.pack(right.restrict(gradients.mT, inner.mT)) / left.k, unit),
        )

    def _started(self, stack: list[Tracked]) -> None:
        for tracked in stack:
            state, weight = self.state[tracked.layer.weight], tracked.layer.weight
            if "A" in state:
                continue
            place = {"dtype": self._computing_dtype(tracked), "device": weight.device}
            for name, group in zip("AS", (tracked.factors.left, tracked.factors.right), strict=True):
                identity = group.pack(group.identity((tracked.layer.blocks,), **place))  # type: ignore[arg-type]
                state[name], state[f"{name}_inverse"] = identity, identity.clone()
                state[f"{name}_updates"] = torch.zeros(tracked.layer.blocks, device=weight.device)
                if self._fixed["relative"]:
                    state[f"{name}_unit"] = torch.ones(tracked.layer.blocks, **place)  # type: ignore[arg-type]

    def _inverse(self, average: Tensor, damping: float) -> Tensor:
        """``(M + damping I)^-1``, of a matrix by its Cholesky factor or of a diagonal; NaN where there is none.

        A relative one is that of M in units of its mean: directions of different updates are then averaged alike.
        """
        damped = average.clone()
        if self._fixed["relative"]:
            damped /= align(_mean_diagonal(average).clamp(min=torch.finfo(average.dtype).tiny), average)
        if average.ndim == 2:
            return 1 / (damped + damping)
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        factor, info = torch.linalg.cholesky_ex(damped)
        # LAPACK refuses zeros on the diagonal; a factor that does not exist has NaN there.
        factor.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), math.nan)
        return torch.cholesky_inverse(factor)

    def _times(
        self,
        stack: list[Tracked],
        side: Literal["K", "C"],
        rows: Tensor,
        uses: int,
        overwrite: bool = False,
        scratch: Tensor | None = None,
    ) -> Tensor:
        self._started(stack)
        factors = stack[0].factors
        group, key = (factors.left, "A_inverse") if side == "K" else (factors.right, "S_inverse")
        inverse = self._gathered(stack, key)
        dtype = promoted(inverse.dtype, rows.dtype)
        scratch = scratch if scratch is not None and scratch.dtype == dtype else None
        return group.times_square((inverse.to(dtype),), rows.to(dtype), overwrite, scratch)

    def _levels(self, stack: list[Tracked]) -> Tensor | None:
        if not self._fixed["relative"]:
            return None
        self._started(stack)
        sizes = (_mean_diagonal(self._gathered(stack, name)).double() for name in "AS")
        units = (self._gathered(stack, f"{name}_unit").double().square() for name in "AS")
        level = math.prod((*sizes, *units), start=torch.ones((), dtype=torch.float64))
        return torch.where(level > 0, level, 1.0)

    # ------------------------------------------------------------------ for people
    def _layer_row(self, tracked: Tracked, name: str) -> Row:
        layer, factors = tracked.layer, tracked.factors
        width = self._computing_dtype(tracked).itemsize
        numbers = sum(math.prod(shape) for shape in self._factor_shapes(tracked).values())
        dense = [group.k for group in (factors.left, factors.right) if isinstance(group, Dense)]
        return Row(
            name,
            tuple(layer.weight.shape),
            f"KFAC, {'kfac' if tracked.views else 'gradient'} curvature",
            str(factors.left),
            str(factors.right),
            numbers * width + self._momentum_bytes(tracked),
            layer.blocks * sum(k**3 for k in dense),
            layer.blocks * sum(k * factors.left.k * factors.right.k for k in dense),
        )


def _mean_diagonal(matrix: Tensor) -> Tensor:
    """Of a batch of matrices, or of diagonals."""
    return (matrix if matrix.ndim == 2 else matrix.diagonal(dim1=-2, dim2=-1)).mean(-1)
