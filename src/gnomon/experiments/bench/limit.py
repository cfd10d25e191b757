"""The least work of INGD with dense factors: the time of its matrix products at the machine's best rate."""

from __future__ import annotations

from typing import Any

from ...optim import INGD
from ...optim.kronecker.config import preset_arguments
from ..common.layer_sizes import RowMeter, Sizes
from .models import Model


def multiplications(layer: Sizes, order: int, interval: int) -> float:
    """Return the least multiplications of a step if the factors are updated every ``interval`` steps.

    An update of a factor K of size k, from n rows X, takes

    - for ``K^T (X^T X + damping I) K`` either ``2 n k^2 + k^3``, by ``X K``, or ``n k^2 + 2 k^3``, by ``X^T X``;
    - for ``K Exp(-m)`` one product for each order, ``order k^3``;
    - for ``K K^T``, if it is stored, ``k^3``.

    With order 2 and no momentum ``P = K K^T`` can replace K: ``2 n k^2 + 2 n^2 k + k^3`` with few rows, or
    ``n k^2 + 4 k^3``.

    A step computes ``C C^T G K K^T`` in the cheaper of two forms:

    - from the ``d x p`` matrix G, ``d p (p + d)`` with stored products, else ``2 d p (p + d)``;
    - from the n rows of G, one row for each sample, ``n (p^2 + d^2 + d p)`` with stored products, else
      ``n (2 p^2 + 2 d^2 + d p)``.

    The result is the least of all these. The symmetry of a product is not used.
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
    """Return the least seconds of INGD's work in a step, at ``rate`` floating-point operations per second."""
    preset = preset_arguments(INGD, settings.get("preset", "robust"))
    approx: str = settings.get("approx") or preset["approx"]
    layers = layer_sizes(model, approx, preset["subsample"])
    work = sum(multiplications(layer, preset["order"], settings["update_every"]) for layer in layers)
    return 2 * work / rate


def layer_sizes(model: Model, approx: str, subsample: bool) -> list[Sizes]:
    """Return the sizes of a model's layers, with the rows that a batch gives. They come from one backward pass."""
    network = model.build()
    meter = RowMeter(network, approx, subsample)
    model.loss(network, model.batch()).backward()
    return meter.sizes
