"""What a training step costs: INGD in each structure beside SGD, AdamW, KFAC, singd, SOAP and Muon on four models.

    python benchmarks/steps.py [MODEL ...] [--rounds N] [--write]

The measurements of ``gnomon bench --limit``. ``--write`` puts them into benchmarks/RESULTS.md, beside those of models
that are not measured now, and the chart into docs/figures.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
from pathlib import Path

import report
import torch

from gnomon.experiments.bench import report as results
from gnomon.experiments.bench import run
from gnomon.experiments.bench.models import MODELS

torch.set_num_threads(1)

STORE = Path(__file__).with_name("steps.json")
CHART = Path(__file__).parent.parent / "docs" / "figures" / "bench.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is given")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each optimizer, at least 2")
    parser.add_argument("--output", type=Path, default=Path("bench"), help="folder for the charts of each model")
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")

    names = options.models or list(MODELS)
    reports = run.bench(names, [], rounds=options.rounds, with_limit=True, output=options.output)
    if options.write:
        data = results.as_data(reports)
        before = json.loads(STORE.read_text())["models"] if STORE.exists() else {}
        models = before | data["models"]
        data["models"] = {name: models[name] for name in MODELS if name in models}
        pages = [results.Page(m["title"], m["measured"], m["failures"]) for m in data["models"].values()]
        tables = "\n\n".join(results.markdown(page) for page in pages)
        made = f"`python benchmarks/steps.py --write`, on {report.machine('singd', 'pytorch_optimizer')}."
        note = "Muon multiplies in bfloat16, which is slow on CPUs without instructions for it."
        made += " The optimizers of a model take turns."
        text = f"## Training steps\n\n{made}\n\n{results.LEGEND}\n\n{note}\n\n{tables}"
        report.write("steps", text, data)
        results.chart(pages, CHART)


if __name__ == "__main__":
    main()
