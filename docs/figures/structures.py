"""Draws structures.png: the factor, the correlations and the partial correlations of each structure.

python docs/figures/structures.py
"""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap

from gnomon import groups as g
from gnomon.experiments.common.palette import BLUE, LINE, ORANGE

K = 12
SIGNS = LinearSegmentedColormap.from_list("signs", [ORANGE.light, LINE.light, BLUE.light])
STRUCTURES = ["diagonal", "block:4", "toeplitz", "arrow:2", "lowrank:2", "heisenberg:2,2", "dense"]


def factor(name: str) -> torch.Tensor:
    """A random factor of the structure."""
    group = g.as_structure(name, K)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(K, K, generator=generator, dtype=torch.float64)
    if isinstance(group, g.LowRank):
        element = group.element(noise[:, : group.rank], torch.ones(K, dtype=torch.float64))
        loadings, own = group.covariance_factors(element)
        return torch.cat([loadings, torch.diag(own)], 1)  # x = [B, Diag(c)] (factors, noise)
    if name == "toeplitz":
        lags = torch.arange(K, dtype=torch.float64)
        return group.to_dense(((0.75**lags) * torch.cos(0.6 * lags),))
    return group.to_dense(group.from_dense(0.6 * noise + 1.2 * torch.eye(K)))


def correlations(matrix: torch.Tensor, sign: int = 1) -> torch.Tensor:
    scale = matrix.diagonal().rsqrt()
    result = sign * scale.unsqueeze(-1) * matrix * scale
    result.diagonal().fill_(1.0)
    return result


def main() -> None:
    figure, axes = plt.subplots(3, len(STRUCTURES), figsize=(1.75 * len(STRUCTURES), 5.6), layout="constrained")
    rows = (
        "factor A",
        "correlations\n(zero: independent)",
        "partial correlations\n(zero: independent\ngiven the others)",
    )
    for ax, title in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(title)
    for column, name in zip(axes.T, STRUCTURES, strict=True):
        a = factor(name)
        covariance = a @ a.mT
        pictures = (a / a.abs().max(), correlations(covariance), correlations(torch.linalg.inv(covariance), -1))
        for ax, picture in zip(column, pictures, strict=True):
            shown = torch.where(picture.abs() < 1e-9, torch.nan, picture)  # zeros are white
            ax.imshow(shown, cmap=SIGNS, vmin=-1, vmax=1, interpolation="nearest", aspect="equal")
            ax.set_xticks([])
            ax.set_yticks([])
        column[0].set_title(name)
    axes[0, STRUCTURES.index("lowrank:2")].set_title("lowrank:2\n([B, Diag(c)])", fontsize="medium")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
