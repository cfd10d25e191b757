"""What the examples with a picture share: their options, the colours of the project, ellipses of matrices."""

import argparse
import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from gnomon.experiments.common import palette

COLORS = [color.light for color in (palette.OURS, palette.ORANGE, palette.GREEN, palette.PURPLE, palette.GREY)]
"""The library's own method has the first one."""

matplotlib.rcParams.update({"svg.hashsalt": "gnomon", "axes.spines.top": False, "axes.spines.right": False})
matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=COLORS)


def options(description: str, name: str) -> argparse.Namespace:
    """``--quick``, and ``--picture`` with the file to write."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small form, for tests")
    parser.add_argument("--picture", type=Path, default=Path(f"{name}.svg"), help="the file to write")
    return parser.parse_args()


def color_of(optimizer: str) -> str:
    """The colour of an optimizer in all pictures of the project."""
    return palette.of_optimizer(optimizer).light


def save(figure: Figure, path: Path) -> None:
    """Write a figure, the same bytes for the same figure."""
    figure.savefig(path, format=path.suffix[1:], bbox_inches="tight", metadata={"Date": None})
    print(f"wrote {path}")


def ellipse(axes: Axes, covariance: ArrayLike, center: ArrayLike = (0.0, 0.0), radius: float = 2.0, **style) -> None:
    """The points at a distance of some standard deviations from the centre."""
    angles = np.linspace(0, 2 * math.pi, 100)
    circle = radius * np.stack([np.cos(angles), np.sin(angles)])
    x, y = np.linalg.cholesky(np.asarray(covariance)) @ circle + np.asarray(center)[:, None]
    axes.plot(x, y, **style)
