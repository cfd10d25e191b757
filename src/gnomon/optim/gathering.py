"""What the hooks give: statistics and rows of layers, from a backward pass until the step that uses them."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from ..groups import Element
from ..manifolds import full_precision
from .capture import Capture
from .exchange import decoded, encoded
from .layers import Approximation, ModuleLayer, Thinning
from .moves import Tracked
from .rounding import promoted
from .sampling import Likelihood, sampled_loss
from .settings import Settings
from .shortcut import Shortcut
from .stepping import Stepping


class Gathering(Stepping):
    """Gathers what layers see of a batch, on this rank and with the others."""

    _model: nn.Module
    _tracked: dict[nn.Parameter, Tracked]
    _views: dict[nn.Module, tuple[Tracked, ModuleLayer]]
    _due: set[nn.Parameter]
    """The parameters whose factors the coming step updates."""
    _capture: Capture | None
    _closed: bool
    _shortcut: Shortcut
    _fixed: Settings
    _fisher: Literal["empirical", "mc"]
    _approx: Approximation | Literal["auto"]
    _scaler: torch.amp.GradScaler | None
    _observing: bool
    """Whether the backward pass is one whose gradients are wanted."""

    @abstractmethod
    def _seen_from(self, tracked: Tracked) -> tuple[Element | None, Element | None]:
        """The factors from which statistics are seen; None for as they are."""

    @abstractmethod
    def _arrange(self) -> None:
        """Say which rank updates which layer, where they are several."""

    @abstractmethod
    def _adapt(self, tracked: Tracked) -> None:
        """State follows its parameters to another device or type."""

    @abstractmethod
    def _count(self, name: str, happened: Tensor) -> None:
        """Add to a number that torch saves and loads."""

    def _computing_dtype(self, tracked: Tracked) -> torch.dtype:
        """In which statistics and factors are computed: the weight's type, and float32 at least."""
        return promoted(tracked.layer.weight.dtype, torch.float32)

    # ------------------------------------------------------------------ of a batch
    def _wants(self, module: nn.Module, x: Tensor) -> bool:
        """Whether a layer's rows are of use in the coming step."""
        if self._sharing.notice_wrapper(self._model):
            self._arrange()
        if not self._sharing.is_passing:
            return False
        tracked, view = self._views[module]
        if view.weight in self._due:
            tracked.expected += 1
            return True
        return self._may_go_through_rows(tracked, view, x)

    def _receive(self, module: nn.Module, x: Tensor, g: Tensor, number: int) -> None:
        """A batch of inputs and output gradients of a layer, before a step that can use them."""
        tracked, view = self._views[module]
        weight = view.weight
        if not (self._observing and weight.requires_grad):
            return
        task = torch._C._current_graph_task_id()
        if tracked.backward != task and self._is_afresh(weight):
            tracked.forget()  # the gradients were dropped without zero_grad(): so is what came with them
        tracked.backward = task
        with full_precision(weight):
            self._remember_rows(tracked, view, x, g)
            if weight in self._due:
                self._gather(tracked, view, x, g, number)
                self._hand_over(tracked, task)

    def _gather(self, tracked: Tracked, view: ModuleLayer, x: Tensor, g: Tensor, number: int) -> None:
        """Statistics of a batch are added to those that are there."""
        if g.numel() == 0:  # a batch of none
            self._count("skipped_updates", torch.ones((), dtype=torch.bool, device=g.device))
            return
        samples, before = view.samples(x), tracked.samples.get(number, 0)
        tracked.samples[number] = max(samples, before)
        approximation = view.usual_approximation if self._approx == "auto" else self._approx
        rows, thin = view.count(x, g, approximation), Thinning()
        if self._fixed["subsample"]:
            thin = view.thinning(x, g, approximation, self._sharing.ranks.count)
        if thin.samples > 1:
            x, g = x[:: thin.samples], g[:: thin.samples]
        self._adapt(tracked)
        x, g = view.rows(*self._typed(tracked, view, x, g), approximation, thin.positions)
        if thin != Thinning():
            g = g * math.sqrt(rows / g.shape[1])  # its squares count as often as makes up for those left out
        k, c = self._seen_from(tracked)
        part = tracked.factors.statistics(k, c, x, g, terms=max(samples - before, 0))
        known = tracked.statistics
        tracked.statistics = part if known is None else tracked.factors.total(k, c, known, part)

    def _typed(self, tracked: Tracked, view: ModuleLayer, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """In the type that is computed in, g without the loss's scale."""
        dtype, scale = self._computing_dtype(tracked), self._loss_scale()
        g = g.to(dtype)
        return x if view.one_hot else x.to(dtype), g if scale is None else g / scale

    def _remember_rows(self, tracked: Tracked, view: ModuleLayer, x: Tensor, g: Tensor) -> None:
        """Keep the rows of which the gradient is the product, where they are few and the only ones."""
        tracked.passes += 1
        alone = tracked.passes == 1 and view.weight.grad is None and len(tracked.views) == 1
        usable = alone and bool(g.numel()) and g.dtype == x.dtype and self._may_go_through_rows(tracked, view, x)
        tracked.rows = view.rows(*self._typed(tracked, view, x, g)) if usable else None

    def _may_go_through_rows(self, tracked: Tracked, view: ModuleLayer, x: Tensor) -> bool:
        """Ranks that share their gradients have only some of the rows each, and sampled targets give others."""
        return (
            self._fisher == "empirical"
            and self._sharing.ranks.count == 1
            and self._shortcut.may_serve(tracked.factors, view, x, self.param_groups[0])
        )

    def _loss_scale(self) -> Tensor | None:
        """By what a ``GradScaler`` has multiplied the loss, if it has; targets of :meth:`observe` have no scale."""
        scale: Tensor | None = getattr(self._scaler, "_scale", None)  # none before the first loss, and where it is off
        return None if self._fisher == "mc" else scale

    # ------------------------------------------------------------------ of all ranks
    def _is_afresh(self, weight: nn.Parameter) -> bool:
        """Whether gradients were dropped since the last backward pass; sharded ones may be gathered out of sight."""
        return weight.grad is None and not self._sharing.ranks.is_sharded

    def _hand_over(self, tracked: Tracked, task: int) -> None:
        """A layer's statistics go on their way once the backward pass has been through all its uses."""
        exchange = self._sharing.exchange
        if exchange is None:
            return
        if exchange.is_new(task):
            if all(self._is_afresh(t.layer.weight) for t in self._tracked.values() if t.views):
                exchange.forget()
            exchange.begin(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        tracked.expected -= 1
        if self._may_send() and tracked.expected <= 0:
            self._put(tracked)
            exchange.send_full(self._due)

    def _may_send(self) -> bool:
        """Whether statistics may leave during a backward pass; the first ones wait until ranks agree on their units."""
        exchange = self._sharing.exchange
        return exchange is not None and self._sharing.sends_now and exchange.has_units(self._due)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """At the end of a backward pass the rest goes on its way too, unless more passes come before the step."""
        exchange = self._sharing.exchange
        if exchange is not None and self._may_send():
            for tracked in self._tracked.values():
                self._put(tracked)
            exchange.send_rest(self._due)

    def _put(self, tracked: Tracked) -> None:
        if self._sharing.exchange is not None and tracked.statistics is not None:
            exchange = self._sharing.exchange
            units = exchange.units[tracked.index]
            exchange.put(tracked, encoded(tracked, self._seen_from(tracked), tracked.statistics, units))
            tracked.statistics = None

    def _share_statistics(self) -> None:
        """The statistics are those of all ranks' batches together, as the gradients are, where a rank needs them."""
        exchange = self._sharing.exchange
        if exchange is None or not self._due or self._closed:
            return
        due = [t for t in self._tracked.values() if t.views and t.layer.weight in self._due]
        exchange.agree_on_units(self._due)
        for tracked in due:
            self._put(tracked)
        sums = exchange.collect(self._due)
        for tracked in due:
            vector = sums.get(tracked.index)
            # A layer that was never seen may have been at other ranks: its count of rows tells.
            if vector is not None and (tracked.backward is not None or float(vector[-2]) > 0):
                units, count = exchange.units[tracked.index], self._sharing.ranks.count
                tracked.statistics = decoded(tracked, vector, units, count)

    def observe(self, output: Tensor, likelihood: Likelihood = "categorical") -> None:
        """For ``fisher="mc"``: statistics from targets that are drawn from the model's own predictions.

        Call it with the model's output before the loss's backward pass; the graph is kept for that. ``"categorical"``
        takes logits along the last dimension, ``"bernoulli"`` logits, ``"gaussian"`` means with unit variance. Before a
        step that does not update the factors it does nothing.
        """
        if self._fisher != "mc":
            raise RuntimeError("observe() is for fisher='mc'; with fisher='empirical' the loss's gradients are used")
        if self._capture is None or not self._due:
            return
        weights = [t.layer.weight for t in self._tracked.values() if t.views and t.layer.weight.requires_grad]
        self._observing = True
        try:
            torch.autograd.grad(sampled_loss(output, likelihood), weights, retain_graph=True, allow_unused=True)
        finally:
            self._observing = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the hooks have gathered with them."""
        super().zero_grad(set_to_none)
        for tracked in self._tracked.values():
            tracked.forget()
        if self._sharing.exchange is not None:
            self._sharing.exchange.forget()
