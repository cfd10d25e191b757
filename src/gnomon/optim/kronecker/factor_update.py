"""The update of a layer's Kronecker factors from the curvature of a batch (Fig. matDL_opt).

With ``H_K = K^T mu_AA K`` and ``H_C = C^T mu_GG C`` for the second moments of a layer's p inputs and d output
gradients, :func:`update` computes::

    m_K <- a1 m_K + b1/(2d) ( tr(H_C) H_K + damping tr(C^T C) K^T K - d I )        K <- K Exp(-m_K)
    m_C <- a1 m_C + b1/(2p) ( tr(H_K) H_C + damping tr(K^T K) C^T C - p I )        C <- C Exp(-m_C)

These are the steps of Eq. matgauss_just in the coordinates of Eq. mat_gauss_norm_coord. K and C are kept apart, in
code of their own: :class:`gnomon.groups.Kronecker` has the same geometry and is not used. :func:`update` is pure.
:class:`InverseFreeFactors` applies it to the factors in the optimizer's state. A factor has one of three forms with the
same methods (:class:`~.factor_forms.FactorForm`). :mod:`.reference` has the same for dense factors in fifty lines.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...groups import Dense, Element, Group, Toeplitz
from ...linalg import HALF, align, pack_symmetric, promoted, unpack_symmetric
from .compiling import can_compile, compiled
from .config import FactorConfig
from .cost_model import update_and_step
from .dense_factor import DenseFactor
from .factor_forms import FactorForm, FactorPair, Projection
from .gram_factor import GramFactor, is_safe
from .layers.base import FactoredLayer, Settings, Side, Stack, State, parted
from .rounding import rounded
from .statistics import Factors, Statistics, in_units
from .structured_factor import StructuredFactor

LEVEL_MEMORY = 0.9
"""The weight of the past in the running mean of the curvature."""


@dataclass(frozen=True)
class UpdateSettings:
    """The numbers of an update, by their names in the paper where they have one."""

    a1: float
    b1: float
    damping: float
    bound: float
    """The bound on the spectral norm of what is added to a momentum."""
    order: int
    """The order of the exponential."""
    inside: bool
    """Whether b1 is a part of the momentum."""


# ---------------------------------------------------------------------- curvature
@dataclass(frozen=True)
class Curvature:
    """The curvature of a layer as its two factors project it."""

    in_k: Projection
    in_c: Projection
    weight_k: Tensor
    """``tr(H_C)/d``, by which :attr:`in_k` is to be multiplied."""
    weight_c: Tensor
    """``tr(H_K)/p``, by which :attr:`in_c` is to be multiplied."""
    mean: Tensor
    """The mean of the curvature over all directions of the layer, without the factors."""
    unit: Tensor
    """The unit of weights and mean, in float64, where the square of no unit of rows overflows."""

    @property
    def absolute_mean(self) -> Tensor:
        return self.mean * self.unit

    def relative_to(self, level: Tensor | None = None) -> Curvature:
        """Return the curvature over ``level``, an absolute mean.

        Without a level, or where it is zero, it is over its own mean.
        """
        factor = 1 / torch.where(self.mean > 0, self.mean, 1)
        if level is not None:
            factor = torch.where(level > 0, (self.unit / level).to(factor.dtype), factor)
        return self._times(factor)

    def absolute(self) -> Curvature:
        """Return the curvature in no unit."""
        return self._times(self.unit.to(self.mean.dtype))

    def _times(self, factor: Tensor) -> Curvature:
        weights = self.weight_k * factor, self.weight_c * factor
        return Curvature(self.in_k, self.in_c, *weights, self.mean * factor, torch.ones_like(self.unit))


def curvature(pair: FactorPair, k: Element, c: Element, s: Statistics) -> Curvature:
    """Return ``tr(H_C)/d H_K`` and ``tr(H_K)/p H_C``, the projections of ``mu_AA x mu_GG``."""
    p, d, weight = pair.left.size, pair.right.size, s.terms / max(s.rows, 1)
    in_k, in_c = pair.left.project(k, s.inputs), pair.right.project(c, s.outputs)
    return Curvature(
        in_k,
        in_c,
        in_c.trace * (weight / d),
        in_k.trace * (weight / p),
        s.inputs.energy * s.outputs.energy * (weight / (d * p)),
        (s.inputs.unit.double() * s.outputs.unit.double()).square(),
    )


def gradient_curvature(pair: FactorPair, k: Element, c: Element, gradient: Tensor) -> Curvature:
    """Return ``Y^T Y / d`` and ``Y Y^T / p`` with ``Y = C^T G K``, the projections of ``vec(G) vec(G)^T``.

    At the fixed point ``S_a = E[G S_b^-1 G^T] / p`` and ``S_b = E[G^T S_a^-1 G] / d`` with ``C C^T = S_a^-1`` and
    ``K K^T = S_b^-1``: the Kronecker product nearest to the covariance of G in the sense of Kullback and Leibler.
    """
    gradient, unit = in_units(gradient)
    left, right = pair
    one = gradient.new_ones(())
    through_c = right.through(c, gradient.mT).mT
    through_both = left.through(k, through_c)
    through_k = through_both
    if not (left.has_root and right.has_root):
        through_k = left.through(k, gradient)
    # S is X^T Z. X is Z where a factor is stored, and Z is P X where only its product P with itself is.
    of_k, of_c = (through_c, through_both), (through_k.mT, through_both.mT)
    return Curvature(
        left.project_product(of_k if right.has_root else (gradient, through_k), of_k),
        right.project_product(of_c if left.has_root else (gradient.mT, through_c.mT), of_c),
        one / right.size,
        one / left.size,
        gradient.square().mean((-2, -1)),
        unit.double().square(),
    )


# ---------------------------------------------------------------------- the update
class Update(NamedTuple):
    """New factors, packed, and momenta; as they were in layers whose curvature is not finite."""

    k: Tensor
    c: Tensor
    m_k: Tensor | None
    m_c: Tensor | None
    level: Tensor | None
    """The running mean of the curvature."""
    finite: Tensor
    """Whether each layer's curvature is finite."""


