"""The time and memory of training steps. The optimizers of a model take turns."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .models import Model
from .optimizers import GRADIENT_ONLY, UNIT, Contestant

SLOW = 20
"""An optimizer that takes more than this multiple of SGD's time does not have all rounds."""
SLOW_ROUNDS = 2
"""The rounds of such an optimizer."""


@dataclass
class Figures:
    """The measurements of one contestant."""

    name: str
    seconds: list[float] = field(default_factory=list)
    """The CPU time of a step, as the mean of each turn."""
    units: list[float] = field(default_factory=list)
    """SGD's time right before each turn. If the machine is slow for a while, both times are longer."""
    state_bytes: int = 0
    peak_bytes: int = 0
    """The largest total size of tensors during a turn, less their size at its start."""
    limit: float | None = None
    """The least seconds of the optimizer's work in a step, if it is known."""
    failure: str | None = None

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles of the time as a multiple of SGD's time. The second is the median."""
        multiples = [own / unit for own, unit in zip(self.seconds, self.units, strict=True)]
        low, middle, high = statistics.quantiles(multiples, n=4, method="inclusive")
        return low, middle, high

    @property
    def multiple(self) -> float:
        """The median time as a multiple of SGD's time."""
        return self.quartiles[1]


class Run:
    """A contestant with its own copy of the model, which it trains in its turns."""

    def __init__(self, model: Model, contestant: Contestant) -> None:
        self.model, self.steps, self.figures = model, contestant.steps, Figures(contestant.name)
        self.network, self.batch = model.build(), model.batch()
        self.optimizer = contestant.build(self.network)

    def turn(self) -> None:
        """Take the training steps of a turn."""
        loss = math.nan
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            value = self.model.loss(self.network, self.batch)
            value.backward()
            self.optimizer.step()
            loss = value.item()
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss became {loss}: what such a run takes is not what training takes")

    def warm_up(self) -> None:
        """Take two turns that are not timed. Memory is measured in the second, when all state exists."""
        with MemoryTracker() as tracker:
            self.turn()
            begin = tracker.restart()
            self.turn()
        self.figures.peak_bytes = tracker.peak - begin
        self.figures.state_bytes = state_bytes(self.optimizer)

    def timed_turn(self) -> float:
        """Take a turn and return the seconds of a step."""
        start = time.process_time()
        self.turn()
        return (time.process_time() - start) / self.steps

    def turn_after(self, unit: Run) -> None:
        """Take a turn of the unit, then one of this run, and record both times. The unit itself takes one turn."""
        before = unit.timed_turn()
        self.figures.seconds.append(before if unit is self else self.timed_turn())
        self.figures.units.append(before)


def measure(
    model: Model, chosen: list[Contestant], rounds: int, report: Callable[[str], None] = lambda what: None
) -> list[Figures]:
    """Measure the gradient alone, SGD and the chosen contestants. Each turn follows a turn of SGD.

    A contestant that fails, or that is not installed, has a failure instead of times. The others continue. Before each
    turn ``report`` is called with a description.
    """
    runs: dict[str, Run] = {}
    results: list[Figures] = []
    for contestant in _with_units(chosen):
        report(f"{contestant.name}: warming up")
        results.append(_started(model, contestant, runs))
    for number in range(rounds):
        for name, run in list(runs.items()):
            if number >= SLOW_ROUNDS and run.figures.quartiles[0] > SLOW:
                continue
            report(f"{name}: round {number + 1} of {rounds}")
            if failure := _failure_of(partial(run.turn_after, runs[UNIT.name])):
                run.figures.failure = failure
                del runs[name]
    return results


def _with_units(chosen: list[Contestant]) -> list[Contestant]:
    return [GRADIENT_ONLY, UNIT, *(contestant for contestant in chosen if contestant is not UNIT)]


def _started(model: Model, contestant: Contestant, runs: dict[str, Run]) -> Figures:
    """Return the figures of a contestant. Its run is added to ``runs`` if it can be built and warmed up."""
    if not contestant.installed:
        return Figures(contestant.name, failure=f"{contestant.package} is not installed")
    made: list[Run] = []
    failure = _failure_of(lambda: made.append(Run(model, contestant))) or _failure_of(made[0].warm_up)
    if failure:
        return Figures(contestant.name, failure=failure)
    runs[contestant.name] = made[0]
    return made[0].figures


def _failure_of(action: Callable[[], None]) -> str | None:
    """Return the first line of the error that an action raises, or None."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


# ---------------------------------------------------------------------- memory
class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of tensors from the operation that makes them until they are freed.

    A tensor that is older than the tracker is subtracted when it is freed, if an operation has used it. Memory that an
    operation allocates and frees internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def restart(self) -> int:
        """Reset the peak, and return the present number of bytes."""
        self.peak = self.now
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            self._follow(leaf, is_new=False)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            self._follow(leaf, is_new=True)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for finalizer in self._known.values():
            finalizer.detach()

    def _follow(self, leaf: object, is_new: bool) -> None:
        if not isinstance(leaf, Tensor):
            return
        storage = leaf.untyped_storage()
        if storage._cdata not in self._known:
            size = storage.nbytes()
            self._known[storage._cdata] = weakref.finalize(storage, self._forget, storage._cdata, size)
            self.now += size if is_new else 0
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self.now -= size
        del self._known[key]


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in the state, or what the optimizer reports if that is more."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(optimizer.state_dict())}
    told: Callable[[], int] = getattr(optimizer, "memory_usage", lambda: 0)
    return max(sum(storages.values()), told())


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, and in objects such as singd's matrices."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))
