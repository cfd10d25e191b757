"""The collector: it makes statistics, and rows, of what hooks see of a batch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...linalg import full_precision
from ..torch_internals import active_wrapper, at_end_of_backward_pass, current_backward_pass, loss_scale
from .config import CurvatureConfig
from .hooks import Capture
from .layers.base import FactoredLayer, Layer, Settings, Thinning
from .preconditioner import Preconditioner
from .record import Before, Record
from .sampling import Likelihood, sampled_loss
from .shortcut import Shortcut
from .statistics import Statistics, statistics_of, total
from .strategy import Alone


class Collector:
    """Watches the modules of layers and collects statistics for those whose factors the coming step updates."""

    strategy: Alone
    """Who computes what; the optimizer sets it."""

    def __init__(self, config: CurvatureConfig, preconditioner: Preconditioner) -> None:
        self.config, self.preconditioner = config, preconditioner
        self.due: set[nn.Parameter] = set()
        """The weights whose factors the coming step updates."""
        self.empty_batches = 0
        self.is_closed = False
        self.observes = config.fisher == "empirical"
        """Whether the running backward pass is one whose gradients are wanted."""
        self.found_wrapper: weakref.WeakMethod[Callable[[Any], None]] | None = None
        """Called when the model turns out to be wrapped in ``DistributedDataParallel``."""
        self._model: nn.Module | None = None
        self._records: dict[int, Record] = {}
        self._layers: list[FactoredLayer] = []
        self._views: dict[nn.Module, tuple[FactoredLayer, Layer]] = {}
        self._running: dict[int, dict[int, Before]] = {}
        """By backward pass that is running, the layers that it has reached as it found them."""
        self._capture: Capture | None = None
        self._shortcut = Shortcut()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_capture": None, "found_wrapper": None, "strategy": None, "_running": {}}

    # ------------------------------------------------------------------ hooks
    def watch(self, model: nn.Module, layers: Collection[FactoredLayer]) -> None:
        """Watch the modules of all layers, in place of those that are watched now."""
        if self._capture is not None:
            self._capture.close()
        self._model, self._layers = model, list(layers)
        self._views = {view.module: (layer, view) for layer in layers for view in layer.views}
        for layer in layers:
            self._records.setdefault(layer.index, Record())
        watches, was_called = bool(self._views) and not self.is_closed, self.was_called
        self._capture = Capture(model, list(self._views), self._wants, self._receive) if watches else None
        if self._capture is not None:
            self._capture.was_called = was_called

    def close(self) -> None:
        """Remove the hooks for good."""
        self.is_closed = True
        if self._capture is not None:
            self._capture.close()
            self._capture = None

    @property
    def takes_gradients(self) -> bool:
        """Whether the gradient of the loss may stand in for statistics."""
        return self.config.fisher == "empirical"

    @property
    def is_watching(self) -> bool:
        return self._capture is not None

    @property
    def was_called(self) -> bool:
        """Whether any module that is watched has been called since."""
        return self._capture is not None and self._capture.was_called

    def _wants(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether a module's rows are of use in the coming step."""
        if self.strategy.count == 1 and (wrapper := active_wrapper()) is not None and self.found_wrapper is not None:
            adopt = self.found_wrapper()
            if adopt is not None and any(part is self._model for part in wrapper.modules()):
                adopt(wrapper)
        if not self.strategy.takes_part:
            return False
        layer, view = self._views[module]
        if view.weight in self.due:
            self._records[layer.index].expected += 1
            return True
        return self._may_use_rows(layer, view, x)

    def _receive(self, module: nn.Module, x: Tensor, g: Tensor, number: int) -> None:
        """Take a batch of inputs and output gradients of a module."""
        layer, view = self._views[module]
        record, weight = self._records[layer.index], view.weight
        if not (self.observes and weight.requires_grad and is_applied(view, x, g)):
            return
        backward_pass = current_backward_pass()
        if record.last_pass != backward_pass:
            if record.is_provisional or self.strategy.is_fresh(weight):
                record.forget()  # the gradients were dropped without zero_grad(), and so is what came with them
            self._begin_pass(backward_pass, layer, record)
        record.last_pass = backward_pass
        with full_precision(weight):
            self._keep_rows(record, layer, view, x, g)
            if weight in self.due:
                self._add_statistics(record, layer, view, x, g, number)
                self.strategy.hand_over(self, layer, backward_pass)

    # ------------------------------------------------------------------ passes that count
    def _begin_pass(self, number: int, layer: FactoredLayer, record: Record) -> None:
        """Remember a layer as a pass finds it, until its end shows whether the pass was one for a step.

        Ranks add gradients of their own and send statistics within a pass, so there all passes count. So do those of
        :meth:`observe`, which leave gradients alone.
        """
        if self.strategy.count > 1 or self.strategy.is_sharded or self.config.fisher == "mc":
            return
        if number not in self._running:
            self._running[number] = {}
            weak = weakref.ref(self)

            def end() -> None:
                if (me := weak()) is not None:
                    me._end_pass(number)

            at_end_of_backward_pass(end)
        self._running[number][layer.index] = Before.of(layer.weight, record)

    def _end_pass(self, number: int) -> None:
        """Take back what a pass has shown that added to no gradient, as one for the gradient of an input does.

        If it is the only one so far it counts for the time being: somebody may put gradients into place by hand.
        """
        for index, before in self._running.pop(number, {}).items():
            record = self._records[index]
            if before.has_new_gradient():
                record.is_provisional = False
            elif before.record.passes:
                record.return_to(before.record)
            else:
                record.is_provisional, record.rows = True, None

    # ------------------------------------------------------------------ statistics
    def _add_statistics(
        self, record: Record, layer: FactoredLayer, view: Layer, x: Tensor, g: Tensor, number: int
    ) -> None:
        """Add the statistics of a batch to those of the record."""
        if g.numel() == 0:
            self.empty_batches += 1
            return
        samples, before = view.samples(x), record.samples.get(number, 0)
        record.samples[number] = max(samples, before)
        approximation = view.usual_approximation if self.config.approx == "auto" else self.config.approx
        count, thin = view.count(x, g, approximation), Thinning()
        record.row_count += view.count(x, g, "expand")
        if self.config.subsample:
            thin = view.thinning(x, g, approximation, self.strategy.count)
        if thin.samples > 1:
            x, g = x[:: thin.samples], g[:: thin.samples]
        self.preconditioner.follow_parameters(layer)
        x, g = view.rows(*self._typed(layer, view, x, g), approximation, thin.positions)
        if thin != Thinning():
            g = g * math.sqrt(count / g.shape[1])  # the squares of the rows that are left count for those left out
        factors, forms = self.preconditioner.projection_factors(layer), layer.pair
        part = statistics_of(forms, factors, x, g, terms=max(samples - before, 0))
        record.statistics = part if record.statistics is None else total(forms, factors, record.statistics, part)

    def _typed(self, layer: FactoredLayer, view: Layer, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and g in the type that is computed in, g without the factor of a ``GradScaler``."""
        dtype = layer.computing_dtype
        scaler = None if self.config.fisher == "mc" else self.config.scaler  # targets that observe() draws have none
        scale = None if scaler is None else loss_scale(scaler)
        g = g.to(dtype)
        return x if view.takes_indices else x.to(dtype), g if scale is None else g / scale.to(g.device)

    def observe(self, output: Tensor, likelihood: Likelihood) -> None:
        """Collect statistics from targets that are drawn from the model's predictions, if any layer is due."""
        if self.config.fisher != "mc":
            raise RuntimeError("observe() is for fisher='mc'; with fisher='empirical' the loss's gradients are used")
        if not (self.is_watching and self.due):
            return
        weights = [layer.weight for layer in self.watched() if layer.weight.requires_grad]
        hidden = next((node for node in _nodes(output) if node.name() == REENTRANT), None)
        if hidden is not None:
            raise RuntimeError(
                "observe() cannot see the layers in checkpoint(..., use_reentrant=True), which work in .backward() "
                "alone; give use_reentrant=False, or build the optimizer with fisher='empirical'"
            )
        self.observes = True
        try:
            torch.autograd.grad(sampled_loss(output, likelihood), weights, retain_graph=True, allow_unused=True)
        finally:
            self.observes = False

    def check_observed(self) -> None:
        """Raise where the coming step needs :meth:`observe` and it was not called."""
        if self.config.fisher != "mc" or not (self.is_watching and self.due):
            return
        reached = any(layer.weight.grad is not None for layer in self.watched())
        if reached and not (self.empty_batches or self.strategy.has_statistics(self)):
            raise RuntimeError("fisher='mc' needs observe(output) before each backward pass; there was none")

    def statistics(self, layer: FactoredLayer) -> Statistics | None:
        return self._records[layer.index].statistics

    def put_statistics(self, layer: FactoredLayer, statistics: Statistics | None) -> None:
        """Replace the statistics of a layer, by those of all ranks or by none."""
        self._records[layer.index].statistics = statistics

    def is_complete(self, layer: FactoredLayer) -> bool:
        """Count one more use of a layer; return whether the backward pass has been through all its uses."""
        record = self._records[layer.index]
        record.expected -= 1
        return record.expected <= 0

    def was_reached(self, layer: FactoredLayer) -> bool:
        """Return whether any backward pass has ever been through a module of the layer."""
        return self._records[layer.index].last_pass is not None

    def watched(self) -> list[FactoredLayer]:
        """Return the layers whose rows a hook can see."""
        return [layer for layer in self._layers if layer.views]

    # ------------------------------------------------------------------ rows
    def _keep_rows(self, record: Record, layer: FactoredLayer, view: Layer, x: Tensor, g: Tensor) -> None:
        """Keep the rows of which the gradient is the product, where they are few and the only ones."""
        record.passes += 1
        alone = record.passes == 1 and view.weight.grad is None and len(layer.views) == 1
        usable = alone and bool(g.numel()) and g.dtype == x.dtype and self._may_use_rows(layer, view, x)
        record.rows = view.rows(*self._typed(layer, view, x, g)) if usable else None

    def _may_use_rows(self, layer: FactoredLayer, view: Layer, x: Tensor) -> bool:
        """Return whether rows may stand for a gradient.

        Ranks have only some of the rows each, and rows of drawn targets do not give the gradient.
        """
        alone = self.config.fisher == "empirical" and self.strategy.count == 1
        return alone and self._shortcut.may_serve(layer, view, x)

    def row_count(self, layer: FactoredLayer) -> int:
        """Return the number of rows that statistics of this rank come from since the last step."""
        return self._records[layer.index].row_count

    def verify_rows(self, layers: Iterable[FactoredLayer], settings: Settings) -> Tensor | None:
        """Drop rows that cannot be used; return whether the others are right, or None if there are no others."""
        return self._shortcut.verified([(layer, self._records[layer.index]) for layer in layers], settings)

    def rows(self, layer: FactoredLayer) -> tuple[Tensor, Tensor] | None:
        return self._records[layer.index].rows

    def read_verdict(self, settings: Settings) -> None:
        """Bring the setting ``through_rows`` up to date."""
        self._shortcut.read_verdict(settings)

    def take_empty_batches(self) -> int:
        """Return the number of batches without rows since the last time."""
        count, self.empty_batches = self.empty_batches, 0
        return count

    # ------------------------------------------------------------------ the end of a step
    def forget(self) -> None:
        """Drop what the backward passes have shown."""
        for record in self._records.values():
            record.forget()

    def end_step(self, due: set[nn.Parameter]) -> None:
        """Drop what the step has used, and say whose factors the next one updates."""
        self.forget()
        self._running.clear()  # of passes that ended in an error
        for record in self._records.values():
            record.expected = 0
        self.due = due


def is_applied(view: Layer, x: Tensor, g: Tensor) -> bool:
    """Return whether input and output have the shapes of the layer's kind: a subclass may compute something else."""
    if view.takes_indices:
        return g.shape[:-1] == x.shape
    if view.has_axes:
        return g.ndim == x.ndim
    return g.shape[:-1] == x.shape[:-1] and x.shape[-1] + (view.bias is not None) == view.p


REENTRANT = "CheckpointFunctionBackward"
"""The node of ``checkpoint(..., use_reentrant=True)`` in a graph."""


def _nodes(output: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph that has computed a tensor."""
    found, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [other for other, _ in node.next_functions]
            yield node
