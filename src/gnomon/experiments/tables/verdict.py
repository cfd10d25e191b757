"""What the paper says of its tables, beside what the runs show. Every sentence about the runs is computed."""

from __future__ import annotations

import math
from statistics import mean

from .. import models
from ..common.confidence import half_interval
from ..common.document import Claim
from ..training.optimizers import TITLES
from . import published
from .section import Section

SIMILAR = 1.25
"""Times are similar if neither is more than this multiple of the other."""


def claim(name: str, sections: list[Section]) -> Claim:
    """Return what the paper says of a table, and what its runs show."""
    seen, verdicts = [], []
    for section in sections:
        model = models.MODELS[section.task.model].title
        seen += [f"{model}: {line}" for line in (*_order(section), *_beside_kfac(section), *_times(section))]
        verdicts.append(f"{model}: {_better_than_kfac(section)} {_competitive(section)}")
    return Claim(_paper(name), seen or ["No optimizer has finished without divergence."], " ".join(verdicts))


def _paper(name: str) -> str:
    said = (
        "INGD performs better than KFAC and is competitive with the other optimizers. Its running time is similar to "
        "that of KFAC."
    )
    theirs = published.ERRORS.get(name)
    if theirs is None:
        return f"Of images the paper says: {said} It trains no language model."
    better = sum(errors["ingd"] < errors["kfac"] for errors in theirs.values())
    lowest = sum(errors["ingd"] == min(errors.values()) for errors in theirs.values())
    return (
        f"{said} In its table of {len(theirs)} networks INGD has a lower test error than KFAC on {better}, and the "
        f"lowest one of all on {lowest}."
    )


# ---------------------------------------------------------------------- what is seen
def _order(section: Section) -> list[str]:
    means = _means(section)
    if "ingd" not in means or len(means) < 2:
        return []
    above = sum(value > means["ingd"] for value in means.values())
    return [
        f"INGD ends at {section.number(means['ingd'])}{section.unit}. Of the {len(means) - 1} other optimizers {above} "
        "end above it."
    ]


def _beside_kfac(section: Section) -> list[str]:
    differences = _differences(section, "kfac")
    if differences is None:
        return []
    return [f"INGD minus KFAC is {section.mean_text(differences, signed=True)}{section.unit}, seed by seed."]


def _times(section: Section) -> list[str]:
    if not {"ingd", "kfac"} <= set(_means(section)):
        return []
    ratio = section.seconds("ingd") / section.seconds("kfac")
    similar = "similar" if 1 / SIMILAR <= ratio <= SIMILAR else "not similar"
    return [f"An epoch of INGD takes {ratio:.2f} times as long as one of KFAC: the times are {similar}."]


# ---------------------------------------------------------------------- whether it agrees
def _better_than_kfac(section: Section) -> str:
    differences = _differences(section, "kfac")
    if differences is None:
        return "INGD and KFAC cannot be compared."
    if mean(differences) >= 0:
        return "that INGD performs better than KFAC does not hold."
    half = half_interval(differences)
    if math.isnan(half) or abs(mean(differences)) <= half:
        return "INGD has less than KFAC, but not by more than the interval of the difference."
    return "that INGD performs better than KFAC holds."


def _competitive(section: Section) -> str:
    means = {name: value for name, value in _means(section).items() if name != "kfac"}
    others = {name: value for name, value in means.items() if name != "ingd"}
    if "ingd" not in means or not others:
        return "INGD and the other optimizers cannot be compared."
    best = min(others, key=lambda name: others[name])
    if means["ingd"] <= others[best]:
        return "That it is competitive with the others holds: none of them has less."
    differences = _differences(section, best)
    assert differences is not None
    half = half_interval(differences)
    if not math.isnan(half) and abs(mean(differences)) <= half:
        return f"That it is competitive holds: {TITLES[best]} has less, but within the interval of the difference."
    return f"That it is competitive with the others does not hold: {TITLES[best]} has less."


def _means(section: Section) -> dict[str, float]:
    return {m.optimizer: mean(scores) for m in section.methods if (scores := m.scores()) is not None}


def _differences(section: Section, name: str) -> list[float] | None:
    method = section.by_name.get(name)
    return None if method is None else section.differences(method)
