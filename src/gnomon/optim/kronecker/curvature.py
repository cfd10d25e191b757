"""What a batch says about layers: hooks collect the inputs and output gradients of modules as statistics and rows.

Rows are kept beside statistics where they are few: ``C C^T G K K^T = (g C C^T)^T (x K K^T)`` where ``G = g^T x``. That
holds as long as the gradient of a weight is what its layer's batch gave and nothing else. It does not hold where the
loss has a penalty on weights, or where somebody changed the gradient, so each step verifies it.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...linalg import HALF, full_precision, probe
from ..torch_internals import (
    active_wrapper,
    at_end_of_backward_pass,
    base_of,
    current_backward_pass,
    loss_scale,
    run_outside_of_graphs,
    version,
)
from .config import CurvatureConfig
from .layers.base import FactoredLayer, Layer, Settings, Thinning
from .preconditioner import Preconditioner
from .sampling import Likelihood, sampled_loss
from .statistics import Statistics, statistics_of, total
from .strategy import Alone

THROUGH_ROWS = "through_rows"
"""The setting that says whether gradients were found to be products of rows; absent before the first step."""


@dataclass
class Record:
    """What the backward passes since the last step have shown of a layer."""

    statistics: Statistics | None = None
    rows: tuple[Tensor, Tensor] | None = None
    """x and g with ``G = g^T x``, where they are few and the only ones."""
    passes: int = 0
    """The number of backward passes of the loss through a module of the layer."""
    row_count: int = 0
    """The number of rows with one for each position, of which statistics may have used a part."""
    samples: dict[int, int] = field(default_factory=dict)
    """The number of samples by forward pass: a layer that is used twice in one pass counts its samples once."""
    expected: int = 0
    """The number of uses in forward passes that no backward pass has come back through."""
    last_pass: int | None = None
    """The last backward pass through a module of the layer, in this and earlier steps; None where there was none."""
    is_provisional: bool = False
    """Whether no pass since the last step has added to the gradient of the weight."""

    def forget(self) -> None:
        self.statistics, self.rows, self.passes, self.row_count = None, None, 0, 0
        self.samples, self.is_provisional = {}, False

    def return_to(self, before: Record) -> None:
        """Take back a pass."""
        self.statistics, self.rows, self.passes = before.statistics, before.rows, before.passes
        self.samples, self.last_pass, self.row_count = before.samples, before.last_pass, before.row_count


@dataclass(frozen=True)
class Before:
    """A layer as a backward pass found it."""

    weight: nn.Parameter
    record: Record
    gradient: Tensor | None
    version: int

    @classmethod
    def of(cls, weight: nn.Parameter, record: Record) -> Before:
        kept = replace(record, samples=dict(record.samples))
        return cls(weight, kept, weight.grad, 0 if weight.grad is None else version(weight.grad))

    def has_new_gradient(self) -> bool:
        """Whether something was added to the gradient, in its memory or in a new one."""
        gradient = self.weight.grad
        return gradient is not None and (gradient is not self.gradient or version(gradient) != self.version)


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
        """Whether a module's rows are of use in the coming step."""
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
        """A batch of inputs and output gradients of a module."""
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
        """x and g in the type that is computed in, g without the factor of a ``GradScaler``."""
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
        """Count one more use of a layer; gives whether the backward pass has been through all its uses."""
        record = self._records[layer.index]
        record.expected -= 1
        return record.expected <= 0

    def was_reached(self, layer: FactoredLayer) -> bool:
        """Whether any backward pass has ever been through a module of the layer."""
        return self._records[layer.index].last_pass is not None

    def watched(self) -> list[FactoredLayer]:
        """The layers whose rows a hook can see."""
        return [layer for layer in self._layers if layer.views]

    # ------------------------------------------------------------------ rows
    def _keep_rows(self, record: Record, layer: FactoredLayer, view: Layer, x: Tensor, g: Tensor) -> None:
        """Keep the rows of which the gradient is the product, where they are few and the only ones."""
        record.passes += 1
        alone = record.passes == 1 and view.weight.grad is None and len(layer.views) == 1
        usable = alone and bool(g.numel()) and g.dtype == x.dtype and self._may_use_rows(layer, view, x)
        record.rows = view.rows(*self._typed(layer, view, x, g)) if usable else None

    def _may_use_rows(self, layer: FactoredLayer, view: Layer, x: Tensor) -> bool:
        """Ranks have only some of the rows each, and rows of drawn targets do not give the gradient."""
        alone = self.config.fisher == "empirical" and self.strategy.count == 1
        return alone and self._shortcut.may_serve(layer, view, x)

    def row_count(self, layer: FactoredLayer) -> int:
        """The number of rows that statistics of this rank come from since the last step."""
        return self._records[layer.index].row_count

    def verify_rows(self, layers: Iterable[FactoredLayer], settings: Settings) -> Tensor | None:
        """Drop rows that cannot be used; gives whether the others are right, or None if there are no others."""
        return self._shortcut.verified([(layer, self._records[layer.index]) for layer in layers], settings)

    def rows(self, layer: FactoredLayer) -> tuple[Tensor, Tensor] | None:
        return self._records[layer.index].rows

    def read_verdict(self, settings: Settings) -> None:
        """Bring the setting ``through_rows`` up to date."""
        self._shortcut.read_verdict(settings)

    def take_empty_batches(self) -> int:
        """The number of batches without rows since the last time."""
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


