"""Gaussian mixtures: structures beside scikit-learn's EM, on MAGIC and on data that have the structure.

    python benchmarks/mixture.py [--quick] [--write]

Average log-likelihoods of training and held-out rows, and the process CPU time of ``fit`` with one BLAS thread. All
methods of a data set run in one process, take turns, and start from the same k-means. ``--write`` puts the result into
benchmarks/RESULTS.md. MAGIC is read from ``magic04.csv`` in the folder that the environment variable GNOMON_DATA names.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SklearnMixture
from sklearn.preprocessing import StandardScaler

import gnomon
from gnomon import groups as g
from gnomon.mixture import GaussianMixture

torch.set_num_threads(1)

Array = NDArray[np.float64]
Split = tuple[Array, Array]
Model = Callable[[int, int], Any]
"""From the number of components and a seed to an estimator."""

HOW_TO_GET_MAGIC = (
    "MAGIC is not here: download https://archive.ics.uci.edu/dataset/159/magic+gamma+telescope, save it as magic04.csv "
    "with a line of column names, and set GNOMON_DATA to its folder. Only the synthetic part runs."
)
COMPONENTS = (3, 5, 8)
WANTED = -0.5  # per cent of EM's average log-likelihood
EQUAL = 1e-3  # average log-likelihoods that differ by less are equal
ENOUGH = 0.2  # seconds
REPEATS = 15


def structured(structure: str, **options: Any) -> Model:
    return lambda k, seed: GaussianMixture(k, structure=structure, random_state=seed, **options)


EM_MODELS: dict[str, Model] = {
    "EM, full": lambda k, seed: SklearnMixture(k, max_iter=1000, random_state=seed),
    "EM, full, tol=1e-6": lambda k, seed: SklearnMixture(k, max_iter=1000, tol=1e-6, random_state=seed),
    "EM, diag": lambda k, seed: SklearnMixture(k, covariance_type="diag", max_iter=1000, random_state=seed),
}
DENSE_MODELS: dict[str, Model] = {
    "Dense": structured("dense"),
    "Dense, precision": structured("dense", form="precision"),
    "Dense, precision, batches of 1024": structured("dense", form="precision", batch_size=1024),
}
STRUCTURES: dict[str, str] = {
    "Arrow, rank 2": "arrow:2",
    "LowRank, rank 2": "lowrank:2",
    "Heisenberg, 2 and 2": "heisenberg:2,2",
    "BlockDiagonal, 5": "block:5",
}
STRUCTURED_MODELS: dict[str, Model] = {
    "Diagonal": structured("diagonal"),
    "Dense, tied": structured("dense", tied=True),
    **{name: structured(structure) for name, structure in STRUCTURES.items()},
    **{
        f"{name}, precision": structured(structure, form="precision")
        for name, structure in STRUCTURES.items()
        if not structure.startswith("lowrank")
    },
}


# ---------------------------------------------------------------------- data
def magic() -> Split | None:
    """The ten features, standardized by the training rows, four fifths of all; None where the file is missing."""
    path = Path(os.environ.get("GNOMON_DATA", "")) / "magic04.csv"
    if not path.is_file():
        return None
    rows = np.loadtxt(path, delimiter=",", skiprows=1, usecols=range(10))
    rows = np.random.RandomState(0).permutation(rows)
    cut = 4 * len(rows) // 5
    return standardized(rows[:cut], rows[cut:])


def standardized(train: Array, test: Array) -> Split:
    """By the training rows: k-means then starts alike for all, since ours standardizes inside and EM does not."""
    scaler = StandardScaler().fit(train)
    return scaler.transform(train), scaler.transform(test)


def synthetic(group: g.Group, n: int, k: int = 3, seed: int = 0) -> Split:
    """Training and test rows of a mixture whose covariance factors are in the structure."""
    rng = np.random.RandomState(seed)
    if isinstance(group, g.LowRank):
        loadings = torch.from_numpy(rng.standard_normal((k, group.k, group.rank)))
        element = group.element(loadings, torch.from_numpy(rng.uniform(0.5, 1.5, (k, group.k))))
    else:
        element = group.from_dense(torch.from_numpy(rng.standard_normal((k, group.k, group.k)) + 1.5 * np.eye(group.k)))
    factors = group.to_dense(element).numpy()
    means = 2 * rng.standard_normal((k, group.k))

    def draw() -> Array:
        labels = rng.randint(k, size=n)
        return means[labels] + np.einsum("nij,nj->ni", factors[labels], rng.standard_normal((n, group.k)))

    return standardized(draw(), draw())


# ---------------------------------------------------------------------- measurements
def fit(model: Model, data: Split, k: int, seed: int) -> dict[str, float]:
    """What a fit reaches, and its CPU time. A short one is repeated, and the median counts."""
    train, test = data
    times: list[float] = []
    while not times or (sum(times) < ENOUGH and len(times) < REPEATS):
        estimator = model(k, seed)
        start = time.process_time()
        estimator.fit(train)
        times.append(time.process_time() - start)
    parameters = estimator._n_parameters() if isinstance(estimator, SklearnMixture) else estimator.n_parameters()
    return {
        "train": estimator.score(train),
        "test": estimator.score(test),
        "seconds": statistics.median(times),
        "iterations": estimator.n_iter_,
        "parameters": parameters,
    }


def load_optimizer() -> None:
    """What the first step of L-BFGS in a process loads (half a second of torch's own modules)."""
    point = gnomon.SPD(2)
    optimizer = gnomon.optim.LBFGS(point.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (point.matrix() - 2 * torch.eye(2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def compare(models: dict[str, Model], data: Split, k: int, seeds: range) -> list[dict[str, Any]]:
    """Every model from the same k-means starts; the models take turns."""
    fits: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    small = (data[0][:100], data[1])
    for model in models.values():  # what each loads at its first fit
        fit(model, small, k, 0)
    for seed in seeds:
        for name, model in models.items():
            fits[name].append(fit(model, data, k, seed))
    return [{"components": k, "model": name, "fits": results} for name, results in fits.items()]


def mean(result: dict[str, Any], what: str) -> float:
    return statistics.fmean(one[what] for one in result["fits"])


def as_table(results: list[dict[str, Any]]) -> str:
    header = ["components", "model", "parameters", "training", "held out", "CPU seconds", "iterations"]
    rows = [
        [
            str(r["components"]),
            r["model"],
            f"{mean(r, 'parameters'):.0f}",
            f"{mean(r, 'train'):.4f}",
            f"{mean(r, 'test'):.4f}",
            f"{mean(r, 'seconds'):.2f}",
            f"{mean(r, 'iterations'):.0f}",
        ]
        for r in results
    ]
    return report.table(header, rows)


def worst_against_em(results: list[dict[str, Any]], model: str) -> float:
    """The training likelihood of one fit minus EM's from the same start, in per cent, where that is smallest."""
    pairs = zip(*(_fits(results, name) for name in (model, "EM, full")), strict=True)
    return min(100 * (own["train"] - em["train"]) / abs(em["train"]) for own, em in pairs)


def _fits(results: list[dict[str, Any]], model: str) -> list[dict[str, float]]:
    return [one for r in results if r["model"] == model for one in r["fits"]]


def times_of_em(results: list[dict[str, Any]], model: str) -> float:
    """The CPU time of all fits over that of EM, at the default tol where that reaches the likelihood, else at 1e-6."""
    own, fast, slow = (_fits(results, name) for name in (model, "EM, full", "EM, full, tol=1e-6"))
    needed = [
        f["seconds"] if f["train"] >= o["train"] - EQUAL else s["seconds"]
        for o, f, s in zip(own, fast, slow, strict=True)
    ]
    return sum(one["seconds"] for one in own) / sum(needed)


def verdict(results: list[dict[str, Any]], model: str) -> str:
    gain = worst_against_em(results, model)
    return (
        f"- {model}: compared with EM from the same start, the training likelihood differs by {gain:+.3f}% in the "
        f"worst case (goal: above {WANTED}%). The fits take {times_of_em(results, model):.1f} times the CPU time that "
        "EM needs for the same likelihood (goal for full batches: 2)."
    )


# ---------------------------------------------------------------------- the two parts
def magic_part(data: Split, components: tuple[int, ...], seeds: range) -> tuple[str, list[dict[str, Any]]]:
    models = {**EM_MODELS, **DENSE_MODELS, **STRUCTURED_MODELS}
    results = [result for k in components for result in compare(models, data, k, seeds)]
    train, test = map(len, data)
    text = f"""**MAGIC**: {train} training and {test} held-out rows, standardized. Means over {len(seeds)} starts:

{as_table(results)}

{chr(10).join(verdict(results, name) for name in DENSE_MODELS)}"""
    return text, results


def breast_cancer_part(seeds: range) -> tuple[str, list[dict[str, Any]]]:
    """Thirty features on scales from 1e-3 to 1e3, two components."""
    X = load_breast_cancer().data
    models = {**EM_MODELS, **DENSE_MODELS, **STRUCTURED_MODELS}
    results = compare({m: models[m] for m in models if "batches" not in m}, standardized(X[::2], X[1::2]), 2, seeds)
    text = f"**Breast cancer**: standardized, every second row held out. Means over {len(seeds)} starts:"
    verdicts = [verdict(results, name) for name in ("Dense", "Dense, precision")]
    return "\n".join([f"{text}\n\n{as_table(results)}\n", *verdicts]), results


def synthetic_part(n: int, d: int, seeds: range) -> tuple[str, list[dict[str, Any]]]:
    texts, records = [], []
    for name, structure in STRUCTURES.items():
        data = synthetic(g.as_structure(structure, d), n)
        models = {**EM_MODELS, "Dense": structured("dense"), name: structured(structure)}
        results = compare(models, data, 3, seeds)
        gain = mean(results[-1], "test") - mean(next(r for r in results if r["model"] == "EM, diag"), "test")
        texts.append(
            f"**Data of the structure {name}**: {d} features, {n} training and {n} held-out rows, standardized. "
            f"Means over {len(seeds)} starts:\n\n"
            f"{as_table(results)}\n\n"
            f"- On held-out rows {name} is {gain:+.2f} above diagonal EM (goal: above 0).\n{verdict(results, 'Dense')}"
        )
        records.append({"structure": name, "results": results})
    return "\n\n".join(texts), records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three components and one start only")
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)

    load_optimizer()
    seeds = range(1 if options.quick else 3)
    synthetic_text, synthetic_records = synthetic_part(600, 20, seeds)
    cancer_text, cancer_records = breast_cancer_part(seeds)
    data = magic()
    magic_text, magic_records = HOW_TO_GET_MAGIC, list[dict[str, Any]]()
    if data is not None:
        magic_text, magic_records = magic_part(data, COMPONENTS[:1] if options.quick else COMPONENTS, seeds)
    text = f"""## Gaussian mixtures

`python benchmarks/mixture.py --write`, on {report.machine("scikit-learn", "numpy")}.

The tables have average log-likelihoods, and the CPU time of a fit with its k-means start. `EM` is scikit-learn's
mixture, with its default `tol=1e-3` unless the row says otherwise. The structure is that of the covariance's factor,
unless the row says precision.

{magic_text}

{cancer_text}

{synthetic_text}
"""
    print(text)
    if options.write:
        report.write(
            "mixture", text, {"magic": magic_records, "breast_cancer": cancer_records, "synthetic": synthetic_records}
        )


if __name__ == "__main__":
    main()
