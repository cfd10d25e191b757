"""The sizes of a network's layers, and the number of rows that a batch gives to the statistics of each layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn

from ...optim.kronecker.hooks import Capture
from ...optim.kronecker.layers import Approximation, Layer, Matrix, Thinning, find_matrices


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer's matrices, whose shape is ``(blocks, d, p)``, and of its statistics."""

    p: int
    d: int
    rows: int
    """The number of rows of the statistics at an update."""
    samples: int | None = None
    """The number of samples of a batch if each sample gives one row. None if a sample has several positions."""
    blocks: int = 1
    one_hot: bool = False
    """Whether the inputs are indices. Their factor is diagonal, and its cost is not counted here."""


class RowMeter:
    """Records the sizes of each layer that a backward pass visits.

    Each of ``ranks`` ranks has a batch of the same size.
    """

    def __init__(self, network: nn.Module, approx: str, subsample: bool, ranks: int = 1) -> None:
        self.sizes: list[Sizes] = []
        self.rows: Counter[nn.Parameter] = Counter()
        """The number of rows of the statistics of each weight."""
        self._approx, self._subsample, self._ranks = approx, subsample, ranks
        matrices: list[Matrix] = find_matrices(network)
        self._views: dict[nn.Module, Layer] = {v.module: v for matrix in matrices for v in matrix.views}
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
        self.sizes.append(Sizes(view.p, view.d, rows, samples if single else None, view.blocks, view.takes_indices))