class Shortcut:
    """Which layers are preconditioned through their rows, and whether the gradient is their product."""

    def __init__(self) -> None:
        self._is_right = True
        self._found_wrong: Tensor | None = None
        """The host's copy of what the device found at the last step."""

    def may_serve(self, layer: FactoredLayer, view: Layer, x: Tensor) -> bool:
        """Whether a batch has so few rows that to precondition them is cheaper, in the gradient's own type.

        From n rows it takes ``n (cost_K + cost_C + p d)`` multiplications instead of ``d cost_K + p cost_C``. A
        gradient in half precision has too few digits to show whether it is the product of its rows.
        """
        dtype = view.weight.dtype
        if not (view.rows_give_gradient and self._is_right and x.dtype == dtype) or dtype in HALF:
            return False
        n, cost_k, cost_c = x.numel() // max(x.shape[-1], 1), layer.pair.left.row_cost, layer.pair.right.row_cost
        return n * (cost_k + cost_c + view.p * view.d) < view.d * cost_k + view.p * cost_c

    def read_verdict(self, settings: Settings) -> None:
        """Take notice of what the device has told the host until now, and of a state that was loaded."""
        if self._found_wrong is not None and self._found_wrong.item():
            settings[THROUGH_ROWS] = False
        self._is_right = settings.get(THROUGH_ROWS, True)

    def verified(self, candidates: list[tuple[FactoredLayer, Record]], settings: Settings) -> Tensor | None:
        """Drop rows that cannot be used; gives whether the others are right, as a tensor.

        The version of a gradient shows that it was clipped. Other changes show along a fixed vector: at the first step
        the host waits for that. Later it reads what a step before has found, without waiting; the step itself is not
        taken where the result is False. After that all gradients are preconditioned as they are.
        """
        self.read_verdict(settings)
        found = []
        for layer, record in candidates:
            if record.rows is None:
                continue
            if self._is_right and _is_untouched(layer):
                found.append(_is_product(layer, record.rows))
            else:
                record.rows = None
        if not found:
            return None
        right = torch.stack(found).all()
        if THROUGH_ROWS not in settings:
            settings[THROUGH_ROWS] = self._is_right = bool(right)
            if not self._is_right:
                for _, record in candidates:
                    record.rows = None
                return None
        self._tell(~right)
        return right

    def _tell(self, wrong: Tensor) -> None:
        if self._found_wrong is None:
            self._found_wrong = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=wrong.device.type == "cuda")
        self._found_wrong.copy_(wrong, non_blocking=True)


def _is_untouched(layer: FactoredLayer) -> bool:
    """Whether the gradients are as the backward pass made them, as far as torch knows."""
    return all(p.grad is not None and version(p.grad) == 0 for p in layer.layer.parameters)


