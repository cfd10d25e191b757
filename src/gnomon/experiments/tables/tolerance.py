"""The learning rates and dampings that INGD and KFAC tolerate.

The paper claims that its method can take a larger step and a smaller damping than KFAC. A grid of short runs tests this
claim.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.document import Claim
from ..common.svg import HeatMap
from ..training.optimizers import TITLES
from .runs import Result
from .scales import Grid

SHARE = 0.5
"""A method tolerates a setting if its accuracy is at least this share of its accuracy with its own best setting."""

CLAIM = "INGD can take a larger step and a smaller damping than KFAC."

Setting = tuple[float, float]
"""A learning rate and a damping."""


@dataclass(frozen=True)
class Map:
    """The test errors of an optimizer with a preset, by learning rate and damping. None stands for a diverged run."""

    optimizer: str
    preset: str
    errors: dict[Setting, float | None]

    @property
    def title(self) -> str:
        return f"{TITLES[self.optimizer]}, {self.preset} preset"

    @property
    def best(self) -> tuple[Setting, float] | None:
        """The setting with the lowest error and that error, or None if all runs diverged."""
        reached = {setting: error for setting, error in self.errors.items() if error is not None}
        return min(reached.items(), key=lambda item: item[1]) if reached else None

    @property
    def tolerated(self) -> set[Setting]:
        """The settings that the method tolerates."""
        if self.best is None:
            return set()
        limit = 100 - SHARE * (100 - self.best[1])
        return {setting for setting, error in self.errors.items() if error is not None and error <= limit}

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return sum(error is None for error in self.errors.values())

    def largest_rate(self, damping: float) -> float:
        """Return the largest rate that is tolerated with a damping, or 0 if none is."""
        return max((lr for lr, other in self.tolerated if other == damping), default=0.0)

    def smallest_damping(self, lr: float) -> float:
        """Return the smallest damping that is tolerated at a learning rate, or infinity if none is."""
        return min((damping for other, damping in self.tolerated if other == lr), default=float("inf"))


def maps(results: list[Result]) -> list[Map]:
    """Return a map for each optimizer and preset."""
    found: dict[tuple[str, str], dict[Setting, float | None]] = {}
    for result in results:
        config = result.config
        assert config.lr is not None
        assert config.damping is not None
        error = None if result.diverged else result.epochs[-1].test_error
        found.setdefault((config.optimizer, str(config.preset)), {})[config.lr, config.damping] = error
    return [Map(*key, errors) for key, errors in found.items()]


def comparison(ours: Map, kfac: Map, grid: Grid) -> Claim:
    """Return whether the two maps of a preset support the claim."""
    steps = [(ours.largest_rate(d), kfac.largest_rate(d)) for d in grid.dampings]
    dampings = [(kfac.smallest_damping(r), ours.smallest_damping(r)) for r in grid.rates]  # the smaller the better
    seen = [
        f"{one.title}: bears {len(one.tolerated)} of {len(one.errors)} settings, diverges at {one.diverged}; "
        + ("no setting trains." if one.best is None else _best_words(*one.best))
        for one in (ours, kfac)
    ]
    verdicts = []
    for what, compared, kind in (("larger learning rate", steps, "dampings"), ("smaller damping", dampings, "rates")):
        ahead, behind = sum(a > b for a, b in compared), sum(a < b for a, b in compared)
        seen.append(
            f"INGD bears a {what} than KFAC at {ahead} of {len(compared)} {kind}, KFAC at {behind}, and at "
            f"{len(compared) - ahead - behind} they bear the same."
        )
        verdicts.append(f"{what}: {_verdict(ahead, behind)}")
    return Claim(CLAIM, seen, f"With the {ours.preset} preset, {'; '.join(verdicts)}.")


def _best_words(setting: Setting, error: float) -> str:
    return f"its best is {error:.1f} % at lr {setting[0]:g}, damping {setting[1]:g}."


def _verdict(ahead: int, behind: int) -> str:
    if ahead and behind:
        return "the claim holds in part of this grid"
    if ahead:
        return "the claim holds in this grid"
    return "the claim does not hold in this grid" if behind else "this grid shows no difference"


def heat_maps(found: list[Map], grid: Grid) -> dict[str, HeatMap]:
    """Return a drawing for each map, by optimizer and preset. All have the same colours for the same errors."""
    reached = [error for one in found for error in one.errors.values() if error is not None] or [0.0]
    return {
        f"{one.optimizer}-{one.preset}": HeatMap(
            one.title,
            rows=[f"{damping:g}" for damping in grid.dampings],
            columns=[f"{lr:g}" for lr in grid.rates],
            values=[[one.errors[lr, damping] for lr in grid.rates] for damping in grid.dampings],
            x="learning rate",
            y="damping",
            low=min(reached),
            high=max(reached),
        )
        for one in found
    }
