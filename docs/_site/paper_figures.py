"""Writes docs/results/figures.md with its drawings, and docs/figures/*.json, from the runs of all figures.

gnomon reproduce all --output RUNS && python docs/_site/paper_figures.py RUNS
"""

import json
import re
import shutil
import sys
from pathlib import Path

from gnomon.experiments.figures.reproduce import EXPERIMENTS, LEGENDS

DOCS = Path(__file__).resolve().parents[1]
RESULTS, TABLES = DOCS / "results", DOCS / "figures"
BEGINNING = """# The paper's figures

This page has what the paper reports on synthetic problems (its Fig. a to d), what this code shows, and where both
differ. The formulas are on [another page](../paper.md). These commands make the runs, and `runs/NAME/index.html` with
the same tables and curves:

```bash
gnomon reproduce all          # about half an hour on one core; --quick: under two minutes, small sizes
gnomon reproduce fig-a        # one figure by the paper's name; its own name is metric-nearness
```

The paper gives neither the sizes nor the steps of its synthetic runs. Those below are ours. All runs are in float64.
The tables, with sizes, grids and versions, are kept in `docs/figures/*.json`.

"""
REMARKS = {
    "metric-nearness": """Our update and the exact heavy ball are the same method up to the truncated exponential, so
their curves coincide. With the largest step of the grid, 0.05, our update diverges if its steps are not bounded,
because the truncated exponential overestimates growth. With bounded steps the same step solves the problem to
rounding.""",
    "log-det": """**Momentum does not help log-det in this metric.** At the optimum the Hessian is the identity. So
Riemannian gradient descent at its own best step needs fewer iterations than every method with momentum at its best.
In the first charts momentum is ahead only because all methods share a step that is too small for those without it.""",
    "gmm": """The likelihood has several optima. Which one a method finds depends on its step more than on its
geometry, so small differences of the final loss say little. The distance from the submanifold is that of the last
diagonal entry of an augmented matrix from 1. So the ambient methods pass through points that are no mixture.""",
    "rosenbrock": """**Momentum makes the method work.** Structured NGD, which is the same without momentum, needs many
times the iterations on the mild form, and does not leave the plateau of the chained form. Most of the gain is from
momentum in the parameters. **In work the method is not ahead of everything**: an update takes 12 Hessian-vector
products. L-BFGS needs none, and solves both forms with the fewest gradients of all methods here. The paper compares
with BFGS and Adam only, and against iterations.""",
}
"""What a reader should know beside the sentences that are computed from the runs."""


def section(page: str, remark: str) -> str:
    """Return the page of one figure as a section, with a remark after the verdict."""
    body = page.rpartition("\n\n")[0]
    deeper = re.sub(r"^(#+ )", r"#\1", body, flags=re.MULTILINE)
    claim, verdict, charts = re.split(r"(^\*\*Verdict\*\*.*\n)", deeper, maxsplit=1, flags=re.MULTILINE)
    return f"{claim}{verdict}\n{remark}\n{charts}"


def tables(results: dict) -> str:
    """Return what is kept of the results of one figure: all but the curves."""
    return json.dumps({name: part for name, part in results.items() if name != "curves"}, indent=1) + "\n"


def main(runs: Path) -> None:
    pages = {name: (runs / name / f"{name}.md").read_text() for name in EXPERIMENTS}
    sections = [section(page, REMARKS[name]) for name, page in pages.items()]
    machine = pages["metric-nearness"].rpartition(f"{LEGENDS['iterations']} ")[2]
    footer = " ".join([*LEGENDS.values(), machine])
    (RESULTS / "figures.md").write_text(BEGINNING + "\n\n".join([*sections, footer]))
    for name in EXPERIMENTS:
        results = json.loads((runs / name / "results.json").read_text())
        (TABLES / f"{name}.json").write_text(tables(results))
        for drawing in (runs / name).glob("*.svg"):
            shutil.copy(drawing, RESULTS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
