"""Variational inference: gnomon.vi beside Pyro's guides and batch and match, on posteriors with reference draws.

    python benchmarks/vi.py [--methods NAME ...] [--posteriors NAME ...] [--write]

Each run is a line of benchmarks/vi.jsonl; runs that are there are not repeated. ``--write`` puts tables into
benchmarks/RESULTS.md and writes docs/results/vi.md. Data is read from the folder posteriordb in GNOMON_DATA.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import vi_methods as methods

from gnomon.problems import posteriors
from gnomon.problems.posteriors import Posterior

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

RUNS = Path(__file__).parent / "vi.jsonl"
Run = tuple[methods.Record, Callable[[Posterior], methods.Record]]
"""What identifies a run, and the run."""


def runs(method: str) -> Iterator[Run]:
    """The runs of a method on one posterior."""
    if method in methods.GUIDES:
        for rate in methods.RATES:
            yield (
                {"method": method, "rate": rate, "seed": 0},
                lambda posterior, rate=rate: methods.pyro_guide(posterior, method, rate, seed=0),
            )
    elif method in ("batch and match", "batch and match, from the mode"):
        from_mode = method.endswith("mode")
        yield {"method": method, "seed": 0}, lambda posterior: methods.batch_and_match(posterior, 0, from_mode)
    else:
        raise ValueError(f"method {method!r} is not known; give one of {', '.join(METHODS)}")


METHODS = ("batch and match", "batch and match, from the mode", *sorted(methods.GUIDES, reverse=True))


def finished() -> list[methods.Record]:
    """The records of all runs so far."""
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.is_file() else []


def key(record: methods.Record) -> tuple[object, ...]:
    return tuple(record.get(part) for part in ("posterior", "method", "rate", "seed", "variant"))


def run(names: list[str], wanted: list[str]) -> None:
    """Run what is missing, method by method."""
    done = {key(record) for record in finished()}
    for method in wanted:
        for name in names:
            todo = [(label, make) for label, make in runs(method) if key({"posterior": name, **label}) not in done]
            posterior = posteriors.load(name) if todo else None
            for label, make in todo:
                assert posterior is not None
                record = {"posterior": name, **label, **make(posterior)}
                with RUNS.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print({part: record[part] for part in ("posterior", "method", "evaluations_to_target", "error")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--posteriors", nargs="*", default=None)
    arguments = parser.parse_args()
    run(arguments.posteriors or posteriors.with_reference(), arguments.methods)


if __name__ == "__main__":
    main()