def _is_product(layer: FactoredLayer, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Whether ``G u = g^T (x u)`` for a fixed u, up to rounding."""
    x, g = rows
    u = probe(x.shape[-1], x.dtype, x.device)
    gradients = [p.grad for p in layer.layer.parameters if p.grad is not None]
    weight, bias = gradients[0], gradients[1:]
    actual = weight @ u[: weight.shape[-1]] + sum(b * u[-1] for b in bias)
    expected = ((x @ u).unsqueeze(-2) @ g).flatten()
    tolerance = 64 * torch.finfo(x.dtype).eps * x.shape[-2] ** 0.5
    # The product of norms bounds what cancels in the sums.
    scale = torch.linalg.vector_norm(expected) + torch.linalg.vector_norm(weight) * x.shape[-1] ** 0.5
    # A gradient that is not finite differs from nothing: the step is skipped because of it, and rows stay in use.
    return ~(torch.linalg.vector_norm(actual - expected) > tolerance * scale)


# ---------------------------------------------------------------------- what hooks can use
REENTRANT = "CheckpointFunctionBackward"
"""The node of ``checkpoint(..., use_reentrant=True)`` in a graph."""


def _nodes(output: Tensor) -> Iterator[Any]:
    """The nodes of the graph that has computed a tensor."""
    found, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [other for other, _ in node.next_functions]
            yield node


def is_ordinary(x: object) -> bool:
    """Whether an object is a tensor with values of its own: none of ``torch.func``, which is valid only within it, and
    neither sparse nor nested.
    """
    if not isinstance(x, Tensor) or x.is_nested:
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return False
    return True


def computed_tensor(output: Tensor) -> Tensor:
    """The tensor of which an output is another shape, as linear maps of sequences are; otherwise the output itself.

    Where a module works in place on such an output, torch forgets the hooks of the output, but not those of that
    tensor.
    """
    base = base_of(output)
    if base is None or not base.requires_grad or base.numel() != output.numel():
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output


def input_of(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The first argument of a module, by its place or by its name; None where it was not given."""
    if inputs:
        return inputs[0]
    return keywords.get(next(iter(inspect.signature(module.forward).parameters), ""))


def is_applied(view: Layer, x: Tensor, g: Tensor) -> bool:
    """Whether input and output have the shapes of the layer's kind: a subclass may compute something else."""
    if view.takes_indices:
        return g.shape[:-1] == x.shape
    if view.has_axes:
        return g.ndim == x.ndim
    return g.shape[:-1] == x.shape[:-1] and x.shape[-1] + (view.bias is not None) == view.p


# ---------------------------------------------------------------------- hooks
Filter = Callable[[nn.Module, Tensor], bool]
"""A method that says whether a backward pass through a module with this input is of use."""
Receiver = Callable[[nn.Module, Tensor, Tensor, int], None]
"""A method that takes a module, its input, the gradient of its output, and the number of the forward pass."""


class Capture:
    """Watches modules: each backward pass through one reaches ``receive``, if ``wants`` asked for it.

    The hooks hold this object weakly: they go with it, and a copy of the model has none. The two methods are held
    weakly too, because their owner owns this object.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module], wants: Filter, receive: Receiver) -> None:
        self.passes = 0
        self._wants, self._receive = weakref.WeakMethod(wants), weakref.WeakMethod(receive)
        self._ended_backward = False
        self.was_called = False
        """Whether a module has been called."""
        self._handles: list[Any] = [module.register_forward_hook(_Hook(self), with_kwargs=True) for module in modules]
        self._handles.append(model.register_forward_pre_hook(_PassHook(self)))
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def begin(self) -> None:
        """A forward pass of the model begins."""
        self.passes += 1
        self._ended_backward = False

    def forward(self, module: nn.Module, x: Any, output: Any) -> None:
        """Ask for the gradient of a module's output, if there will be one and it is of use."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined]  # what a hook computes would be a part of the trace
            return
        self.was_called = True
        if self._ended_backward:  # the model's parts are called without the model itself: this is a new pass
            self.begin()
        if not (torch.is_grad_enabled() and is_ordinary(x) and is_ordinary(output) and output.requires_grad):
            return
        wants = self._wants()
        if wants is None or not wants(module, x):
            return
        x, number, me, shape = x.detach(), self.passes, weakref.ref(self), output.shape

        def backward(gradient: Tensor) -> None:
            capture = me()
            receive = None if capture is None else capture._receive()
            if capture is not None and receive is not None and is_ordinary(gradient):
                capture._ended_backward = True
                with torch.no_grad():
                    receive(module, x, gradient.detach().reshape(shape), number)

        # Registered on the output as it is now: an activation that works in place later does not disturb it.
        computed_tensor(output).register_hook(backward)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


# What torch says where a graph must not end, with fullgraph=True.
run_outside_of_graphs._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "the hooks of a gnomon optimizer cannot be a part of a graph; for fullgraph=True build it with "
    "curvature='gradient', which has no hooks"
)


class _Hook:
    """A hook that holds a capture weakly; copies and pickles of it do nothing."""

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = weakref.ref(capture) if capture is not None else None

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()

    @property
    def __name__(self) -> str:
        """What ``torch.jit.script`` asks for first."""
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of a gnomon optimizer: script the model, or a copy of it, after "
            "optimizer.close(), or take torch.jit.trace or torch.compile"
        )

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            run_outside_of_graphs(self.run, *arguments)
        else:
            self.run(*arguments)

    def run(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.forward(module, input_of(module, inputs, keywords), output)


class _PassHook(_Hook):
    """Counts forward passes of the model, so that a layer used twice in one pass is told from two batches."""

    def run(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:  # type: ignore[override]
        capture = self._capture() if self._capture is not None else None
        if capture is not None:
            capture.begin()
