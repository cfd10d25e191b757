"""The least work of INGD with dense factors: what its matrix products would take at this machine's best rate."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import INGD
from ..optim.capture import Capture
from ..optim.layers import Approximation, ModuleLayer, Thinning
from ..optim.matrices import Matrix, find_matrices
from .bench_models import Model

RATE_SIZE = 512


@dataclass(frozen=True)
class Sizes:
    """A layer's matrices of shape ``(blocks, d, p)``, and the rows that describe them."""

    p: int
    d: int
    rows: int
    """Of the statistics of an update."""
    samples: int | None = None
    """Of a batch, where each gives one row; None where a sample has several positions."""
    blocks: int = 1
    one_hot: bool = False
    """Whether the inputs are indices, whose factor is a diagonal and costs nothing here."""


def multiplications(layer: Sizes, order: int, interval: int) -> float:
    """The least multiplications a step, with an update of the factors in each ``interval`` steps.

    An update of a factor K of size k, from n rows X, takes

    - for ``K^T (X^T X + damping I) K`` either ``2 n k^2 + k^3``, by ``X K``, or ``n k^2 + 2 k^3``, by ``X^T X``;
    - for ``K Exp(-m)`` one product for each order, ``order k^3``;
    - for ``K K^T``, if it is kept, ``k^3``.

    With order 2 and no momentum ``P = K K^T`` can take the place of K: ``2 n k^2 + 2 n^2 k + k^3`` by few rows, or
    ``n k^2 + 4 k^3``.

    A step takes ``C C^T G K K^T``, the cheaper of two forms:

    - by the ``d x p`` matrix G, ``d p (p + d)`` with products that are kept, else ``2 d p (p + d)``;
    - by the n rows of G, one of each sample, ``n (p^2 + d^2 + d p)`` with products that are kept, else
      ``n (2 p^2 + 2 d^2 + d p)``.

    It is the least of all these. The symmetry of a product is not used.
    """
    sides = [layer.d] if layer.one_hot else [layer.p, layer.d]
    n, d, p = layer.rows, layer.d, layer.p
    update = sum(min(2 * n * k**2 + k**3, n * k**2 + 2 * k**3) + order * k**3 for k in sides)

    def step(passes: int) -> int:
        forms = [passes * d * p * sum(sides)]
        if layer.samples is not None:
            forms.append(layer.samples * (passes * sum(k**2 for k in sides) + d * p))
        return min(forms)

    ways = [(update + sum(k**3 for k in sides)) / interval + step(passes=1), update / interval + step(passes=2)]
    if order == 2:
        square = sum(min(2 * n * k**2 + 2 * n**2 * k + k**3, n * k**2 + 4 * k**3) for k in sides)
        ways.append(square / interval + step(passes=1))
    return layer.blocks * min(ways)


def limit(model: Model, settings: dict[str, Any], rate: float) -> float:
    """The least seconds a step of INGD with these settings, at ``rate`` floating-point operations a second."""
    preset = INGD.presets[settings.get("preset", "robust")]
    approx: str = settings.get("approx") or preset["approx"]
    layers = layer_sizes(model, approx, preset["subsample"])
    work = sum(multiplications(layer, preset["order"], settings["update_every"]) for layer in layers)
    return 2 * work / rate


def layer_sizes(model: Model, approx: str, subsample: bool) -> list[Sizes]:
    """The layers of a model with the rows that a batch gives, from one backward pass."""
    network = model.build()
    meter = RowMeter(network, approx, subsample)
    model.loss(network, model.batch()).backward()
    return meter.sizes


class RowMeter:
    """Notes the sizes of each layer that a backward pass goes through; so many ranks have as large a batch each."""

    def __init__(self, network: nn.Module, approx: str, subsample: bool, ranks: int = 1) -> None:
        self.sizes: list[Sizes] = []
        self.rows: Counter[nn.Parameter] = Counter()
        """By weight, of its statistics."""
        self._approx, self._subsample, self._ranks = approx, subsample, ranks
        matrices: list[Matrix] = find_matrices(network)
        self._views: dict[nn.Module, ModuleLayer] = {v.module: v for matrix in matrices for v in matrix.views}
        self._capture = Capture(network, list(self._views), self._wants, self._note)

    def _wants(self, module: nn.Module, x: Tensor) -> bool:
        return True

    def _note(self, module: nn.Module, x: Tensor, g: Tensor, _: int) -> None:
        view = self._views[module]
        approximation: Approximation = view.usual_approximation
        if self._approx != "auto":
            approximation = "reduce" if self._approx == "reduce" else "expand"
        samples = view.samples(x)
        single = g.numel() == samples * view.blocks * view.d
        thin = view.thinning(x, g, approximation, self._ranks) if self._subsample else Thinning()
        rows = view.rows(x[:: thin.samples], g[:: thin.samples], approximation, thin.positions)[1].shape[1]
        self.rows[view.weight] += rows
        self.sizes.append(Sizes(view.p, view.d, rows, samples if single else None, view.blocks, view.one_hot))


def multiplication_rate(repeat: int = 30) -> float:
    """Floating-point operations a second of a product of square float32 matrices."""
    a, b = torch.randn(2, RATE_SIZE, RATE_SIZE)
    times = []
    for _ in range(repeat):
        start = time.process_time()
        torch.mm(a, b)
        times.append(time.process_time() - start)
    return 2 * RATE_SIZE**3 / statistics.median(times)
