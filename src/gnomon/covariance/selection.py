"""Shrinkage and structure by cross-validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ..groups import Group, as_structure
from ..groups.likelihood import Form
from ..groups.moments import SingularMomentsError
from ..manifolds import Gaussian
from .missing import fit_by_em, marginal_log_prob
from .model import Model, StructureModel
from .sample import LARGEST_DENSE, Sample, Summary, Target

GRID = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shrinkages that are tried."""
FIRST_TRIES = (2, 6, 10)
"""Their places in the grid; from the best of these the search goes to its neighbours."""
PATIENCE = 2
"""A family of structures is given up after so many members that are no better than the best before."""


def fit(sample: Summary, model: Model, shrinkage: float, target: Target, near: Gaussian | None = None) -> Gaussian:
    """Return the likeliest Gaussian of the family for shrunk moments; a search may begin at one that is near."""
    if isinstance(sample, Sample) and not sample.complete:
        return fit_by_em(sample, model, shrinkage, target, near)
    return model.fit(sample.moments(shrinkage, target), sample.mean, near)


@torch.no_grad()
def log_prob(gaussian: Gaussian, rows: Tensor) -> Tensor:
    """Return the log-density of what is observed of each row."""
    if bool(rows.isnan().any()):
        return marginal_log_prob(gaussian, rows)
    return gaussian.log_prob(rows.double())


@dataclass(frozen=True)
class Trial:
    """A family with the best shrinkage that was found for it, and its held-out average log-likelihood."""

    model: Model
    shrinkage: float
    target: Target
    score: float


@dataclass
class Folds:
    """Parts of a sample: what is held out, and the rest."""

    sample: Sample
    splits: Sequence[tuple[Tensor, Tensor]]
    """Rows to fit, and rows held out."""
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = [self.sample.subset(rows) for rows, _ in self.splits]

    def score(self, model: Model, shrinkage: float, target: Target, near: list[Gaussian] | None = None) -> float:
        """Return the average log-likelihood of rows that the fits have not seen.

        It is minus infinity where a fit has no maximum. Fits begin at those in ``near``, and take their places.
        """
        total, weight = 0.0, 0.0
        near = [] if near is None else near
        for i, (part, (_, held_out)) in enumerate(zip(self._parts, self.splits, strict=True)):
            try:
                gaussian = fit(part, model, shrinkage, target, near[i] if i < len(near) else None)
            except (SingularMomentsError, LinAlgError):
                return -math.inf
            near[i : i + 1] = [gaussian]
            weights = self.sample.weights[held_out]
            total += float(weights @ log_prob(gaussian, self.sample.rows[held_out]))
            weight += float(weights.sum())
        return total / weight

    def best_shrinkage(self, model: Model, targets: Sequence[Target]) -> Trial:
        """Return the best trial of one family, over the grid of shrinkages and the targets."""
        best = max((self._climb(model, target) for target in targets), key=lambda trial: trial.score)
        self.trials.append(best)
        return best

    def _climb(self, model: Model, target: Target) -> Trial:
        scores: dict[int, float] = {}
        fits: list[Gaussian] = []

        def score(place: int) -> float:
            if place not in scores:
                scores[place] = self.score(model, GRID[place], target, fits)
            return scores[place]

        place = max(FIRST_TRIES, key=score)
        while True:
            neighbours = [n for n in (place - 1, place + 1) if 0 <= n < len(GRID)]
            better = max(neighbours, key=score)
            if not score(better) > score(place):
                return Trial(model, GRID[place], target, score(place))
            place = better

    def best_structure(self, families: Iterable[Sequence[Model]], choose: Callable[[Model], Trial]) -> Trial:
        """Return the best trial of all families; a family is given up where its larger members do not help."""
        results: list[Trial] = []
        for family in families:
            best, idle = -math.inf, 0
            for model in family:
                trial = choose(model)
                results.append(trial)
                idle = 0 if trial.score > best else idle + 1
                best = max(best, trial.score)
                if idle == PATIENCE:
                    break
        return max(results, key=lambda trial: trial.score)


def candidates(k: int, form: Form) -> list[list[Model]]:
    """Return families of structures for k features, from few parameters to many."""
    ranks = [r for r in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20) if r <= k // 2]
    sizes = [b for b in (2, 3, 4, 5, 8, 10, 15, 20, 25, 50) if b <= k // 2]
    names = [["diagonal"], ["toeplitz"] if 2 < k <= LARGEST_DENSE else []]
    names += [[f"block:{b}" for b in sizes], [f"arrow:{r}" for r in ranks], [f"lowrank:{r}" for r in ranks]]
    names += [["dense"] if k <= LARGEST_DENSE else []]
    return [[structure_model(name, k, form) for name in family] for family in names]


def structure_model(structure: str | Group | Callable[[int], Group], k: int, form: Form) -> Model:
    try:
        group = as_structure(structure, k)
    except ValueError as error:
        raise ValueError(f"{error}; X has n_features={k}") from None
    return StructureModel(group, form, structure if isinstance(structure, str) else repr(group))
