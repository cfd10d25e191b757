"""Draws docs/structures/*.svg: which entries of the factor, of tau and of its inverse are zero, for each structure.

python docs/_site/structures.py
"""

from pathlib import Path

import torch
from torch import Tensor

import gnomon
from gnomon import groups as g
from gnomon.experiments.common import palette

K = 12
STRUCTURES: dict[str, g.Group] = {
    "dense": g.Dense(K),
    "triangular": g.Triangular(K),
    "diagonal": g.Diagonal(K),
    "block-diagonal": g.BlockDiagonal(K, 4),
    "block-triangular": g.BlockTriangular((g.Dense(4), g.Diagonal(4), g.Dense(4))),
    "arrow": g.Arrow(K, rank=2),
    "heisenberg": g.Heisenberg(K, head=2, tail=2),
    "toeplitz": g.Toeplitz(K),
    "kronecker": g.Kronecker(g.Dense(3), g.Triangular(4)),
    "low-rank": g.LowRank(K, rank=2),
}
FOLDER = Path(__file__).resolve().parents[1] / "structures"
CELL, GAP, TOP = 10, 26, 20


def random_point(group: g.Group) -> gnomon.SPD:
    """A point far from the identity, so that no entry is zero by chance."""
    point = gnomon.SPD(group, dtype=torch.float64)
    with torch.no_grad():
        point.eta.copy_(torch.randn(point.eta.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    point.fold()
    return point


def panels(point: gnomon.SPD) -> dict[str, Tensor]:
    """The factor, tau and its inverse; of low rank plus diagonal the loadings with the noise beside them."""
    tau = point.matrix().detach()
    inverse = {"τ⁻¹": torch.linalg.inv(tau)}
    if not isinstance(point.group, g.LowRank):
        return {"factor A": point.factor_matrix().detach(), "τ = A Aᵀ": tau, **inverse}
    loadings, noise = point.group.covariance_factors(point.element())
    spaced = [loadings, torch.zeros(K, 1), torch.diag(noise)]
    return {"B and Diag(c)": torch.cat(spaced, -1).detach(), "τ = B Bᵀ + Diag(c²)": tau, **inverse}


def cells(matrix: Tensor, left: int) -> str:
    """A square for each entry that is not zero, the darker the larger."""
    size = matrix.abs() / matrix.abs().max()
    drawn = []
    for i, j in (size > 1e-9).nonzero().tolist():
        opacity = 0.25 + 0.75 * size[i, j].item() ** 0.5
        x, y = left + CELL * j, TOP + CELL * i
        drawn.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill-opacity="{opacity:.2f}"/>')
    return "".join(drawn)


def drawing(matrices: dict[str, Tensor]) -> str:
    widths = [CELL * matrix.shape[1] for matrix in matrices.values()]
    width, height = sum(widths) + GAP * (len(widths) - 1) + 2, TOP + CELL * K + 2
    left = 1
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">']
    parts.append(f'<rect width="{width}" height="{height}" fill="{palette.PAGE.light}"/>')
    for (title, matrix), side in zip(matrices.items(), widths, strict=True):
        text = f'<text x="{left + side / 2}" y="13" font-family="sans-serif" font-size="11" text-anchor="middle">'
        box = f'x="{left - 1}" y="{TOP - 1}" width="{side + 1}" height="{CELL * K + 1}"'
        frame = f'<rect {box} fill="none" stroke="{palette.GREY.light}"/>'
        parts.append(f'{text}{title}</text>{frame}<g fill="{palette.BLUE.light}">{cells(matrix, left)}</g>')
        left += side + GAP
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, group in STRUCTURES.items():
        (FOLDER / f"{name}.svg").write_text(drawing(panels(random_point(group))))


if __name__ == "__main__":
    main()
