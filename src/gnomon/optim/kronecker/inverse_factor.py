"""The factors of KFAC: running averages of the curvature and their inverses (right side of Fig. matDL_opt)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ...groups import Dense, Group
from ...linalg import align, promoted
from .config import check_flag
from .dense_factor import DenseFactor
from .factor_forms import FactorPair
from .factor_update import finite_layers
from .layers.base import FactoredLayer, Settings, Side, Stack, State
from .statistics import Factors, Statistics, in_units, mean_moments
from .structured_factor import StructuredFactor

SIDES: tuple[tuple[str, Side], ...] = (("A", "K"), ("S", "C"))
"""The averages A of inputs and S of output gradients, and the side of the preconditioner that each is inverted for."""
Mean = tuple[Tensor, Tensor]
"""A mean of squares of rows, and the unit of the rows."""


class InverseFactors:
    """``A <- decay A + (1 - decay) mu_AA`` and ``S <- decay S + (1 - decay) mu_GG``, inverted after each update.

    With ``relative`` the averages begin with the first batch, in a unit of their own as moments are, and damping is
    relative to the mean of each diagonal. Otherwise they begin as identities, and damping is absolute.
    """

    name = "KFAC"
    shared_keys: tuple[str, ...] = ("A_inverse", "S_inverse")

    def __init__(self, relative: bool) -> None:
        check_flag("relative", relative)
        self.relative = relative

    def pair(self, groups: tuple[Group, Group], dtype: torch.dtype, settings: Settings) -> FactorPair:
        left, right = (DenseFactor(g.k) if isinstance(g, Dense) else StructuredFactor(g) for g in groups)
        return FactorPair(left, right)

    # ------------------------------------------------------------------ state
    def shapes(self, layer: FactoredLayer) -> dict[str, tuple[int, ...]]:
        blocks: tuple[int, ...] = (layer.layer.blocks,)
        found: dict[str, tuple[int, ...]] = {}
        for name, side in SIDES:
            shape = blocks + layer.form(side).storage_shape
            found |= {name: shape, f"{name}_inverse": shape, f"{name}_updates": blocks}
            if self.relative:
                found[f"{name}_unit"] = blocks
        return found

    def dtypes(self, layer: FactoredLayer) -> dict[str, torch.dtype]:
        counts = {f"{name}_updates": torch.float32 for name, _ in SIDES}
        return {key: counts.get(key, layer.computing_dtype) for key in self.shapes(layer)}

    def initial(self, layer: FactoredLayer, key: str) -> Tensor:
        device, dtype, blocks = layer.layer.weight.device, self.dtypes(layer)[key], layer.layer.blocks
        if key.endswith("_updates"):
            return torch.zeros(blocks, dtype=dtype, device=device)
        if key.endswith("_unit"):
            return torch.ones(blocks, dtype=dtype, device=device)
        return layer.form("K" if key.startswith("A") else "C").identity(blocks, dtype, device)

    def loaded(self, layer: FactoredLayer, state: State) -> State:
        return state

    def check(self, layers: Iterable[FactoredLayer], settings: Settings) -> None:
        """Accept all settings, which may change at any time."""

    # ------------------------------------------------------------------ the update
    def projection_factors(self, layer: FactoredLayer, state: State) -> Factors:
        return None, None

    def update(self, stack: Stack, settings: Settings, source: Statistics | Tensor, ok: Tensor) -> Tensor:
        new: dict[str, Tensor] = {}
        for (name, _), mean in zip(SIDES, self._means(stack, source), strict=True):
            new |= self._averaged(stack, name, mean, settings["decay"])
            new[f"{name}_inverse"] = self._inverse(new[name], settings["damping"])
        finite = finite_layers([value for value in new.values() if value.ndim > 1], len(stack))
        may = (ok.to(finite.device) & finite).repeat_interleave(stack.layers[0].layer.blocks)
        gates = may.to(stack.dtype)
        for key, value in new.items():
            # Weights of zero and one: to choose between old and new values would take eight times as long.
            old = stack.get(key)
            stack.set(key, old.lerp_(value.nan_to_num_(0.0, 0.0, 0.0), align(gates, value)))
        for name, _ in SIDES:
            stack.set(f"{name}_updates", stack.get(f"{name}_updates") + gates)
        return finite

    def _averaged(self, stack: Stack, name: str, mean: Mean, decay: float) -> dict[str, Tensor]:
        """Return an average with a new mean in it, and its unit."""
        old, (values, unit) = stack.get(name), mean
        values, weight = values.view_as(old), values.new_full((len(values),), 1 - decay)
        if not self.relative:
            return {name: old.lerp(values * align(unit.square(), values), align(weight, old))}
        is_first, known = stack.get(f"{name}_updates") == 0, stack.get(f"{name}_unit")
        weight = torch.where(is_first, 1, weight)
        common = torch.where(is_first, unit, torch.maximum(known, unit))
        old = old * align(torch.where(is_first, 1, known / common).square(), old)
        values = values * align((unit / common).square(), values)
        return {f"{name}_unit": common, name: old.lerp(values, align(weight, old))}

    def _means(self, stack: Stack, source: Statistics | Tensor) -> tuple[Mean, Mean]:
        """Return ``mu_AA`` and ``mu_GG``; from gradients alone, ``G^T S^-1 G / d`` and ``G A^-1 G^T / p``."""
        left, right = stack.pair
        if isinstance(source, Statistics):
            a, s = mean_moments(stack.pair, (None, None), source)
            return (a.tensors[0].to(stack.dtype), a.unit), (s.tensors[0].to(stack.dtype), s.unit)
        gradients, unit = in_units(source)
        outer = right.apply_square((stack.get("S_inverse"),), gradients.mT).mT
        inner = left.apply_square((stack.get("A_inverse"),), gradients)
        return (
            (left.project_outer(gradients, outer) / right.size, unit),
            (right.project_outer(gradients.mT, inner.mT) / left.size, unit),
        )

    def _inverse(self, average: Tensor, damping: float) -> Tensor:
        """Return ``(M + damping I)^-1``, of a matrix by its Cholesky factor or of a diagonal; NaN where there is none.

        A relative one is that of M in units of its mean, so that directions of different updates are averaged alike.
        """
        damped = average.clone()
        if self.relative:
            damped /= align(_mean_diagonal(average).clamp(min=torch.finfo(average.dtype).tiny), average)
        if average.ndim == 2:
            return 1 / (damped + damping)
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        factor, info = torch.linalg.cholesky_ex(damped)
        # LAPACK refuses zeros on the diagonal; a factor that does not exist has NaN there.
        factor.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), math.nan)
        return torch.cholesky_inverse(factor)

    # ------------------------------------------------------------------ the preconditioner
    def apply(
        self, stack: Stack, side: Side, rows: Tensor, uses: int, overwrite: bool, scratch: Tensor | None
    ) -> Tensor:
        inverse = stack.get("A_inverse" if side == "K" else "S_inverse")
        dtype = promoted(inverse.dtype, rows.dtype)
        scratch = scratch if scratch is not None and scratch.dtype == dtype else None
        return stack.form(side).apply_square((inverse.to(dtype),), rows.to(dtype), overwrite, scratch)

    def levels(self, stack: Stack) -> Tensor | None:
        if not self.relative:
            return None
        sizes = (_mean_diagonal(stack.get(name)).double() for name, _ in SIDES)
        units = (stack.get(f"{name}_unit").double().square() for name, _ in SIDES)
        level = math.prod((*sizes, *units), start=torch.ones_like(stack.get("A_unit"), dtype=torch.float64))
        return torch.where(level > 0, level, 1.0)

    def forget_products(self, layers: Iterable[FactoredLayer]) -> None:
        """Do nothing: no products are stored beside the state."""

    # ------------------------------------------------------------------ for several ranks, and for people
    def sent(self, layer: FactoredLayer, key: str, value: Tensor) -> Tensor:
        return value

    def received(self, layer: FactoredLayer, key: str, sent: Tensor) -> Tensor:
        return sent

    def work(self, layer: FactoredLayer) -> tuple[int, int]:
        blocks, pair = layer.layer.blocks, layer.pair
        dense = [form.size for form in pair if form.keeps_matrix]
        update = blocks * sum(k**3 for k in dense)
        return update, blocks * sum(k * pair.left.size * pair.right.size for k in dense)

    def product_bytes(self, layer: FactoredLayer, uses: int) -> int:
        return 0

    @property
    def cached_tensors(self) -> list[Tensor]:
        return []


def _mean_diagonal(matrix: Tensor) -> Tensor:
    """Return the mean of the diagonal of each matrix of a batch; a vector stands for a diagonal matrix."""
    return (matrix if matrix.ndim == 2 else matrix.diagonal(dim1=-2, dim2=-1)).mean(-1)
