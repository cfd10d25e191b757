"""Metric learning: a distance under which wines of one cultivar are near each other.

python examples/metric_learning.py
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from pictures import options, save
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

import gnomon


def learned_map(rows: np.ndarray, labels: np.ndarray, pairs: int) -> np.ndarray:
    """A matrix W whose plain distance |W x - W y| is the learned one: W^T W = A."""
    problem = gnomon.problems.MetricLearning.from_labels(
        torch.tensor(rows), torch.tensor(labels), pairs, generator=torch.Generator().manual_seed(0)
    )
    metric = gnomon.SPD(rows.shape[1], factor="inner", dtype=torch.float64)  # A = W^T W
    gnomon.problems.solve(problem, metric)
    return metric.factor_matrix().detach().numpy()


def main() -> None:
    arguments = options(__doc__, "metric-learning")
    rows, labels = load_wine(return_X_y=True)
    rows = StandardScaler().fit_transform(rows)
    order = np.random.RandomState(0).permutation(len(rows))
    train, test = order[:60], order[60:]  # the metric sees a third of the wines
    W = learned_map(rows[train], labels[train], pairs=200 if arguments.quick else 2000)

    figure, panels = plt.subplots(1, 2, figsize=(8, 3.6), constrained_layout=True)
    errors = []
    for axes, title, points in zip(panels, ("plain distance", "learned distance"), (rows, rows @ W.T), strict=True):
        neighbours = KNeighborsClassifier(3)
        errors.append(100 * (1 - cross_val_score(neighbours, points[test], labels[test], cv=5).mean()))
        plane = PCA(2).fit_transform(points[test])
        for label in range(3):
            axes.plot(*plane[labels[test] == label].T, "o", markersize=4, label=f"cultivar {label + 1}")
        axes.set(title=f"{title}: {errors[-1]:.1f}% error", xticks=[], yticks=[])
    panels[0].legend(frameon=False, fontsize=8)
    print(f"test error {errors[0]:.1f}% by plain distances, {errors[1]:.1f}% by learned ones")
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