def update(
    pair: FactorPair,
    settings: UpdateSettings,
    k: Element,
    c: Element,
    momenta: tuple[Tensor | None, Tensor | None],
    level: Tensor | None,
    source: Statistics | Tensor,
    ok: Tensor,
    layers: int,
) -> Update:
    """Compute new factors from old factors and the statistics of a batch, or a gradient matrix; a pure function.

    The factors are those of ``layers`` layers, block after block. With a ``level``, the running mean of the curvature,
    curvature and damping are relative to the mean. Nothing changes where ``ok`` is False.
    """
    if isinstance(source, Statistics):
        # A batch's curvature is relative to its own mean, so that the loss's scale may change at any time.
        seen, reference = curvature(pair, k, c, source), None
    else:
        # A single gradient matrix is too noisy for that: its mean would turn with it, and the fixed point would move.
        seen, reference = gradient_curvature(pair, k, c, source), level
    mean = seen.absolute_mean
    seen = seen.absolute() if level is None else seen.relative_to(reference)
    rate, limit = settings.b1, settings.bound
    if not settings.inside:
        rate, limit = 1.0, settings.bound / settings.b1 if settings.b1 else math.inf
    size_k, size_c = pair.left.mean_square(k), pair.right.mean_square(c)
    m_k = pair.left.tangent(k, seen.in_k, seen.weight_k, settings.damping * size_c, limit, rate)
    m_c = pair.right.tangent(c, seen.in_c, seen.weight_c, settings.damping * size_k, limit, rate)
    finite = finite_layers([*m_k, *m_c], layers)
    may = (ok & finite).repeat_interleave(len(mean) // layers)
    sides = zip(pair, (k, c), (m_k, m_c), momenta, strict=True)
    (new_k, momentum_k), (new_c, momentum_c) = (_moved(*side, settings, may.to(k[0].dtype)) for side in sides)
    if pair.left.has_scale and pair.right.has_scale:
        excess = torch.where(may, imbalance(size_k, size_c), 1)
        new_k, new_c = pair.left.rescaled(new_k, 1 / excess), pair.right.rescaled(new_c, excess)
    new_level = None if level is None else torch.where(may, _followed(level, mean), level)
    return Update(pair.left.pack(new_k), pair.right.pack(new_c), momentum_k, momentum_c, new_level, finite)


def _moved(
    form: FactorForm, a: Element, tangent: Element, momentum: Tensor | None, settings: UpdateSettings, gates: Tensor
) -> tuple[Element, Tensor | None]:
    """Set ``m <- a1 m + tangent`` and ``A <- A Exp(-m)``, with b1 in one of them.

    Nothing changes where a gate is zero.
    """
    # A tangent of zeros changes nothing; to choose between old and new values would take longer.
    m = tuple(block.nan_to_num_(0.0, 0.0, 0.0).mul_(align(gates, block)) for block in tangent)
    if momentum is not None:
        kept = gates * (settings.a1 - 1) + 1
        pairs = zip(m, form.unpack_momentum(momentum), strict=True)
        m = tuple(block.addcmul_(past, align(kept, past)) for block, past in pairs)
        momentum = form.pack_momentum(m)
        m = tuple(block * align(gates, block) for block in m)
    return form.moved(a, m, settings.order, -1.0 if settings.inside else -settings.b1), momentum


def imbalance(size_k: Tensor, size_c: Tensor) -> Tensor:
    """Return the power of two by which K is divided and C multiplied, from ``tr(K^T K)/p`` and ``tr(C^T C)/d``.

    ``K K^T x C C^T`` does not change with it, to the last bit. Nothing in the update holds the scales of K and C alone,
    and its higher orders let them drift apart until products overflow. So the two are balanced as soon as their mean
    squares differ by a factor of 16.
    """
    exponent = (torch.log2(size_k / size_c) / 4).trunc()
    return torch.exp2(torch.where(exponent.isfinite(), exponent, 0))


def finite_layers(tensors: Iterable[Tensor], layers: int) -> Tensor:
    """Return whether all blocks of each layer are finite in all tensors."""
    sums = [tensor.sum(tuple(range(1, tensor.ndim))) for tensor in tensors]  # not finite where an entry is not
    return torch.stack(sums).isfinite().all(0).view(layers, -1).all(1)


def _followed(level: Tensor, now: Tensor) -> Tensor:
    """Return the running mean of the curvature, which begins with the first mean that is not zero."""
    return torch.where(level > 0, level.lerp(now, 1 - LEVEL_MEMORY), now)


# ---------------------------------------------------------------------- the rule of INGD
FORMS = ("factor", "gram", "packed gram")
"""The forms of dense factors in a saved state, by number."""


def form_number(form: FactorForm) -> int:
    """Return the number that stands for a form in a saved state.

    It is a place in :data:`FORMS`, or a number of a sparse structure.
    """
    if isinstance(form, StructuredFactor):
        return len(FORMS) + zlib.crc32(repr(form.group).encode())
    return FORMS.index(form.form)


class InverseFreeFactors:
    """The factors K and C of INGD: they follow the curvature by multiplications alone (Fig. matDL_opt)."""

    name = "INGD"

    def __init__(self, config: FactorConfig) -> None:
        self.config, self.relative, self._low_memory = config, config.relative, config.memory == "low"
        self.shared_keys: tuple[str, ...] = ("K", "C", "level") if config.relative else ("K", "C")
        self._products: dict[tuple[int, Side], Element] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_products": {}}

    # ------------------------------------------------------------------ forms
    def pair(self, groups: tuple[Group, Group], dtype: torch.dtype, settings: Settings) -> FactorPair:
        left, right = (self._form(group, dtype, settings) for group in groups)
        return FactorPair(left, right)

    def _form(self, group: Group, dtype: torch.dtype, settings: Settings) -> FactorForm:
        """Return the form of a factor.

        A dense one without momentum is stored as its product with itself, where rounding allows that. Half precision
        does not: entries that are rounded at random would not be symmetric.
        """
        config, momentum, damping = self.config, settings["precond_momentum"], settings["damping"]
        has_momentum = callable(momentum) or bool(momentum)
        if not isinstance(group, Dense):
            return StructuredFactor(group, has_momentum)
        computed = promoted(dtype, torch.float32)
        used = (computed, config.dtype or computed)
        bounded = config.relative and config.order == 2 and config.max_factor_step <= 1 and not callable(damping)
        plain = (
            bounded and config.convention == "inside" and not has_momentum and not any(kind in HALF for kind in used)
        )
        if plain and is_safe(group.k, damping, max(torch.finfo(kind).eps for kind in used)):
            return GramFactor(group.k, packed=config.memory == "low")
        return DenseFactor(group.k, has_momentum)

    # ------------------------------------------------------------------ state
    def shapes(self, layer: FactoredLayer) -> dict[str, tuple[int, ...]]:
        blocks, sides = (layer.layer.blocks,), (("K", layer.pair.left), ("C", layer.pair.right))
        shapes = {name: blocks + form.storage_shape for name, form in sides}
        shapes |= {f"m_{name}": blocks + form.momentum_shape for name, form in sides if form.has_momentum}
        return shapes | ({"level": blocks} if self.config.relative else {}) | {"forms": (2,)}

    def dtypes(self, layer: FactoredLayer) -> dict[str, torch.dtype]:
        stored = self.config.dtype or layer.computing_dtype
        # A level is in float64, where the square of no gradient in float32 overflows or vanishes.
        own = {"level": torch.float64, "forms": torch.int64}
        return {key: own.get(key, stored) for key in self.shapes(layer)}

    def initial(self, layer: FactoredLayer, key: str) -> Tensor:
        device, dtype = layer.layer.weight.device, self.dtypes(layer)[key]
        if key in ("K", "C"):
            return layer.form(key).identity(layer.layer.blocks, dtype, device)
        if key == "forms":
            return torch.tensor([form_number(form) for form in layer.pair], dtype=dtype, device=device)
        return torch.zeros(self.shapes(layer)[key], dtype=dtype, device=device)

    def loaded(self, layer: FactoredLayer, state: State) -> State:
        if "forms" not in state:
            return state
        state = dict(state)
        for name, form, old in zip(("K", "C"), layer.pair, state["forms"].tolist(), strict=True):
            number = form_number(form)
            if old != number and max(old, number) >= len(FORMS):
                raise ValueError(
                    f"the state is of another model, structure or preset: {name} of {layer.name} was not saved as "
                    f"{form}; build the optimizer as in the run that saved it"
                )
            if name in state and old != number:
                state[name] = _converted(form, FORMS[old], state[name])
                state["forms"] = self.initial(layer, "forms")
            momentum = f"m_{name}"
            if form.has_momentum and name in state and momentum not in state:
                state[momentum] = self.initial(layer, momentum)
            elif not form.has_momentum:
                state.pop(momentum, None)
        return state

    def check(self, layers: Iterable[FactoredLayer], settings: Settings) -> None:
        if settings["precond_momentum"] and not all(form.has_momentum for layer in layers for form in layer.pair):
            raise RuntimeError(
                f"precond_momentum was 0 when the optimizer was built and is {settings['precond_momentum']!r} now; "
                "build it with precond_momentum as a function of the step, so that factors have room for it"
            )

    # ------------------------------------------------------------------ the update
    def projection_factors(self, layer: FactoredLayer, state: State) -> Factors:
        sides = zip(("K", "C"), layer.pair, strict=True)
        k, c = (
            None if form.keeps_matrix else form.unpack(state[name].to(layer.computing_dtype)) for name, form in sides
        )
        return k, c

    def factors(self, stack: Stack) -> tuple[Element, Element]:
        """Return K and C in the type that is computed in."""
        pair = stack.pair
        return pair.left.unpack(stack.get("K").to(stack.dtype)), pair.right.unpack(stack.get("C").to(stack.dtype))

    def update(self, stack: Stack, settings: Settings, source: Statistics | Tensor, ok: Tensor) -> Tensor:
        config, pair = self.config, stack.pair
        k, c = self.factors(stack)
        level = stack.get("level") if config.relative else None
        sides = zip(("m_K", "m_C"), pair, strict=True)
        m_k, m_c = (stack.get(key).to(stack.dtype) if form.has_momentum else None for key, form in sides)
        numbers = UpdateSettings(
            settings["precond_momentum"],
            settings["precond_lr"],
            settings["damping"],
            config.max_factor_step,
            config.order,
            config.convention == "inside",
        )
        function = compiled(update, pair) if self._compiles(pair) else update
        new = function(pair, numbers, k, c, (m_k, m_c), level, source, ok.to(k[0].device), len(stack))
        if new.level is not None:
            stack.set("level", new.level)
        values = {"K": new.k, "C": new.c, "m_K": new.m_k, "m_C": new.m_c}
        for number, (key, value) in enumerate(values.items()):
            if value is not None:
                self._store(stack, key, value, (settings["step"], number))
        self.forget_products(stack.layers)
        return new.finite

    def _compiles(self, pair: FactorPair) -> bool:
        """Return whether an update is compiled; large products and Fourier transforms take longer that way."""
        if not (self.config.compile and can_compile()):
            return False
        return all(
            isinstance(form, StructuredFactor) and not form.keeps_matrix and not isinstance(form.group, Toeplitz)
            for form in pair
        )

    def _store(self, stack: Stack, key: str, new: Tensor, seeds: tuple[int, int]) -> None:
        """Store a new value in the type of the state; half precision is rounded at random.

        The seed is another for each tensor at each update, so that a run that is resumed goes on alike.
        """
        stack.set(key, new)
        dtype = self.config.dtype or new.dtype
        if dtype != new.dtype:
            step, number = seeds

            def stored(layer: FactoredLayer, x: Tensor) -> Tensor:
                return rounded(x, dtype, hash((self.config.seed, step, layer.index, number)) % 2**63)

            stack.each(key, stored)

    # ------------------------------------------------------------------ the preconditioner
    def apply(
        self, stack: Stack, side: Side, rows: Tensor, uses: int, overwrite: bool, scratch: Tensor | None
    ) -> Tensor:
        form, stored = stack.form(side), self.config.dtype or stack.dtype
        dtype = promoted(stored, rows.dtype)
        rows, scratch = rows.to(dtype), scratch if scratch is not None and scratch.dtype == dtype else None
        if isinstance(form, DenseFactor) and not self.keeps_product(form, rows.shape[-2], uses):
            return form.apply_twice(form.unpack(stack.get(side).to(dtype)), rows)
        return form.apply_square(self._product(stack, side, form, dtype), rows, overwrite, scratch)

    def keeps_product(self, form: FactorForm, rows: int, uses: int) -> bool:
        """Return whether ``A A^T`` is stored between updates, for uses with so many rows."""
        return not self._low_memory and bool(form.square_size) and form.keeps_square(rows, uses)

    def _product(self, stack: Stack, side: Side, form: FactorForm, dtype: torch.dtype) -> Element:
        """Return ``A A^T``, cached until A changes, unless it is A itself or memory is to be low."""
        if self._low_memory or not form.square_size:
            return form.square(form.unpack(stack.get(side).to(dtype)))
        place = dtype, stack.layers[0].layer.weight.device
        keys = [(layer.index, side) for layer in stack.layers]
        known = [self._products.get(key) for key in keys]
        if any(product is None or (product[0].dtype, product[0].device) != place for product in known):
            square = form.square(form.unpack(stack.get(side).to(dtype)))
            parts = zip(*(parted(block, len(stack)) for block in square), strict=True)
            self._products |= dict(zip(keys, parts, strict=True))
        if len(stack) == 1:
            return self._products[keys[0]]
        return tuple(torch.cat(blocks) for blocks in zip(*(self._products[key] for key in keys), strict=True))

    def levels(self, stack: Stack) -> Tensor | None:
        if not self.config.relative:
            return None
        level = stack.get("level")
        return torch.where(level > 0, level, 1.0)

    def forget_products(self, layers: Iterable[FactoredLayer]) -> None:
        for layer in layers:
            self._products.pop((layer.index, "K"), None)
            self._products.pop((layer.index, "C"), None)

    # ------------------------------------------------------------------ for several ranks, and for people
    def sent(self, layer: FactoredLayer, key: str, value: Tensor) -> Tensor:
        """Return a part of the state as it is sent; a symmetric matrix is sent with each number once."""
        return pack_symmetric(value) if self._is_symmetric(layer, key) else value

    def received(self, layer: FactoredLayer, key: str, sent: Tensor) -> Tensor:
        return unpack_symmetric(sent, layer.form(key).size) if self._is_symmetric(layer, key) else sent

    def _is_symmetric(self, layer: FactoredLayer, key: str) -> bool:
        return key in ("K", "C") and layer.form(key).form == "gram"

    def work(self, layer: FactoredLayer) -> tuple[int, int]:
        return update_and_step(layer.pair, layer.layer.blocks, self.config.order)

    def product_bytes(self, layer: FactoredLayer, uses: int) -> int:
        sides = zip(layer.pair, (layer.layer.d, layer.layer.p), strict=True)
        kept = sum(form.square_size for form, rows in sides if self.keeps_product(form, rows, uses))
        dtype = promoted(self.config.dtype or layer.computing_dtype, layer.layer.weight.dtype)
        return layer.layer.blocks * kept * dtype.itemsize

    @property
    def cached_tensors(self) -> list[Tensor]:
        return [block for product in self._products.values() for block in product]


def _converted(form: FactorForm, old: str, stored: Tensor) -> Tensor:
    """Convert a stored factor of another form: ``K K^T`` becomes its Cholesky factor, and K its product with itself.

    One of another size stays as it is: its shape is refused later.
    """
    old_form = DenseFactor(form.size) if old == "factor" else GramFactor(form.size, old == "packed gram")
    if tuple(stored.shape[1:]) != old_form.storage_shape:
        return stored
    wide = old_form.unpack(stored.to(torch.float64))
    if old != "factor" and isinstance(form, GramFactor):
        return form.pack(wide).to(stored.dtype).contiguous()
    return form.pack(form.from_dense(old_form.to_dense(wide))).to(stored.dtype).contiguous()


# ---------------------------------------------------------------------- schedules of b1
def published_precond_lr(step: int) -> float:
    """Return b1 of the paper's warm-up: 0.0002 for 100 iterations, 0.002 up to 500, then 0.01."""
    return 0.0002 if step < 100 else 0.002 if step < 500 else 0.01


def early_average(step: int) -> float:
    """Return the default b1: 1/2, 1/3, 1/4 and 1/5 from then on, so that the first updates are plain averages."""
    return max(0.2, 1 / (step + 2))
