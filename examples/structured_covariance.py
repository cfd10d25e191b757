"""Structured covariances of real data: how much a structure explains, for how many numbers.

python examples/structured_covariance.py
"""

import matplotlib.pyplot as plt
import numpy as np
from pictures import COLORS, options, save
from sklearn.covariance import LedoitWolf
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler

from gnomon.covariance import StructuredCovariance

FAMILIES = {
    "low rank + diagonal": [f"lowrank:{rank}" for rank in (1, 2, 4, 8, 12, 16, 24)],
    "arrow": [f"arrow:{rank}" for rank in (1, 2, 4, 8, 12, 16, 24)],
    "blocks": [f"block:{size}" for size in (2, 4, 8, 16, 24)],
    "dense": ["dense"],
    "diagonal": ["diagonal"],
}


def pixels() -> np.ndarray:
    """Standardized rows of the pixels that vary; each row is one image of a digit."""
    images = load_digits().data
    images = images[:, images.std(0) > 2]
    return np.random.RandomState(0).permutation(StandardScaler().fit_transform(images))


def main() -> None:
    arguments = options(__doc__, "structured-covariance")
    rows = pixels()
    train, unseen = np.split(rows, [1200])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True, width_ratios=(3, 2))
    fits = {}
    for color, (family, names) in zip(COLORS, FAMILIES.items(), strict=True):
        names = names[:2] if arguments.quick else names
        fits |= {name: StructuredCovariance(name, shrinkage=0.02).fit(train) for name in names}
        numbers = [fits[name].structure_.dim for name in names]
        left.plot(numbers, [fits[name].score(unseen) for name in names], "o-", color=color, label=family)
    ledoit_wolf = LedoitWolf().fit(train).score(unseen)
    left.axhline(ledoit_wolf, color="black", linewidth=0.8, linestyle="--", label="Ledoit-Wolf")
    left.set(xscale="log", xlabel="numbers in the covariance", ylabel="log-likelihood of a new row")
    left.legend(frameon=False, fontsize=8)
    ranked = max(FAMILIES["low rank + diagonal"][: 2 if arguments.quick else None], key=lambda n: fits[n].score(unseen))
    full, thin, plain = fits["dense"], fits[ranked], fits["diagonal"]
    print(
        f"score {thin.score(unseen):.2f} of {ranked} with {thin.structure_.dim} numbers, "
        f"{full.score(unseen):.2f} of dense with {full.structure_.dim}, {plain.score(unseen):.2f} of diagonal"
    )
    right.imshow(thin.covariance_, cmap="RdBu", vmin=-1, vmax=1)
    right.set(title=f"correlations of pixels, {ranked}", xticks=[], yticks=[])
    save(figure, arguments.picture)


if __name__ == "__main__":
    main()
