"""Pictures of fitted Gaussians."""

from __future__ import annotations

from typing import Any

import numpy as np

LARGEST = 400
"""Features in a picture at most; of more, so many at equal distances are shown."""
NAMED = 30
"""Up to so many features have their names at the axes."""


def plot_gaussian(estimator: Any, axes: Any = None) -> Any:
    """Draw correlations and partial correlations side by side, and return the axes.

    A correlation of two features is zero where they are independent, a partial correlation where they are independent
    given all others. The structures differ in which of the two has zeros, and where.

    Args:
        estimator: a fitted estimator of :mod:`gnomon.covariance`.
        axes: two axes of matplotlib to draw into; a new figure unless given.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pictures need it; pip install matplotlib") from error

    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    k = estimator.gaussian_.d
    shown = np.unique(np.linspace(0, k - 1, min(k, LARGEST)).round().astype(int))
    names = getattr(estimator, "feature_names_in_", np.arange(k))[shown]
    matrices = {"correlations": (estimator.covariance_, 1), "partial correlations": (estimator.precision_, -1)}
    for ax, (title, (matrix, sign)) in zip(axes, matrices.items(), strict=True):
        image = ax.imshow(_correlations(matrix, shown, sign), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        ax.set_title(title)
        if len(shown) <= NAMED:
            ax.set_xticks(range(len(shown)), names, rotation=90, fontsize="small")
            ax.set_yticks(range(len(shown)), names, fontsize="small")
    ax.figure.colorbar(image, ax=list(axes), shrink=0.8)
    ax.figure.suptitle(_title(estimator, len(shown), k))
    return axes


def _correlations(matrix: Any, shown: Any, sign: int) -> Any:
    unit = np.zeros((matrix.shape[0], len(shown)))
    unit[shown, np.arange(len(shown))] = 1
    part = (matrix @ unit)[shown]
    scale = np.sqrt(part.diagonal())
    result = sign * part / np.outer(scale, scale)
    np.fill_diagonal(result, 1)
    return result


def _title(estimator: Any, shown: int, k: int) -> str:
    name = getattr(estimator, "structure_name_", type(estimator).__name__)
    part = "" if shown == k else f", {shown} of {k} features"
    return f"{name}, shrinkage {estimator.shrinkage_:g}{part}"
