"""A mixture of Gaussians with structured covariances: fewer parameters, and the structure that the data have.

python examples/mixture.py
"""

import matplotlib.pyplot as plt
import numpy as np
from pictures import COLORS, ellipse, options, save

import gnomon
from gnomon.mixture import GaussianMixture

STRUCTURES = {"dense": gnomon.groups.Dense, "arrow": gnomon.groups.Arrow, "diagonal": gnomon.groups.Diagonal}


def make_rows(count: int, features: int) -> np.ndarray:
    """Rows of three kinds; in each kind one feature drives all others."""
    rng = np.random.RandomState(0)
    parts = []
    for center in (-2.0, 1.0, 4.0):
        hub = rng.standard_normal((count // 3, 1))
        rest = hub @ rng.standard_normal((1, features - 1)) + 0.5 * rng.standard_normal((count // 3, features - 1))
        parts.append(np.hstack([hub, rest]) + center * (np.arange(features) % 2))
    return np.concatenate(parts)


def main() -> None:
    arguments = options(__doc__, "mixture")
    rows = make_rows(300 if arguments.quick else 600, features=12)
    unseen = rows[::2]
    rows = rows[1::2]
    fits = {name: GaussianMixture(3, structure=s, random_state=0).fit(rows) for name, s in STRUCTURES.items()}
    scores = {name: fit.score(unseen) for name, fit in fits.items()}
    print("score on new rows: " + ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), constrained_layout=True)
    arrow = fits["arrow"]
    kinds = arrow.predict(unseen)
    for kind in range(3):
        left.plot(*unseen[kinds == kind][:, :2].T, "o", markersize=2.5, color=COLORS[kind])
        ellipse(left, arrow.covariances_[kind][:2, :2], arrow.means_[kind][:2], color=COLORS[kind], linewidth=2)
    left.set(title="arrow covariances", xlabel="feature 1, which drives the others", ylabel="feature 2")
    right.plot(list(scores.values()), list(scores), "o", markersize=10)
    right.set(title="log-likelihood of a new row", ylim=(-0.5, 2.5))
    right.grid(alpha=0.3)
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
