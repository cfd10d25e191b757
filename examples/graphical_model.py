"""A graphical model: which features depend on each other directly, from a sparse precision matrix.

python examples/graphical_model.py
"""

import matplotlib.pyplot as plt
import torch
from pictures import options, save

import gnomon


def partial_correlations(precision: torch.Tensor) -> torch.Tensor:
    scale = precision.diagonal().rsqrt()
    return torch.eye(len(precision)) - (scale[:, None] * precision * scale).fill_diagonal_(0)


def main() -> None:
    arguments = options(__doc__, "graphical-model")
    k = 10 if arguments.quick else 20
    problem = gnomon.problems.GraphicalModel.random(
        k, samples=5 * k, neighbours=1, penalty=0.2, generator=torch.Generator().manual_seed(0)
    )
    problem.smoothing = 1e-3
    solution = gnomon.problems.solve(problem, tolerance=1e-3, max_iterations=200)
    estimate = solution.point.matrix().detach()
    wanted = problem.truth.abs().fill_diagonal_(0) > 0
    found = estimate.abs().fill_diagonal_(0) > 0.05
    right = (wanted & found).sum().item() // 2
    extra = (found & ~wanted).sum().item() // 2
    print(f"loss {solution.loss:.3f}; edges: {right} right and {extra} extra, of {wanted.sum().item() // 2}")

    pictures = {"truth": problem.truth, "inverse of the sample's": problem.C.inverse(), "sparse estimate": estimate}
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.2), constrained_layout=True)
    for axes, (title, precision) in zip(panels, pictures.items(), strict=True):
        shown = axes.imshow(partial_correlations(precision), cmap="RdBu", vmin=-0.6, vmax=0.6)
        axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(shown, ax=panels, label="partial correlation", shrink=0.8)
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
