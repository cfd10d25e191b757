"""KFAC: the baseline of INGD, with inverses (right side of Fig. matDL_opt)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..groups import Dense
from ..groups.base import align
from . import rules
from .factors import Statistics
from .layers import Approximation
from .layerwise import LayerwiseOptimizer, Tracked
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

    def _statistics(self, tracked: Tracked, x: Tensor, g: Tensor, terms: int) -> Statistics:
        return tracked.factors.statistics(None, None, x, g, terms)

    def _update(self, tracked: Tracked, group: Settings, ok: Tensor) -> None:
        state, dtype = self._factor_state(tracked), self._computing_dtype(tracked)
        means = [mean.to(dtype) for mean in self._means(tracked, ok)]
        ok = ok.to(means[0].device)
        new: dict[str, Tensor] = {}
        for (name, shape), mean in zip(self._sides(tracked), means, strict=True):
            # The first batch replaces the start, unless the start counts.
            first = state[f"{name}_updates"] == 0 if self._fixed["relative"] else torch.zeros_like(ok)
            weight = torch.where(first, 1, mean.new_full((), 1 - group["decay"]))
            new[name] = state[name].lerp(mean.reshape(shape), weight)
            new[f"{name}_inverse"] = self._inverse(new[name], group["damping"])
        finite = ok & rules.all_finite(rules.peaks(list(new.values())))
        self._count("skipped_updates", ok & ~finite)
        for key, value in new.items():
            state[key] = torch.where(finite, value, state[key])
        for name, _ in self._sides(tracked):
            state[f"{name}_updates"] += finite

    def _means(self, tracked: Tracked, ok: Tensor) -> tuple[Tensor, Tensor]:
        """``mu_AA`` and ``mu_GG``; where there are no rows, ``G^T S^-1 G / d`` and ``G A^-1 G^T / p``."""
        s, factors = tracked.statistics, tracked.factors
        if s is not None:
            return factors.left.pack(s.inputs.seen) / max(s.rows, 1), factors.right.pack(s.outputs.seen) * s.terms
        state, gradient = self._factor_state(tracked), self._gradient(tracked, ok).to(self._computing_dtype(tracked))
        outer, inner = _times(gradient.mT, state["S_inverse"]).mT, _times(gradient, state["A_inverse"])
        return (
            factors.left.pack(factors.left.restrict(gradient, outer)) / factors.right.k,
            factors.right.pack(factors.right.restrict(gradient.mT, inner.mT)) / factors.left.k,
        )

    def _factor_state(self, tracked: Tracked) -> Settings:
        state, weight = self.state[tracked.layer.weight], tracked.layer.weight
        if "A" not in state:
            for group, (name, _) in zip(
                (tracked.factors.left, tracked.factors.right), self._sides(tracked), strict=True
            ):
                identity = group.identity(
                    (tracked.layer.blocks,), dtype=self._computing_dtype(tracked), device=weight.device
                )
                state[name], state[f"{name}_inverse"] = group.pack(identity), group.pack(identity).clone()
                state[f"{name}_updates"] = torch.zeros((), device=weight.device)
        return state

    def _inverse(self, average: Tensor, damping: float) -> Tensor:
        """``(M + damping I)^-1``, of a matrix by its Cholesky factor or of a diagonal; NaN where there is none."""
        diagonal = average if average.ndim == 2 else average.diagonal(dim1=-2, dim2=-1)
        level = diagonal.mean(-1, keepdim=True) if self._fixed["relative"] else torch.ones_like(diagonal[..., :1])
        if average.ndim == 2:
            return 1 / (average + damping * level)
        factor, info = torch.linalg.cholesky_ex(average + torch.diag_embed((damping * level).expand_as(diagonal)))
        works = align(info == 0, factor)
        inverse = torch.cholesky_inverse(
            torch.where(works, factor, torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device))
        )
        return torch.where(works, inverse, math.nan)

    def _precondition(self, tracked: Tracked, matrix: Tensor) -> Tensor:
        state = self._factor_state(tracked)
        dtype = torch.promote_types(state["A"].dtype, matrix.dtype)
        rows = _times(matrix.to(dtype), state["A_inverse"].to(dtype))
        return _times(rows.mT, state["S_inverse"].to(dtype)).mT

    def _natural(self, tracked: Tracked, gradient: Tensor) -> Tensor:
        return self._precondition(tracked, gradient)

    # ------------------------------------------------------------------ for people
    def _layer_row(self, tracked: Tracked, name: str) -> Row:
        layer, factors = tracked.layer, tracked.factors
        width = self._computing_dtype(tracked).itemsize
        numbers = sum(math.prod(shape) for shape in self._factor_shapes(tracked).values())
        moments = 0 if self._precondition_only else sum(p.numel() * p.element_size() for p in layer.parameters)
        dense = [group.k for group in (factors.left, factors.right) if isinstance(group, Dense)]
        return Row(
            name,
            tuple(layer.weight.shape),
            f"KFAC, {'kfac' if tracked.views else 'gradient'} curvature",
            str(factors.left),
            str(factors.right),
            numbers * width + moments,
            layer.blocks * sum(k**3 for k in dense),
            layer.blocks * sum(k * factors.left.k * factors.right.k for k in dense),
        )


def _times(rows: Tensor, symmetric: Tensor) -> Tensor:
    """``M x`` for each row x; M a matrix or a diagonal."""
    return rows * symmetric.unsqueeze(-2) if symmetric.ndim == rows.ndim - 1 else rows @ symmetric
