"""The factors of INGD in an optimizer's state: how they are stored, updated, applied, and sent between ranks.

The update is the pure function of :mod:`.factor_update`. A factor has one of three forms with the same methods
(:class:`~.factor_forms.FactorForm`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...groups import Dense, Element, Group, Toeplitz
from ...linalg import HALF, pack_symmetric, promoted, unpack_symmetric
from .compiling import can_compile, compiled
from .config import FactorConfig
from .cost_model import update_and_step
from .dense_factor import DenseFactor
from .factor_forms import FactorForm, FactorPair
from .factor_update import UpdateSettings, update
from .gram_factor import GramFactor, is_safe
from .layers.base import FactoredLayer, Settings, Side, Stack, State, parted
from .rounding import rounded
from .statistics import Factors, Statistics
from .structured_factor import StructuredFactor

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
