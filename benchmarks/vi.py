"""Variational inference: gnomon.vi beside Pyro's guides and batch and match, on posteriors with reference draws.

    python benchmarks/vi.py [--methods NAME ...] [--posteriors NAME ...] [--again] [--write]

Each run is a line of benchmarks/vi.jsonl; runs that are there are not repeated. ``--write`` puts tables into
benchmarks/RESULTS.md and writes docs/results/vi.md. Data is read from the folder posteriordb in GNOMON_DATA.
The methods of BlackJAX run where the package blackjax is installed; no extra installs it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import vi_methods as methods
import vi_ours as ours
import vi_page

from gnomon.problems import posteriors
from gnomon.problems.posteriors import Posterior

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

OURS: dict[str, dict[str, Any]] = {
    "gnomon.vi": {},
    "gnomon.vi, momentum 0.5": {"momentum": 0.5},
    "gnomon.vi, momentum 0.9": {"momentum": 0.9},
    "gnomon.vi, rate 0.5": {"rate": 0.5},
    "gnomon.vi, rate 0.25": {"rate": 0.25},
    "gnomon.vi, rate 0.25, momentum 0.5": {"rate": 0.25, "momentum": 0.5},
    "gnomon.vi, diagonal": {"structure": "diagonal"},
    "gnomon.vi, full": {"structure": "full"},
}
BY_STRUCTURE = ("gnomon.vi, diagonal", "gnomon.vi, full")
"""On the largest radon model alone."""
MATCHING = ("batch and match", "batch and match, from the mode")
BEST = "best Gaussian"
STEPS = "gnomon.vi, a step"
PATHFINDER, BLACKJAX = "Pathfinder (BlackJAX)", "full rank (BlackJAX)"
WITH_BLACKJAX = (PATHFINDER, BLACKJAX) if find_spec("blackjax") else ()
METHODS = (*OURS, STEPS, BEST, *MATCHING, *methods.GUIDES, *WITH_BLACKJAX)
RUNS = Path(__file__).parent / "vi.jsonl"
Run = tuple[methods.Record, Callable[[Posterior], methods.Record]]
"""What identifies a run, and the run."""


LARGEST = "generated-poisson-100000"
HIERARCHICAL = (
    "GLMM_Poisson_data-GLMM_Poisson_model",
    "rats_data-rats_model",
    "radon_mn-radon_hierarchical_intercept_centered",
    "irt_2pl-irt_2pl",
    "GLMM_data-GLMM1_model",
    vi_page.RADON,
    "generated-poisson-1000",
    "lsat_data-lsat_model",
    LARGEST,
    "generated-item-response-100000",
)
"""Posteriors without reference draws, for which a method is judged by its bound."""


def applies(method: str, name: str) -> bool:
    """Tell whether a method runs on a posterior: without a reference, the default fit and Pyro's guides do."""
    if method == STEPS:
        return name == LARGEST
    if method in BY_STRUCTURE:
        return name == vi_page.RADON
    if name.endswith("-100000"):
        return method == "gnomon.vi"
    return name not in HIERARCHICAL or method in ("gnomon.vi", *methods.GUIDES)


def runs(method: str, name: str) -> Iterator[Run]:
    """The runs of a method on one posterior."""
    if method in methods.GUIDES:
        for rate in methods.RATES:
            label = {"method": method, "rate": rate, "seed": 0}
            yield label, partial(methods.pyro_guide, guide=method, rate=rate, seed=0)
    elif method in MATCHING:
        from_mode = method.endswith("mode")
        yield {"method": method, "seed": 0}, partial(methods.batch_and_match, seed=0, from_mode=from_mode)
    elif method in OURS:
        for seed in range(5 if method == "gnomon.vi" and not name.endswith("-100000") else 1):
            yield {"method": method, "seed": seed}, partial(ours.gnomon_fit, seed=seed, **OURS[method])
    elif method == PATHFINDER:
        import vi_blackjax

        yield {"method": method, "seed": 0}, partial(vi_blackjax.path, seed=0)
    elif method == BLACKJAX:
        import vi_blackjax

        for rate in methods.RATES:
            yield {"method": method, "rate": rate, "seed": 0}, partial(vi_blackjax.full_rank, rate=rate, seed=0)
    elif method == STEPS:
        for structure, gradients in (("arrow", "path"), ("arrow", "price"), ("low_rank", "path")):
            label = {"method": method, "variant": f"{structure}, {gradients}", "seed": 0}
            yield label, partial(ours.step_time, structure=structure, gradients=gradients)
    elif method == BEST:
        yield {"method": method, "seed": 0}, ours.best_gaussian
    else:
        raise ValueError(f"method {method!r} is not known; give one of {', '.join(METHODS)}")


def finished() -> list[methods.Record]:
    """The records of all runs so far."""
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.is_file() else []


def key(record: methods.Record) -> tuple[object, ...]:
    return tuple(record.get(part) for part in ("posterior", "method", "rate", "seed", "variant"))


def run(names: list[str], wanted: list[str]) -> None:
    """Run what is missing, method by method."""
    done = {key(record) for record in finished()}
    for method in wanted:
        for name in (name for name in names if applies(method, name)):
            todo = [
                (label, make) for label, make in runs(method, name) if key({"posterior": name, **label}) not in done
            ]
            posterior = posteriors.load(name) if todo else None
            for label, make in todo:
                assert posterior is not None
                record = {"posterior": name, **label, **make(posterior)}
                with RUNS.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print({part: record.get(part) for part in ("posterior", "method", "evaluations_to_target", "error")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--posteriors", nargs="*", default=None)
    parser.add_argument("--again", action="store_true", help="forget the runs of the given methods first")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.again:
        kept = [json.dumps(record) for record in finished() if record["method"] not in arguments.methods]
        RUNS.write_text("".join(f"{line}\n" for line in kept))
    names = posteriors.with_reference()
    run(arguments.posteriors or [*names, *HIERARCHICAL], arguments.methods)
    if arguments.write:
        dims = {name: posteriors.load(name).dim for name in (*names, *HIERARCHICAL)}
        vi_page.write(finished(), names, list(HIERARCHICAL), dims)


if __name__ == "__main__":
    main()
